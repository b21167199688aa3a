# Supervised fine-tuning, once for all runs that share it; then RL, one job per segment.
rule sft:
    input:
        unpack(inputs_of("sft")),
    output:
        manifest=f"{STORE}/sft/{{id}}/manifest.json",
    log:
        f"{STORE}/sft/{{id}}/log.txt",
    threads: ranks_of("sft")
    resources:
        device=device_of("sft"),
        layout=layout_of("sft"),
    params:
        threads=threads_of("sft"),
    shell:
        stage_command("sft")


def train_inputs(wildcards):
    """The model that training starts from, and the state at which the segment before this one ended."""
    spec = planned("train", wildcards)
    manifests = inputs_of("train")(wildcards)
    earlier = [cut for cut in spec.cuts if cut < int(wildcards.step)]
    return manifests | ({"state": spec.manifest(earlier[-1])} if earlier else {})


# The working folder, with the states inside a segment, is no output: Snakemake would remove it with a failed job.
rule train:
    input:
        unpack(train_inputs),
    output:
        manifest=f"{STORE}/train/{{id}}/step{{step}}/manifest.json",
    log:
        f"{STORE}/train/{{id}}/log-step{{step}}.txt",
    threads: ranks_of("train")
    resources:
        device=device_of("train"),
        layout=layout_of("train"),
    params:
        step=lambda wildcards: int(wildcards.step),
        threads=threads_of("train"),
    shell:
        stage_command("train")
