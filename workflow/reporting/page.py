"""``report.html``: one page that needs nothing but itself. What it shows is chosen here, how it looks in ``page.html.j2``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from workflow.reporting.charts import LARGE, Line, Part, line_chart, range_bar, stacked_bars
from workflow.reporting.collect import Campaign, Evaluation, Run
from workflow.reporting.model_card import percent

COLOURS = 8
"""Of runs in the style sheet."""
STAGES = ("convert", "sft", "train", "evaluate", "export", "megatron")
PARTS = ("rollout", "reward", "old_log_probs", "reference", "values", "critic", "actor", "sync")


def number(value: float) -> str:
    """Three significant digits, thousands separated."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """A share as a percentage, three significant digits."""
    return f"{100 * value:.3g} %"


def duration(seconds: float) -> str:
    """``48 s``, ``2 min 05 s``, ``3 h 20 min``."""
    if seconds < 0.05:
        return "0 s"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


@dataclass(frozen=True)
class Panel:
    """One small chart of a metric over training steps."""

    key: str
    title: str
    note: str
    text: Callable[[float], str] = number
    bounds: tuple[float | None, float | None] = (None, None)


PANELS = (
    Panel("reward", "Reward", "mean of a step's samples"),
    Panel("accuracy", "Training accuracy", "share of a step's samples that are right", share, (0, 1)),
    Panel("response_length", "Response length", "tokens, mean", number, (0, None)),
    Panel("finished", "Finished responses", "share that ended before the limit", share, (0, 1)),
    Panel("actor/entropy", "Entropy", "nats per response token", number, (0, None)),
    Panel("reference_kl", "KL from the SFT model", "per response token", number),
    Panel("actor/approx_kl", "KL of the update", "per response token, old policy to new", number, (0, None)),
    Panel("actor/clip_fraction_high", "Clipped from above", "share of response tokens", share, (0, None)),
    Panel("actor/grad_norm", "Gradient norm", "actor, before clipping", number, (0, None)),
    Panel("explained_variance", "Explained variance", "of the returns, by the critic", number, (None, 1)),
    Panel(
        "tokens_per_second",
        "Throughput",
        "response tokens per second",
        number,
        (0, None),
    ),
    Panel("seconds", "Time of an iteration", "seconds", number, (0, None)),
)


def render_page(campaign: Campaign) -> str:
    """The whole page as HTML."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"percent": percent, "number": number, "duration": duration}
    source = resources.files("workflow.reporting").joinpath("page.html.j2").read_text(encoding="utf-8")
    colours = {run.name: i % COLOURS for i, run in enumerate(campaign.runs)}
    return environment.from_string(source).render(
        campaign=campaign,
        plan=campaign.plan,
        runs=campaign.runs,
        cards=[_card(run, colours) for run in campaign.runs],
        accuracy=_accuracy_chart(campaign.runs, colours),
        panels=_panels(campaign.runs, colours),
        stage_times=_stage_times(campaign.runs),
        iteration_times=_iteration_times(campaign.runs),
        stages=STAGES,
        rows=[_row(run) for run in campaign.runs],
        common=_common_overrides(campaign.runs),
        failures=[(run, run.failures) for run in campaign.runs if not run.complete],
        provenance=_provenance(campaign),
        colours=colours,
    )


def _card(run: Run, colours: dict[str, int]) -> dict[str, Any]:
    start, final = run.start, run.final

    def triple(evaluation: Evaluation | None) -> tuple[float, float, float] | None:
        return (evaluation.accuracy, evaluation.low, evaluation.high) if evaluation else None

    return {
        "run": run,
        "colour": colours[run.name],
        "start": start,
        "final": final,
        "gain": 100 * (final.accuracy - start.accuracy) if start and final else None,
        "bar": Markup(range_bar(triple(start), triple(final), colours[run.name])),
    }


def _accuracy_chart(runs: Sequence[Run], colours: dict[str, int]) -> Markup | None:
    trained = [run for run in runs if run.plan.algorithm != "sft"] or runs
    last = max(run.train.steps for run in trained)

    def x(run: Run, evaluation: Evaluation) -> int:
        # Steps of continued SFT are not steps of RL: its end is drawn at theirs.
        return last if run.plan.algorithm == "sft" and evaluation.step else evaluation.step

    lines = [
        Line(
            run.name,
            colours[run.name],
            [(x(run, e), e.accuracy) for e in run.evaluations],
            [(e.low, e.high) for e in run.evaluations],
            dashed=run.is_control,
        )
        for run in runs
        if run.evaluations
    ]
    if not lines:
        return None
    return Markup(
        line_chart("held-out accuracy over steps", lines, share, _boundaries(runs), (None, 1), LARGE)
    )


