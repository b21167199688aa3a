"""The ``baton`` command: which engines there are, what a campaign would do, and whether a result is what was published."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engines.checkpoint.errors import StateError
from engines.config import ConfigError
from engines.model_folder import ModelFolderError
from engines.registry import EngineRegistry
from workflow.campaign.build import PlannedRun
from workflow.campaign.code import source_root
from workflow.campaign.head import REFUSALS, on_this_site, plan_campaign
from workflow.campaign.head import recut as recut_campaign
from workflow.campaign.layout_preflight import memory_of_processes
from workflow.campaign.pace import expected_pace
from workflow.campaign.plan import CURRENT, RESULTS, Plan, PlanError, read_plan
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.segments import kept_cuts, propose
from workflow.campaign.site import detect_site, load_site
from workflow.campaign.view import find_manifests
from workflow.cluster.doctor import changes, examine
from workflow.cluster.head_job import head_log, submit_head
from workflow.cluster.slurm import SlurmLimit, SlurmRefused, SlurmUnavailable
from workflow.cluster.stage_in import stage_in
from workflow.cluster.status import campaign_status
from workflow.compare import Comparison, NotComparable, compare, find_pairs, passed, summary
from workflow.drill.campaign import DrillError
from workflow.drill.report import reported
from workflow.drill.run import Drill
from workflow.manifest import Manifest, ManifestError, verify, write_json
from workflow.preflight_command import preflight

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
_terminal = Console()
console = _terminal if _terminal.is_terminal else Console(width=160)
_VERDICTS = {"good": "[green]ok[/]", "open": "[yellow]open[/]", "wrong": "[red]MISSING[/]"}
app.command()(preflight)
_STATES = {"built": "green", "needs": "yellow", "not built yet": "dim"}


@app.command()
def engines() -> None:
    """List every declared engine with its state on this machine."""
    table = _table("model type", "backend", "device", "state", "environment", "module")
    triples = EngineRegistry.triples()
    for triple in triples:
        state = f"needs {triple.reason}" if triple.state == "needs" else triple.state
        color = _STATES[triple.state]
        table.add_row(
            triple.model_type,
            triple.backend,
            triple.device,
            f"[{color}]{escape(state)}[/]",
            f"env/{triple.environment}.txt",
            triple.module,
        )
    console.print(table)
    built = sum(triple.state == "built" for triple in triples)
    console.print(f"{built} of {len(triples)} are built and can run here")


@app.command()
def plan(
    campaign: Annotated[str, typer.Argument(help="a file in configs/campaign, or a path")],
    set: Annotated[list[str] | None, typer.Option("--set", help="key=value; may be repeated")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of all runs")] = None,
    controls: Annotated[bool, typer.Option(help="add the control runs")] = False,
    site: Annotated[str | None, typer.Option(help="a file in configs/site")] = None,
    recut: Annotated[
        bool, typer.Option(help="with new cuts for what remains; snakemake takes --config recut=true")
    ] = False,
) -> None:
    """Show what a campaign would do: runs, stages, placement, bytes, and where its trainings would best be cut. Writes and starts
    nothing."""
    options = CampaignOptions(
        campaign=campaign, set=" ".join(set or []), seed=seed, controls=controls, site=site, recut=recut
    )
    try:
        planned, runs = plan_campaign(options, source_root())
    except REFUSALS as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    _show_runs(planned)
    _show_stages(planned)
    memory = [line for run in runs for line in memory_of_processes(run)]
    for text in dict.fromkeys([*proposed_cuts(planned, runs), *memory]):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


@app.command("verify")
def verify_command(
    path: Annotated[
        Path, typer.Argument(help="a manifest, its folder, a run's folder or a campaign's folder")
    ],
) -> None:
    """Hash a result, and everything it came from, again; exit code 1 when anything differs from what was published."""
    try:
        manifests = find_manifests(path)
    except ManifestError as error:
        console.print(f"[red]{escape(str(error))}[/]", highlight=False)
        raise typer.Exit(1) from None
    result = verify(*manifests)
    for problem in result.problems:
        console.print(f"[red]differs[/]  {escape(problem)}", highlight=False, soft_wrap=True)
    console.print(
        f"{result.manifests} manifests, {result.files} files hashed again, {result.released} training states released: "
        + (f"[red]{len(result.problems)} problems[/]" if result.problems else "[green]all as published[/]"),
        highlight=False,
        soft_wrap=True,
    )
    if result.problems:
        raise typer.Exit(1)


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="a manifest, its folder, a run's folder or a campaign's folder")],
    b: Annotated[Path, typer.Argument(help="what it is compared with")],
    tolerance: Annotated[
        float | None, typer.Option(help="largest relative difference of numbers; without it, bit for bit")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write the findings there, as JSON")] = None,
) -> None:
    """Compare results of one learning identity, part by part. Exit code 1: they differ, or something was not compared; 2: refused."""
    try:
        found = [compare(pair, tolerance) for pair in find_pairs(a, b)]
    except (ManifestError, StateError, ModelFolderError, NotComparable) as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if output is not None:
        record = {"a": str(a), "b": str(b), "tolerance": tolerance, "pairs": [one.record() for one in found]}
        write_json(output, record | {"passed": passed(found)})
    _show_comparisons(found)
    if not passed(found):
        raise typer.Exit(1)


@app.command("drill")
def drill_command(
    campaign: Annotated[str, typer.Argument(help="a file in configs/campaign, or a path")] = "faults",
    kills: Annotated[int, typer.Option(min=1, help="faults that must hit something")] = 12,
    seed: Annotated[int, typer.Option(help="of the kinds and moments of the faults")] = 0,
    set: Annotated[list[str] | None, typer.Option("--set", help="key=value; may be repeated")] = None,
    output: Annotated[
        Path | None, typer.Option(help="a new or empty folder; by default in results/drills")
    ] = None,
) -> None:
    """Disturb a campaign at random moments and compare it with one that was left alone; exit code 1 when anything differs."""
    path = Path(campaign)
    words = [f"campaign={path.resolve() if path.is_file() else campaign}"]
    words += [f"set={' '.join(set)}"] if set else []
    output = output or RESULTS / "drills" / f"{path.stem}-seed{seed}"
    drill = Drill(
        words,
        kills,
        seed,
        output.resolve(),
        tell=lambda line: console.print(escape(line), highlight=False),
    )
    try:
        page = output / reported(drill).name
    except DrillError as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    record = drill.record
    for problem in [problem for one in record.rounds for problem in one.problems]:
        console.print(f"[red]differs[/]  {escape(problem)}", highlight=False, soft_wrap=True)
    verdict = "[green]nothing differs[/]" if record.passed else "[red]failed[/]"
    console.print(
        f"{len(record.hits)} faults, {record.in_time} of them in a load, save or publication: {verdict}; {page}"
    )
    if not record.passed:
        raise typer.Exit(1)


@app.command()
def head(
    campaign: Annotated[str, typer.Argument(help="a file in configs/campaign")] = "demo",
    set: Annotated[list[str] | None, typer.Option("--set", help="key=value; may be repeated")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of all runs")] = None,
    controls: Annotated[bool, typer.Option(help="add the control runs")] = False,
    site: Annotated[
        str | None, typer.Option(help="a file in configs/site; found by the cluster's name")
    ] = None,
    recut: Annotated[bool, typer.Option(help="with new cuts for what remains")] = False,
) -> None:
    """Run a campaign from a small job that requeues itself, where login nodes end long processes."""
    configs = source_root() / "configs"
    try:
        site = site or detect_site(configs)
        words = [f"campaign={campaign}", f"site={site}"]
        words += [] if seed is None else [f"seed={seed}"]
        words += ["controls=true"] if controls else []
        words += [f"set={' '.join(set)}"] if set else []
        if recut:
            text = " ".join(set or [])
            chosen = CampaignOptions(campaign=campaign, set=text, seed=seed, controls=controls, site=site)
            recut_campaign(chosen, source_root())
        job, new = submit_head(campaign, words, load_site(site, configs), RESULTS)
    except (*REFUSALS, SlurmUnavailable, SlurmLimit, SlurmRefused) as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    word = "is" if new else "is already"
    console.print(f"the head {word} SLURM job {job}; its log: {head_log(campaign, RESULTS)}", highlight=False)


@app.command()
def status(
    campaign: Annotated[str, typer.Argument(help="its name: a folder in results")] = "demo",
) -> None:
    """One table of what a campaign's jobs are doing: run, stage, step, job, state, node, progress, restarts, time left, failure."""
    try:
        planned = read_plan((RESULTS / campaign / CURRENT).resolve())
    except PlanError as error:
        console.print(f"[red]{escape(str(error))}[/]", highlight=False)
        raise typer.Exit(1) from None
    table = _table(
        *("runs", "stage", "name", "step", "job", "state", "node"),
        *("progress", "restarts", "time left", "failure"),
    )
    for row in campaign_status(planned, RESULTS):
        table.add_row(*(escape(value) for value in astuple(row)))
    console.print(table)


