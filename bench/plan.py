"""What planning costs: a cold dry run of 200 runs x 20 stages beside a bare Snakemake chain of the same size, in CPU time.

Ours is planned for this host, and once more with placement: for the site ``mini``, by ``--profile slurm`` with its executor.

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
    measure = {
        "ours": plan_campaign,
        "with_placement": lambda: plan_campaign("slurm", "site=mini"),
        "bare": plan_bare,
    }
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in measure}
    for _ in range(args.repeat):
        for name, function in measure.items():
            measured[name].append(function())
    result = compare({name: min(values, key=cpu) for name, values in measured.items()})
    result["all_cpu_seconds"] = {name: [*map(cpu, values)] for name, values in measured.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def cpu(measured: dict[str, Any]) -> float:
    """User and system time."""
    return measured["cpu_seconds"]


def compare(least: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The measurements and their ratios to the bare chain's."""
    ratio = {name: round(cpu(least[name]) / cpu(least["bare"]), 3) for name in ("ours", "with_placement")}
    return {
        "runs": RUNS,
        "stages_per_run": STAGES,
        **least,
        "ratio_to_bare": ratio["ours"],
        "ratio_with_placement": ratio["with_placement"],
    }


def plan_campaign(profile: str = "local", *words: str) -> dict[str, Any]:
    """Dry run of a generated campaign.

    Args:
        words: of ``--config``.
    """
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "campaign.yaml"
        file.write_text(
            CAMPAIGN.format(runs="\n".join(f"  seed{seed}: [seed={seed}]" for seed in range(RUNS)))
        )
        return dry_run(Path(made), ROOT / "Snakefile", profile, "--config", f"campaign={file}", *words)


def plan_bare() -> dict[str, Any]:
    """Dry run of a chain of rules that do nothing."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "Snakefile"
        file.write_text(BARE.format(runs=RUNS, last=STAGES))
        return dry_run(Path(made), file)


def dry_run(folder: Path, snakefile: Path, profile: str = "local", *options: str) -> dict[str, Any]:
    """CPU seconds, peak memory and loaded frameworks of ``snakemake --dry-run`` in ``folder``.

    Raises:
        RuntimeError: with its output, when it fails.
    """
    loaded, log = folder / "loaded.json", folder / "log.txt"
    command = [sys.executable, "-c", SNAKEMAKE.format(frameworks=FRAMEWORKS), str(loaded)]
    command += ["--snakefile", str(snakefile), "--directory", str(folder), "--profile"]
    command += [str(ROOT / "profiles" / profile)]
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
