"""report: ``python -m workflow.stages.report --plan results/demo/plan-<digest>.json``: the page, the summary, the trackers.

Not a planned stage: it has no identity and publishes no manifest, it shows those of others and may run at any time.
Without ``--partial`` a campaign that is not complete is refused; with it, what failed is shown with its reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workflow.campaign.plan import PlanError, read_plan
from workflow.manifest import write_json, write_text
from workflow.reporting.collect import Campaign, Run, collect
from workflow.reporting.model_card import percent
from workflow.reporting.page import render_page
from workflow.reporting.summary import summarize
from workflow.reporting.trackers import TrackerMissing, track

REPORT_FILE, SUMMARY_FILE = "report.html", "summary.json"


def main(arguments: list[str] | None = None) -> int:
    """Write ``report.html`` and ``summary.json`` into the plan's folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workflow.stages.report", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="the frozen plan of the campaign")
    parser.add_argument("--partial", action="store_true", help="report although runs are missing or failed")
    options = parser.parse_args(arguments)
    try:
        campaign = collect(read_plan(options.plan), options.plan)
    except PlanError as error:
        print(f"report: {error}", file=sys.stderr)
        return 64
    if not campaign.complete and not options.partial:
        missing = [f"{run.name} ({run.failures[0].stage})" for run in campaign.runs if not run.complete]
        print(f"report: not complete: {', '.join(missing)}; --partial reports what there is", file=sys.stderr)
        return 1
    return write_report(campaign, options.plan.parent)


def write_report(campaign: Campaign, folder: Path) -> int:
    """Write everything into ``folder`` and say where it is; returns the exit code."""
    write_json(folder / SUMMARY_FILE, summarize(campaign))
    write_text(folder / REPORT_FILE, render_page(campaign))
    try:
        track(campaign, folder)
    except TrackerMissing as error:
        print(f"report: {error}", file=sys.stderr)
        return 64
    for run in campaign.runs:
        print(_outcome(run))
    print(f"report   {folder / REPORT_FILE}\nsummary  {folder / SUMMARY_FILE}")
    return 0


def _outcome(run: Run) -> str:
    """One run in one line for the terminal."""
    if not run.complete:
        failure = run.failures[0]
        return f"{run.name:12} {failure.stage}: {failure.kind}: {failure.message}; log {failure.log}"
    final = run.final
    start = f"{percent(run.start.accuracy)} -> " if run.start else ""
    model = "".join(f"; model {job.spec.folder}/export" for job in run.jobs if job.spec.stage == "export")
    interval = f"{percent(final.low)} to {percent(final.high)}"
    return f"{run.name:12} accuracy {start}{percent(final.accuracy)} (95 % interval {interval}){model}"


if __name__ == "__main__":
    sys.exit(main())