@app.command()
def doctor(
    site: Annotated[
        str | None, typer.Option(help="a file in configs/site, or a path; found by the cluster's name")
    ] = None,
    look_inside: Annotated[
        bool, typer.Option(help="run a job of a few seconds on a node of every device key")
    ] = True,
) -> None:
    """Compare a site file with the cluster, and say what to change in it; exit code 1 when anything is wrong."""
    configs = source_root() / "configs"
    findings = []
    try:
        for finding in examine(load_site(site or detect_site(configs), configs), Path.cwd(), look_inside):
            findings.append(finding)
            color = {"good": "green", "open": "yellow", "wrong": "red"}[finding.verdict]
            console.print(str(finding), style=color, highlight=False, markup=False, soft_wrap=True)
    except ConfigError as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    console.print(f"\n{changes(findings)}", highlight=False, markup=False, soft_wrap=True)
    if any(finding.verdict == "wrong" for finding in findings):
        raise typer.Exit(1)


@app.command("stage-in")
def stage_in_command(
    campaign: Annotated[str, typer.Argument(help="a file in configs/campaign, or a path")],
    set: Annotated[list[str] | None, typer.Option("--set", help="key=value; may be repeated")] = None,
    controls: Annotated[bool, typer.Option(help="add the control runs")] = False,
    site: Annotated[
        str | None, typer.Option(help="a file in configs/site; found by the cluster's name")
    ] = None,
) -> None:
    """Fetch and verify, on a host with internet, all that a campaign needs; exit code 1, with what to do, when anything is missing."""
    options = CampaignOptions(campaign=campaign, set=" ".join(set or []), controls=controls, site=site)
    try:
        findings = list(stage_in(on_this_site(options, source_root()), source_root()))
    except REFUSALS as error:
        console.print(f"[red]refused:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    table = _table("", "what", "found")
    for finding in findings:
        table.add_row(_VERDICTS[finding.verdict], escape(finding.subject), escape(finding.message))
    console.print(table)
    console.print(f"\n{changes(findings)}", highlight=False, markup=False, soft_wrap=True)
    if any(finding.verdict == "wrong" for finding in findings):
        raise typer.Exit(1)
    console.print("nothing is left to be fetched: no compute node needs the internet")


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="a Hugging Face folder, or what was converted from one", exists=True, file_okay=False
        ),
    ],
    target: Annotated[Path, typer.Argument(help="a new folder; it appears when everything is verified")],
    to: Annotated[str, typer.Option(help="megatron or hf")],
    ranks: Annotated[int, typer.Option(min=1, help="processes that share the work")] = 1,
    max_shard_size: Annotated[str, typer.Option(help="largest Hugging Face weight file")] = "5GB",
    full_logits: Annotated[
        int,
        typer.Option(
            min=0, help="parameters above which logits are compared on the first and last layers only"
        ),
    ] = 4_000_000_000,
) -> None:
    """Convert a model between Hugging Face files and Megatron's distributed checkpoint, verified; needs no accelerator."""
    if to not in ("megatron", "hf"):
        console.print(f"[red]refused:[/] --to {escape(to)}: must be megatron or hf", highlight=False)
        raise typer.Exit(1)
    options = {"--to": to, "--ranks": ranks, "--max-shard-size": max_shard_size, "--full-logits": full_logits}
    words = [word for name, value in options.items() for word in (name, str(value))]
    command = [sys.executable, "-m", "workflow.stages.conversion_command", str(source), str(target), *words]
    raise typer.Exit(subprocess.run(command).returncode)


