# What people look at: a folder of links per run, and one report per campaign.
rule run:
    input:
        plan=HEAD.path,
        manifests=from_wildcards(lambda wildcards: PLAN.last_manifests(wildcards.run)),
    output:
        view=f"{HEAD.folder}/{{run}}/run.json",
    log:
        f"{HEAD.folder}/{{run}}/run.log",
    localrule: True
    shell:
        f"{PYTHON} -m workflow.campaign.view --plan {HEAD.path} --run {{wildcards.run}} 2> {{log}}"


rule report:
    input:
        plan=HEAD.path,
        runs=expand(f"{HEAD.folder}/{{run}}/run.json", run=PLAN.runs),
    output:
        html=report(
            f"{HEAD.folder}/report.html",
            category=PLAN.campaign,
            labels={"content": "runs, curves, provenance"},
        ),
        summary=f"{HEAD.folder}/summary.json",
    log:
        f"{HEAD.folder}/report.log",
    localrule: True
    shell:
        f"{report_command()} 2> {{log}}"
