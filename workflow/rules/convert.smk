# The base model, whatever its source, as verified safetensors with its tokenizer.
rule convert:
    output:
        manifest=f"{STORE}/convert/{{id}}/manifest.json",
    log:
        f"{STORE}/convert/{{id}}/log.txt",
    resources:
        device=device_of("convert"),
    shell:
        stage_command("convert")
