# Supervised fine-tuning, once for all runs that share it; then RL, one job per segment.
rule sft:
    input:
        unpack(inputs_of("sft")),
    output:
        manifest=f"{STORE}/sft/{{id}}/manifest.json",
    log:
        f"{STORE}/sft/{{id}}/log.txt",
    threads: cores_of("sft")
    resources:
        device=device_of("sft"),
        layout=layout_of("sft"),
    shell:
        stage_command("sft")


# The working folder, with the states inside a segment, is no output: Snakemake would remove it with a failed job.
rule train:
    input:
        unpack(train_inputs()),
    output:
        manifest=f"{STORE}/train/{{id}}/step{{step}}/manifest.json",
    log:
        f"{STORE}/train/{{id}}/log-step{{step}}.txt",
    threads: cores_of("train")
    resources:
        device=device_of("train"),
        layout=layout_of("train"),
    shell:
        stage_command("train")
