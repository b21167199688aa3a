# What the rules share: every rule is one stage, its wildcard {id} names a folder of the store, and the plan answers the rest.
import sys
from shlex import quote

STORE = "results/store"
# The source that jobs run is the copy that was made when the campaign started, not what is being edited.
PYTHON = (
    f"PYTHONSAFEPATH=1 PYTHONPATH={quote(str(HEAD.code))}:. {quote(sys.executable)}"
)


wildcard_constraints:
    id=r"[A-Za-z0-9._-]+-[0-9a-f]{8}",
    step=r"[0-9]+",
    run=r"[A-Za-z0-9._-]+",


def planned(stage, wildcards):
    """The stage that a job is for."""
    return PLAN.find(stage, wildcards.id)


def inputs_of(stage):
    """Input function: the manifests that a stage starts from, by name."""

    def manifests(wildcards):
        spec = planned(stage, wildcards)
        return {name: PLAN.input_manifest(ref) for name, ref in spec.inputs.items()}

    return manifests


def ranks_of(stage):
    """Threads: one per rank, times the threads of a rank."""

    def threads(wildcards):
        spec = planned(stage, wildcards)
        return spec.world_size * spec.threads

    return threads


def device_of(stage):
    """Resource: the device key."""
    return lambda wildcards: planned(stage, wildcards).device.computed


def layout_of(stage):
    """Resource: the parallel sizes that are not 1, such as dp2."""
    return lambda wildcards: planned(stage, wildcards).layout_text


def stage_command(stage):
    """The shell command of a stage's job."""
    step = " --step {params.step}" if stage == "train" else ""
    return (
        f"OMP_NUM_THREADS={{params.threads}} {PYTHON} -m workflow.stages {stage}"
        f" --plan {HEAD.path} --id {{wildcards.id}}{step}"
    )


def threads_of(stage):
    """Parameter: CPU threads of each rank."""
    return lambda wildcards: planned(stage, wildcards).threads


def report_command():
    """The shell command that writes the campaign's report, summary and event files."""
    return f"{PYTHON} -m workflow.stages.report --plan {HEAD.path}"