def proposed_cuts(planned: Plan, runs: list[PlannedRun]) -> list[str]:
    """For each training, how it is cut and what is proposed for all that is not published, in words."""
    found: dict[str, str] = {}
    for run in runs:
        spec = planned.stages.get(planned.runs[run.name].stages.get("train", ""))
        if spec is None or spec.id in found:
            continue
        kept = kept_cuts(spec, spec.cuts)
        pace = expected_pace(spec, run.model.parameters)
        try:
            proposal = propose(spec, run.config.site, pace, max(kept, default=0))
            told = f"proposed: {[*kept, *proposal.cuts]}; {proposal.why}"
        except ConfigError as error:
            told = f"no proposal: {error}"
        found[spec.id] = f"segments of {spec.name}: cut at {spec.cuts} (segments: {planned.segments}); {told}"
    return [*found.values()]


def _show_runs(planned: Plan) -> None:
    table = _table("run", "algorithm", "seed", "stages", "overrides", title=f"campaign {planned.campaign}")
    for name, run in planned.runs.items():
        jobs = len(planned.run_manifests(name))
        table.add_row(name, run.algorithm, str(run.seed), str(jobs), escape(" ".join(run.overrides)))
    console.print(table)


def _show_comparisons(found: list[Comparison]) -> None:
    table = _table("stage", "name", "step", "A", "B", "part", "finding")
    for one in found:
        known = one.pair.ours or one.pair.theirs
        layouts = [_computed(side.manifest) if side else "-" for side in (one.pair.ours, one.pair.theirs)]
        place = [known.manifest.stage, known.manifest.slug, str(known.manifest.step or "-"), *layouts]
        for finding in one.findings:
            color = {"equal": "green", "close": "green", "different": "red"}.get(finding.verdict, "yellow")
            table.add_row(*place, finding.part, f"[{color}]{escape(str(finding))}[/]")
            place = [""] * len(place)
    console.print(table)
    console.print(f"[{'green' if passed(found) else 'red'}]{escape(summary(found))}[/]", soft_wrap=True)


