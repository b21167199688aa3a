# One campaign: snakemake --profile local --config campaign=demo seed=0 set='algorithm.lr=1e-4 engine=fsdp'
# Everything that can be wrong is refused here, before the first job; what depends on what stands in workflow/rules.
from snakemake.exceptions import WorkflowError

from workflow.campaign.head import REFUSALS, open_campaign
from workflow.cluster.states import job_is_final

try:
    HEAD = open_campaign(config)
except REFUSALS as error:
    raise WorkflowError(f"campaign refused: {error}") from None
PLAN = HEAD.plan


include: "workflow/rules/common.smk"
include: "workflow/rules/convert.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        rules.report.output,
        expand(f"{HEAD.folder}/{{run}}/run.json", run=PLAN.runs),
    localrule: True


onstart:
    try:
        HEAD.start(job_is_final, local=workflow.local_exec)
    except REFUSALS as error:
        raise WorkflowError(f"campaign refused: {error}") from None


onsuccess:
    print(HEAD.closing_words())


onerror:
    # What is finished is still shown, with what failed and where its log is. The exit code stays that of a failure.
    shell(f"{report_command()} --partial || true")
    print(HEAD.closing_words())
