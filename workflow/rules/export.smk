# The trained model as a Hugging Face folder.
rule export:
    input:
        unpack(inputs_of("export")),
    output:
        manifest=f"{STORE}/export/{{id}}/manifest.json",
    log:
        f"{STORE}/export/{{id}}/log.txt",
    resources:
        device=device_of("export"),
    shell:
        stage_command("export")


# The same model as Megatron's distributed checkpoint (conversion.megatron=true).
rule megatron:
    input:
        unpack(inputs_of("megatron")),
    output:
        manifest=f"{STORE}/megatron/{{id}}/manifest.json",
    log:
        f"{STORE}/megatron/{{id}}/log.txt",
    threads: cores_of("megatron")
    resources:
        device=device_of("megatron"),
    shell:
        stage_command("megatron")