def _panels(runs: Sequence[Run], colours: dict[str, int]) -> list[tuple[Panel, Markup]]:
    panels = []
    for panel in PANELS:
        lines = [
            Line(run.name, colours[run.name], points, dashed=run.is_control)
            for run in runs
            if (points := [(line["step"], line[panel.key]) for line in run.metrics if panel.key in line])
        ]
        if lines:
            chart = line_chart(panel.title, lines, panel.text, _boundaries(runs), panel.bounds)
            panels.append((panel, Markup(chart)))
    curves = [
        (run, points)
        for run in runs
        if (points := [(p["step"], p["nll"]) for p in run.sft_curve if "nll" in p])
    ]
    # Runs that share the supervised stage share its curve.
    distinct = {tuple(points): Line(run.name, colours[run.name], points) for run, points in reversed(curves)}
    if distinct:
        panel = Panel("nll", "Supervised loss", "nats per answer token, over SFT steps", number, (0, None))
        panels.append(
            (panel, Markup(line_chart(panel.title, list(distinct.values()), number, (), panel.bounds)))
        )
    return panels


def _boundaries(runs: Sequence[Run]) -> list[int]:
    return sorted({cut for run in runs for cut in run.train.cuts})


def _stage_times(runs: Sequence[Run]) -> Markup:
    bars = []
    for run in runs:
        jobs = [(STAGES.index(job.spec.stage), job) for job in run.jobs if job.manifest]
        parts = [Part(job.label, stage, job.seconds) for stage, job in sorted(jobs, key=lambda pair: pair[0])]
        bars.append((run.name, parts))
    return Markup(stacked_bars("time of each stage", bars, duration))


def _iteration_times(runs: Sequence[Run]) -> tuple[Markup, list[str]] | None:
    bars, seen = [], set()
    for run in runs:
        parts = []
        for colour, name in enumerate(PARTS):
            values = [line[f"seconds/{name}"] for line in run.metrics if f"seconds/{name}" in line]
            if values and sum(values) / len(values) > 1e-4:
                parts.append(Part(name.replace("_", " "), colour, sum(values) / len(values)))
                seen.add(name)
        if parts:
            bars.append((run.name, parts))
    if not bars:
        return None
    chart = stacked_bars("where an iteration's time goes", bars, lambda s: f"{s:.2f} s")
    return Markup(chart), [name.replace("_", " ") if name in seen else "" for name in PARTS]


def _row(run: Run) -> dict[str, Any]:
    rates = [line["tokens_per_second"] for line in run.metrics if "tokens_per_second" in line]
    exports = [job for job in run.jobs if job.spec.stage == "export" and job.manifest]
    return {
        "run": run,
        "model": run.jobs[0].spec.slug,
        "backends": sorted(set(run.train.backends.values())),
        "rate": sum(rates) / len(rates) if rates else None,
        "seconds": sum(job.seconds for job in run.jobs),
        "lost": sum(job.manifest.device_seconds.lost for job in run.jobs if job.manifest),
        "export": f"{exports[0].spec.folder}/export" if exports else None,
    }


def _common_overrides(runs: Sequence[Run]) -> list[str]:
    """What every run was given, in order."""
    return [word for word in runs[0].plan.overrides if all(word in run.plan.overrides for run in runs)]


def _provenance(campaign: Campaign) -> dict[str, Any]:
    manifests = campaign.manifests
    values = list(manifests.values())

    def distinct(items: Any) -> list[str]:
        return sorted({str(item) for item in items if item})

    packages = {(name, version) for manifest in values for name, version in manifest.packages.items()}
    return {
        "commits": distinct(manifest.git_commit for manifest in values),
        "cpus": distinct(manifest.hardware.cpu for manifest in values),
        "accelerators": distinct(manifest.hardware.accelerator for manifest in values),
        "packages": sorted(packages),
        "manifests": [(path, manifest) for path, manifest in manifests.items()],
    }
