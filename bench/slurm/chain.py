"""Seconds per stage of a chain of stages that do nothing, through our executor and through Snakemake's stock slurm executor.

python -m bench.slurm.chain --stock-python .venv-slurm/bin/python

Runs on the test cluster (root on Debian), with accounting. The stock executor polls once a second and finds the cluster by
/etc/slurm/slurm.conf, which is linked for the time of the benchmark. Times are the jobs' own: from one stage to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.minicluster import MiniCluster, install
from workflow.campaign.code import code_digest, snapshot, source_root
from workflow.campaign.plan import InputRef, Plan, StageSpec, write_plan
from workflow.manifest import Device, Hardware, write_json, write_manifest

HERE = Path(__file__).parent
STAGES = ("convert", "sft", "export")
ETC = Path("/etc/slurm/slurm.conf")
OURS = ("--profile", str(source_root() / "profiles/slurm"))
STOCK = (
    *("--executor", "slurm", "--jobs", "10", "--nolock", "--latency-wait", "60"),
    *("--seconds-between-status-checks", "1", "--slurm-init-seconds-before-status-checks", "1"),
    *("--default-resources", "slurm_partition=cuda", "runtime=5", "mem_mb=500"),
)


def main() -> None:
    """Measure both, alternating, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--stock-python", required=True, help="an interpreter that has the stock executor too"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/bench/slurm.json"))
    args = parser.parse_args()
    install()
    seconds: dict[str, list[float]] = {"ours": [], "stock": []}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, cluster(Path(folder)) as mini:
        for number in range(args.repetitions):
            for name, python, options in (
                ("ours", sys.executable, OURS),
                ("stock", args.stock_python, STOCK),
            ):
                seconds[name].append(chain(Path(folder, f"{name}{number}"), mini, python, options))
                print(f"{name}: {seconds[name][-1]:.2f} s a stage", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "seconds_per_stage": medians,
        "all": seconds,
        "ratio_to_stock": medians["ours"] / medians["stock"],
        "stock_options": " ".join(STOCK),
    }
    write_json(args.output, result)
    print(json.dumps(result, indent=2))


@contextmanager
def cluster(folder: Path) -> Iterator[MiniCluster]:
    """The test cluster, found through /etc too."""
    if ETC.exists() or ETC.is_symlink():
        raise SystemExit(f"{ETC} is there: this host belongs to a cluster")
    folder.chmod(0o755)  # munge wants its socket to be reached by all
    mini = MiniCluster(folder / "cluster", port=18900)
    mini.start()
    ETC.parent.mkdir(exist_ok=True)
    ETC.symlink_to(mini.conf)
    try:
        yield mini
    finally:
        ETC.unlink()
        mini.stop()


def chain(folder: Path, mini: MiniCluster, python: str, options: tuple[str, ...]) -> float:
    """One chain in an empty folder; mean seconds from one stage's start to the next one's."""
    folder.mkdir()
    plan = prepare(folder)
    command = [
        python,
        "-m",
        "snakemake",
        "--snakefile",
        str(HERE / "Snakefile"),
        *options,
        "--quiet",
        "rules",
    ]
    command += ["--config", f"plan={plan}", f"trivial={HERE / 'trivial'}", f"python={sys.executable}"]
    environment = os.environ | mini.environment | {"PYTHONPATH": str(source_root())}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    clock = [float(line.split()[1]) for line in (folder / "clock.txt").read_text().splitlines()]
    return (clock[-1] - clock[0]) / (len(clock) - 1)


def prepare(folder: Path) -> Path:
    """The plan, the copy of the source, and the manifests that the stages will publish."""
    specs: list[StageSpec] = []
    code = code_digest(source_root())
    for index, stage in enumerate(STAGES):
        device = Device(asked="cpu", computed="cpu", why="nothing is computed")
        specs.append(
            StageSpec(
                stage=stage,
                slug="nothing",
                version=1,
                identity=f"{index + 1:064x}"[::-1],
                learning_identity="0" * 64,
                config={},
                inputs={"model": InputRef(id=specs[-1].id)} if specs else {},
                device=device,
                folder=f"results/store/{stage}/nothing-{f'{index + 1:064x}'[::-1][:8]}",
            )
        )
    plan = Plan(
        campaign="nothing",
        code=code,
        environment="",
        options={"site": "mini"},
        stages={spec.id: spec for spec in specs},
        runs={},
    )
    for spec in specs:
        nothing = plan.manifest_of(
            spec, files={}, steps_planned=0, steps_done=0, hardware=Hardware(cpu=""), created=""
        )
        write_manifest(folder / f"manifests/{spec.stage}.json", nothing)
    snapshot(source_root(), code, folder / "results/.code")
    return write_plan(plan, folder / "results/nothing").relative_to(folder)


if __name__ == "__main__":
    main()
