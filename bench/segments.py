"""What cuts cost: a run of the demo in one segment and in five, each a job of the local workflow, in device time.

    python -m bench.segments            # short segments; for segments of three minutes computed from what they took
    python -m bench.segments --whole    # measured: every segment three minutes of steps and more; 20 minutes for PPO on two cores

Both trainings go on at the same time, so that whatever else the machine does meets both. They start from one SFT model and must have
learnt the same bits. There is no stage server, as on a cluster: every job imports its framework. Evaluations, which a run has after each
segment, are no part of it.

``overhead_seconds`` of a segment is all of its time but its steps at their mean time without the first: start (of that, load), what
the first step takes longer, save, publication. ``computed_ratio`` is what follows for segments of ``--of`` seconds of steps.
``device_seconds`` begin when a job's Python runs and has read the plan; ``command_seconds`` are those of the command ``snakemake``, with
planning and every start of Python.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
FEWEST = 4
"""Steps of a segment, so that their mean says something."""
TRIAL = 6
"""Steps from which it is known how long one takes: more than the critic's alone."""
SPARE = 1.15
"""Steps may become faster than those of the trial."""

CAMPAIGN = """\
name: segments
base: demo
segments: {segments}
common: [algorithm.steps={steps}]
runs: {{{run}: []}}
"""


def main() -> None:
    """Measure, write one JSON file and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="ppo", help="of the campaign demo")
    parser.add_argument("--of", type=float, default=180.0, help="seconds of steps of a segment")
    parser.add_argument("--whole", action="store_true", help="segments of that length, none shorter")
    parser.add_argument("--steps", type=int, help="of a segment; as many as take that long when not given")
    parser.add_argument("--output", type=Path, help="results/bench/segments.json, or segments-whole.json")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 2:
        parser.error("--steps must be at least 2: the first of a segment is not counted")
    output = args.output or Path(f"results/bench/segments{'-whole' if args.whole else ''}.json")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as made:
        one, cut = measure(Path(made).resolve(), args.run, args.of if args.whole else SHORT, args.steps)
        refuse_other_bits(one, cut)
        result = {"run": args.run, **compared(segments_of(one), segments_of(cut), args.of)}
    result["command_seconds"] = {"one": one.command_seconds, "cut": cut.command_seconds}
    write_json(output, result)
    print(json.dumps(result, indent=2))


@dataclass
class Training:
    """One training of a run of the demo, and the workflow that computes it."""

    campaign: Campaign
    spec: StageSpec
    command_seconds: float = 0.0

    @classmethod
    def planned(cls, folder: Path, run: str, steps: int, segments: int) -> Training:
        """One in ``folder``, whose workflow makes what leads to the last state and nothing else."""
        folder.mkdir(exist_ok=True)
        file = folder / "campaign.yaml"
        file.write_text(CAMPAIGN.format(run=run, steps=steps, segments=segments))
        words = {"campaign": str(file), "site": "local"}
        with chdir(folder):
            plan, _ = plan_campaign(read_options(words), source_root())
        spec = plan.stages[plan.runs[run].stages["train"]]
        asked = [f"{name}={value}" for name, value in words.items()]
        # After the options, what is to be made.
        return cls(Campaign(folder, [*asked, "--", spec.manifest(steps)], environment={VARIABLE: ""}), spec)

    @property
    def state(self) -> Path:
        """The folder of the last state."""
        return self.campaign.folder / self.spec.output_folder(self.spec.steps)

    @property
    def step_seconds(self) -> list[float]:
        """Of all steps."""
        return [
            line["seconds"] for line in read_metrics(self.campaign.folder / self.spec.folder / METRICS_FILE)
        ]


def measure(folder: Path, run: str, seconds: float, steps: int | None) -> tuple[Training, Training]:
    """The run in one segment, and in ``SEGMENTS`` of ``steps`` each, or of as many as take ``seconds``."""
    trial = Training.planned(folder / "trial", run, TRIAL, 1)
    complete(trial)
    usual = fmean(trial.step_seconds[TRIAL // 2 :])
    total = SEGMENTS * (steps or max(math.ceil(SPARE * seconds / usual), FEWEST))
    one, cut = folder / "one", folder / "cut"
    for copy in (one, cut):
        shutil.copytree(trial.campaign.folder, copy)  # for its SFT model
    trainings = Training.planned(one, run, total, 1), Training.planned(cut, run, total, SEGMENTS)
    complete(*trainings)
    return trainings


def complete(*trainings: Training) -> None:
    """Run the workflows of all at the same time.

    Raises:
        SystemExit: one fails.
    """
    begun = time.monotonic()
    try:
        for training in trainings:
            print(f"{training.spec.name}: segments end at {training.spec.cuts}", flush=True)
            training.campaign.start()

        def ended(training: Training) -> None:
            if training.campaign.wait():
                said = training.campaign.output.read_text(encoding="utf-8")
                raise SystemExit(f"the training failed:\n{said[-4000:]}")
            training.command_seconds = time.monotonic() - begun

        with ThreadPoolExecutor() as pool:
            list(pool.map(ended, trainings))
    finally:
        for training in trainings:
            training.campaign.stop()


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
        manifest = read_manifest(training.campaign.folder / training.spec.manifest(end))
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
    sides = (cut, one)
    device = [sum(segment["device_seconds"] for segment in side) for side in sides]
    whole = [SEGMENTS * seconds + sum(segment["overhead_seconds"] for segment in side) for side in sides]
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
