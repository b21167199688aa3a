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
