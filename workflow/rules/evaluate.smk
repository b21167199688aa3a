# Greedy accuracy on held-out problems.
rule evaluate:
    input:
        unpack(inputs_of("evaluate")),
    output:
        manifest=f"{STORE}/evaluate/{{id}}/manifest.json",
    log:
        f"{STORE}/evaluate/{{id}}/log.txt",
    threads: cores_of("evaluate")
    resources:
        device=device_of("evaluate"),
        layout=layout_of("evaluate"),
    shell:
        stage_command("evaluate")
