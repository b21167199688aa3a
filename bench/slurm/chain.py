"""Seconds per stage of a chain of stages that do nothing, through our executor and through Snakemake's stock slurm executor.

python -m bench.slurm.chain --stock-python .venv-slurm/bin/python

Runs on the test cluster (root on Debian), with accounting. The stock executor waits ten seconds longer after each look at which no job
had ended, so beside looking at once and then every second, as far as it does, it is measured with a first look at which a job has
ended; the better of the two counts. It finds a cluster by /etc/slurm alone: all of this runs in a mount namespace of its own, where
the test cluster's files are there. Times are the jobs' own: from the start of one stage to that of the next.
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
from typing import NamedTuple

from tests.slurm.minicluster import MiniCluster, free_ports, install
from workflow.campaign.code import code_digest, snapshot, source_root
from workflow.campaign.plan import InputRef, Plan, StageSpec, write_plan
from workflow.manifest import Device, Hardware, write_json, write_manifest

HERE = Path(__file__).parent
PARALLEL = 20
"""Stages at once on both partitions, which have room for eight of them."""
ETC = Path("/etc/slurm")
OURS = ("--profile", str(source_root() / "profiles/slurm"))
STOCK = (
    *("--executor", "slurm", "--jobs", "10", "--nolock", "--latency-wait", "60"),
    *("--seconds-between-status-checks", "1"),
    *("--default-resources", "slurm_partition=cuda", "runtime=5", "mem_mb=4000"),
)
FIRST_LOOK = ("--slurm-init-seconds-before-status-checks", (1, 6))
"""Of the stock executor, in seconds after a submission or an end."""


class Start(NamedTuple):
    """When and where a stage started."""

    name: str
    at: float
    """Seconds since the epoch, by the clock of its node."""
    job: str
    partition: str


def main() -> None:
    """Measure both, alternating, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--stock-python", type=Path, required=True, help="an interpreter that has the stock executor too"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/bench/slurm.json"))
    parser.add_argument("--in-namespace", action="store_true", help="this process has its own mounts already")
    args = parser.parse_args()
    install()
    if not args.in_namespace:
        command = [sys.executable, "-m", "bench.slurm.chain", *sys.argv[1:], "--in-namespace"]
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *command])
    option, values = FIRST_LOOK
    executors = {"ours": (sys.executable, OURS)} | {
        f"stock {option} {value}": (str(args.stock_python.absolute()), (*STOCK, option, str(value)))
        for value in values
    }
    seconds: dict[str, list[float]] = {name: [] for name in executors}
    print(f"slurmdbd on; the stock executor with {' '.join(STOCK)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, cluster(Path(folder)) as mini:
        for number in range(args.repetitions):
            for index, (name, (python, options)) in enumerate(executors.items()):
                starts = run(Path(folder, f"{number}-{index}"), mini, python, options, chain())
                seconds[name].append((starts[-1].at - starts[0].at) / (len(starts) - 1))
                print(f"{name}: {seconds[name][-1]:.2f} s a stage", flush=True)
        starts = run(Path(folder, "parallel"), mini, sys.executable, OURS, parallel(PARALLEL))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "seconds_per_stage": medians,
        "all": seconds,
        "ratio_to_stock": medians["ours"] / min(medians[name] for name in executors if name != "ours"),
        "stock_options": " ".join(STOCK),
        f"seconds_from_first_to_last_of_{PARALLEL}": starts[-1].at - starts[0].at,
    }
    write_json(args.output, result)
    print(json.dumps(result, indent=2))


@contextmanager
def cluster(folder: Path) -> Iterator[MiniCluster]:
    """The test cluster, found by /etc/slurm too."""
    folder.chmod(0o755)  # munge wants its socket to be reached by all
    mini = MiniCluster(folder / "cluster", port=free_ports())
    (folder / "etc").mkdir()
    (folder / "etc/slurm.conf").symlink_to(mini.conf)
    ETC.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "--bind", folder / "etc", ETC], check=True
    )  # first: the nodes copy what is mounted
    mini.start()
    try:
        yield mini
    finally:
        mini.stop()


def run(
    folder: Path, mini: MiniCluster, python: str, options: tuple[str, ...], specs: list[StageSpec]
) -> list[Start]:
    """All stages in an empty folder; when and where each started, in that order."""
    folder.mkdir()
    plan = prepare(folder, specs)
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
    lines = [line.split() for line in (folder / "clock.txt").read_text().splitlines()]
    return sorted(
        (Start(name, float(at), job, partition) for name, at, job, partition in lines), key=lambda s: s.at
    )


def prepare(folder: Path, specs: list[StageSpec]) -> Path:
    """The plan, the copy of the source, and the manifests that the stages will publish."""
    code = code_digest(source_root())
    plan = Plan(
        campaign="nothing",
        code=code,
        environments={"cpu": "", "npu": ""},
        options={"site": "mini"},
        stages={spec.id: spec for spec in specs},
        runs={},
    )
    for spec in specs:
        nothing = plan.manifest_of(
            spec, files={}, steps_planned=0, steps_done=0, hardware=Hardware(cpu=""), created=""
        )
        write_manifest(folder / f"manifests/{spec.name}.json", nothing)
    snapshot(source_root(), code, folder / "results/.code")
    return write_plan(plan, folder / "results/nothing").relative_to(folder)


def chain() -> list[StageSpec]:
    """Three stages, each from the one before."""
    specs: list[StageSpec] = []
    for number, stage in enumerate(("convert", "sft", "export"), 1):
        specs.append(_stage(number, stage, "cpu", specs[-1].id if specs else None))
    return specs


def parallel(count: int) -> list[StageSpec]:
    """Stages that know nothing of each other, by turns on either partition."""
    return [_stage(number, "convert", ("cpu", "npu")[number % 2]) for number in range(1, count + 1)]


def _stage(number: int, stage: str, device: str, before: str | None = None) -> StageSpec:
    identity = f"{number:064x}"[::-1]
    return StageSpec(
        stage=stage,
        slug="nothing",
        version=1,
        identity=identity,
        learning_identity="0" * 64,
        config={},
        inputs={} if before is None else {"model": InputRef(id=before)},
        device=Device(asked=device, computed="cpu", why="nothing is computed"),
        folder=f"results/store/{stage}/nothing-{identity[:8]}",
    )


if __name__ == "__main__":
    main()
