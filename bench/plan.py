"""What planning costs: a cold dry run of 200 runs x 20 stages beside a bare Snakemake chain of the same size, in CPU time.

    python -m bench.plan --output results/bench/plan.json

Each is a process of its own in an empty folder. Both report which frameworks they had loaded at their end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUNS, STAGES = 200, 20
FRAMEWORKS = ("torch", "transformers", "ray", "tensordict")
ROOT = Path(__file__).resolve().parent.parent

# convert, sft, 8 segments, 9 evaluations and export are 20 stages; another seed shares none of them.
CAMPAIGN = """\
name: bench-plan
common: [model=micro-qwen3, algorithm.steps=8]
segments: 8
runs:
{runs}
"""

# As many jobs: the record of a run is one more.
BARE = """\
rule all:
    input:
        expand("bare/{{run}}/{last}", run=range({runs})),

rule step:
    input:
        lambda wildcards: [f"bare/{{wildcards.run}}/{{int(wildcards.stage) - 1}}"] if int(wildcards.stage) else [],
    output:
        "bare/{{run}}/{{stage}}",
    log:
        "bare/{{run}}/{{stage}}.log",
    shell:
        "touch {{output}}"
"""

# The same entry point as the command's, and what is loaded when it is done.
SNAKEMAKE = """\
import json, sys
from snakemake.cli import main
try:
    main(sys.argv[2:])
finally:
    json.dump([name for name in {frameworks} if name in sys.modules], open(sys.argv[1], "w"))
"""


def main() -> int:
    """Measure both, write the comparison, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/bench/plan.json"))
    parser.add_argument(
        "--repeat", type=int, default=3, help="measurements of each, taken in turn; the least counts"
    )
    args = parser.parse_args()
    ours, bare = [], []
    for _ in range(args.repeat):
        ours.append(plan_campaign())
        bare.append(plan_bare())
    result = compare(min(ours, key=cpu), min(bare, key=cpu))
    result["all_cpu_seconds"] = {"ours": [*map(cpu, ours)], "bare": [*map(cpu, bare)]}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def cpu(measured: dict[str, Any]) -> float:
    """User and system time."""
    return measured["cpu_seconds"]


def compare(ours: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    """Both measurements and their ratio."""
    return {
        "runs": RUNS,
        "stages_per_run": STAGES,
        "ours": ours,
        "bare": bare,
        "ratio_to_bare": round(cpu(ours) / cpu(bare), 3),
    }


def plan_campaign() -> dict[str, Any]:
    """Dry run of a generated campaign."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "campaign.yaml"
        file.write_text(
            CAMPAIGN.format(runs="\n".join(f"  seed{seed}: [seed={seed}]" for seed in range(RUNS)))
        )
        return dry_run(Path(made), ROOT / "Snakefile", "--config", f"campaign={file}")


def plan_bare() -> dict[str, Any]:
    """Dry run of a chain of rules that do nothing."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "Snakefile"
        file.write_text(BARE.format(runs=RUNS, last=STAGES))
        return dry_run(Path(made), file)


def dry_run(folder: Path, snakefile: Path, *options: str) -> dict[str, Any]:
    """CPU seconds, peak memory and loaded frameworks of ``snakemake --dry-run`` in ``folder``.

    Raises:
        RuntimeError: with its output, when it fails.
    """
    loaded, log = folder / "loaded.json", folder / "log.txt"
    profile = ROOT / "profiles" / "local"
    command = [sys.executable, "-c", SNAKEMAKE.format(frameworks=FRAMEWORKS), str(loaded)]
    command += ["--snakefile", str(snakefile), "--directory", str(folder), "--profile", str(profile)]
    command += ["--dry-run", "--quiet", "all", *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{snakefile}: the dry run failed:\n{log.read_text()[-4000:]}")
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_memory_mb": round(usage.ru_maxrss / 1024),
        "frameworks_loaded": json.loads(loaded.read_text()),
    }


if __name__ == "__main__":
    sys.exit(main())
