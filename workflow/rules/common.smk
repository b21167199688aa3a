# What the rules share: every rule is one stage, its wildcard {id} names a folder of the store, and the plan answers the rest.
import sys
from inspect import signature
from shlex import quote

STORE = "results/store"
SITE = HEAD.site
# The source that jobs run is the copy that was made when the campaign started, not what is being edited.
PYTHON = (
    f"PYTHONSAFEPATH=1 PYTHONPATH={quote(str(HEAD.code))}:. {quote(sys.executable)}"
)


wildcard_constraints:
    id=r"[A-Za-z0-9._-]+-[0-9a-f]{8}",
    step=r"[0-9]+",
    run=r"[A-Za-z0-9._-]+",


def from_wildcards(function):
    """Store the signature that Snakemake would inspect anew for every job."""
    function.__signature__ = signature(function)
    return function


def inputs_of(stage):
    """Input function: the manifests that a stage starts from, by name."""

    @from_wildcards
    def manifests(wildcards):
        spec = PLAN.find(stage, wildcards.id)
        return {name: PLAN.input_manifest(ref) for name, ref in spec.inputs.items()}

    return manifests


def train_inputs():
    """Input function: the model that training starts from, and the state at which the segment before this one ended."""
    models = inputs_of("train")

    @from_wildcards
    def manifests(wildcards):
        spec = PLAN.find("train", wildcards.id)
        earlier = [cut for cut in spec.cuts if cut < int(wildcards.step)]
        return models(wildcards) | (
            {"state": spec.manifest(earlier[-1])} if earlier else {}
        )

    return manifests


def planned(stage, value):
    """What ``value`` says of a job's stage; the answer itself where all jobs of the stage agree, as Snakemake asks often."""
    answers = {value(spec) for spec in PLAN.stages.values() if spec.stage == stage}
    if len(answers) == 1:
        return answers.pop()
    return from_wildcards(lambda wildcards: value(PLAN.find(stage, wildcards.id)))


def cores_of(stage):
    """Threads: one per rank, times the threads of a rank."""
    return planned(stage, lambda spec: spec.world_size * spec.threads)


def device_of(stage):
    """Resource: the device key, by which the site chooses the partition."""
    return planned(stage, lambda spec: SITE.key_of(spec.device))


def layout_of(stage):
    """Resource: the parallel sizes that are not 1, such as dp2."""
    return planned(stage, lambda spec: spec.layout_text)


def stage_command(stage):
    """The shell command of a stage's job."""
    step = " --step {wildcards.step}" if stage == "train" else ""
    return f"{PYTHON} -m workflow.stages {stage} --plan {HEAD.path} --id {{wildcards.id}}{step}"


def report_command():
    """The shell command that writes the campaign's report, summary and event files."""
    return f"{PYTHON} -m workflow.stages.report --plan {HEAD.path}"
