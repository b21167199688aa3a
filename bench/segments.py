"""What cuts cost: a run of the demo in one segment and in five, each a job of the local workflow, in device time.

    python -m bench.segments            # short segments; for segments of three minutes computed from what they took
    python -m bench.segments --whole    # measured: segments of three minutes of steps and more, half an hour for PPO

There is no stage server, as on a cluster: every job imports its framework. Both trainings start from one SFT model and must have learnt
the same bits. Evaluations, which a run has after each segment, are no part of it.

``overhead_seconds`` of a segment is all of its time but its steps at their mean time without the first: start (of that, load), what
the first step takes longer, save, publication. ``computed_ratio`` is what follows from them for segments of ``--of`` seconds of steps.
``device_seconds`` begin when a job's Python runs and has read the plan. ``command_seconds`` and ``cpu_seconds`` are those of the whole
command ``snakemake``, with planning and every start of Python; the second (not all there is for a run on Ray) tells apart what a busy
machine did to the first.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import tempfile
import time
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.pace import LOAD_SECONDS, SAVE_SECONDS, START_SECONDS
from workflow.campaign.plan import StageSpec
from workflow.campaign.stage_server import VARIABLE
from workflow.compare import compare, find_pairs
from workflow.drill.campaign import Campaign
from workflow.manifest import read_manifest, write_json
from workflow.rl.metrics import METRICS_FILE, read_metrics

SEGMENTS = 5
SHORT = 15.0
"""Seconds of steps of a short segment."""
TRIAL = 6
"""Steps from which it is known how long one takes: more than the critic's alone."""
SPARE = 1.15
"""Steps may become faster than those of the trial."""
FEWEST = 4
"""Steps of a segment, so that their mean says something."""

CAMPAIGN = """\
name: segments
base: demo
segments: {segments}
common: [algorithm.steps={steps}]
runs: {{{run}: []}}
"""


@dataclass(frozen=True)
class Training:
    """One that is complete."""

    folder: Path
    """Where the workflow ran."""
    spec: StageSpec
    command_seconds: float
    cpu_seconds: float
    """User and system time of the workflow and its jobs."""

    @property
    def state(self) -> Path:
        """The folder of its last state."""
        return self.folder / self.spec.output_folder(self.spec.steps)

    @property
    def step_seconds(self) -> list[float]:
        """Of all its steps."""
        return [line["seconds"] for line in read_metrics(self.folder / self.spec.folder / METRICS_FILE)]


def main() -> None:
    """Measure, write one JSON file and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="ppo", help="of the campaign demo")
    parser.add_argument("--of", type=float, default=180.0, help="seconds of steps of a segment")
    parser.add_argument("--whole", action="store_true", help="segments of that length, none shorter")
    parser.add_argument("--output", type=Path, help="results/bench/segments.json, or segments-whole.json")
    args = parser.parse_args()
    output = args.output or Path(f"results/bench/segments{'-whole' if args.whole else ''}.json")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        one, cut = measure(Path(made).resolve(), args.run, args.of if args.whole else SHORT)
        refuse_other_bits(one, cut)
        result = {"run": args.run, **compared(segments_of(one), segments_of(cut), args.of)}
    for name in ("command_seconds", "cpu_seconds"):
        result[name] = {"one": getattr(one, name), "cut": getattr(cut, name)}
    write_json(output, result)
    print(json.dumps(result, indent=2))


def measure(folder: Path, run: str, seconds: float) -> tuple[Training, Training]:
    """The run in one segment, and in ``SEGMENTS`` of ``seconds`` of steps each."""
    trial = train(folder / "trial", run, TRIAL, 1)
    usual = fmean(trial.step_seconds[TRIAL // 2 :])
    steps = SEGMENTS * max(math.ceil(SPARE * seconds / usual), FEWEST)
    trainings = []
    for segments in (1, SEGMENTS):
        there = folder / f"segments{segments}"
        shutil.copytree(trial.folder, there)  # for its SFT model
        trainings.append(train(there, run, steps, segments))
    return trainings[0], trainings[1]


def train(folder: Path, run: str, steps: int, segments: int) -> Training:
    """What the workflow trains in ``folder``, up to the last state and no further.

    Raises:
        SystemExit: it fails.
    """
    folder.mkdir(exist_ok=True)
    file = folder / "campaign.yaml"
    file.write_text(CAMPAIGN.format(run=run, steps=steps, segments=segments))
    words = {"campaign": str(file), "site": "local"}
    with chdir(folder):
        plan, _ = plan_campaign(read_options(words), source_root())
    spec = plan.stages[plan.runs[run].stages["train"]]
    asked = [f"{name}={value}" for name, value in words.items()]
    # After the options, what is to be made.
    campaign = Campaign(folder, [*asked, "--", spec.manifest(steps)], environment={VARIABLE: ""})
    print(f"{run}: {steps} steps in {segments} segments", flush=True)
    begun, cpu = time.monotonic(), children_cpu_seconds()
    campaign.start()
    try:
        if campaign.wait():
            raise SystemExit(f"the training failed:\n{campaign.output.read_text()[-4000:]}")
    finally:
        campaign.stop()
    return Training(folder, spec, time.monotonic() - begun, children_cpu_seconds() - cpu)


def children_cpu_seconds() -> float:
    """Of all processes that this one has waited for, and those that they have."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def refuse_other_bits(one: Training, cut: Training) -> None:
    """Compare the last states and the curves.

    Raises:
        SystemExit: a bit is different.
    """
    findings = [finding for pair in find_pairs(one.state, cut.state) for finding in compare(pair).findings]
    if other := [f"{finding.part} {finding}" for finding in findings if finding.verdict != "equal"]:
        raise SystemExit(f"cut, it learns something else: {', '.join(other)}")


def segments_of(training: Training) -> list[dict[str, Any]]:
    """Of each segment what its manifest and the curve say of its time."""
    seconds, begin, segments = training.step_seconds, 0, []
    for end in training.spec.cuts:
        manifest = read_manifest(training.folder / training.spec.manifest(end))
        first, *others = seconds[begin:end]
        whole = manifest.device_seconds.used / manifest.world_size
        segments.append(
            {
                "steps": end - begin,
                "device_seconds": manifest.device_seconds.used,
                "step_seconds": sum((first, *others)),
                **{name: manifest.extra[name] for name in (START_SECONDS, LOAD_SECONDS, SAVE_SECONDS)},
                "first_step_more_seconds": first - fmean(others),
                "overhead_seconds": whole - (end - begin) * fmean(others),
            }
        )
        begin = end
    return segments


def compared(one: list[dict[str, Any]], cut: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The segments of both trainings and the ratios of their device times: as measured, and computed for segments of ``seconds``."""
    device = [sum(segment["device_seconds"] for segment in training) for training in (cut, one)]
    whole = [
        SEGMENTS * seconds + sum(segment["overhead_seconds"] for segment in training)
        for training in (cut, one)
    ]
    return {
        "ratio": device[0] / device[1],
        "shortest_segment_step_seconds": min(segment["step_seconds"] for segment in cut),
        "computed_ratio": whole[0] / whole[1],
        "computed_for_step_seconds": seconds,
        "one": one,
        "cut": cut,
    }


if __name__ == "__main__":
    main()