def _computed(manifest: Manifest) -> str:
    """How a result was computed, in a word or two."""
    return " ".join(
        [*sorted({*manifest.backends.values()}), manifest.device.computed, f"x{manifest.world_size}"]
    )


def _show_stages(planned: Plan) -> None:
    table = _table(
        "stage", "folder", "runs", "jobs", "engine", "device", "ranks", "steps", "forecast", "published"
    )
    users = {id: [name for name, run in planned.runs.items() if id in run.ids()] for id in planned.stages}
    for id, spec in planned.stages.items():
        manifests = [Path(spec.manifest(step)) for step in spec.cuts or [None]]
        table.add_row(
            spec.stage,
            spec.name,
            ", ".join(users[id]),
            str(len(manifests)),
            ", ".join(sorted({*spec.backends.values()})) or "-",
            spec.device.computed,
            f"{spec.world_size} ({spec.layout_text})",
            f"{spec.steps} cut at {spec.cuts}" if spec.cuts else str(spec.steps or "-"),
            f"{spec.forecast_bytes / 1e6:,.1f} MB",
            f"{sum(path.exists() for path in manifests)} of {len(manifests)}",
        )
    console.print(table)
    for why in dict.fromkeys(
        f"{spec.device.asked} -> {spec.device.computed}: {spec.device.why}"
        for spec in planned.stages.values()
    ):
        console.print(f"placement {why}", highlight=False)
    jobs = sum(len(spec.cuts or [None]) for spec in planned.stages.values())
    total = sum(spec.forecast_bytes for spec in planned.stages.values())
    console.print(f"{jobs} jobs, about {total / 1e9:.2f} GB")


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("stage", "folder", "module", "device"))
    return table


if __name__ == "__main__":
    app()
