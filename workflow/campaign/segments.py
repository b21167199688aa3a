"""Where trainings are cut into segments, one job each: asked for by number, or proposed from how long steps and saves take. No torch.

A cut is no part of an identity: it never changes a result. The cuts of a campaign are frozen in its plan, and noted in its folder
when it starts, so that the same command goes on with them although more has been measured since. New cuts are made when asked for
(``recut``), for what remains: every published step stays a cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.config import ConfigError
from workflow.campaign.lock import FolderLock
from workflow.campaign.pace import Pace, expected_pace
from workflow.campaign.plan import RESULTS, Plan, StageSpec
from workflow.campaign.site import UNKNOWN, SiteConfig, read_seconds
from workflow.manifest import MANIFEST, ManifestError, is_released, read_manifest, write_json

AUTO = "auto"
CUTS_FILE = "cuts.json"
MARGIN = 0.1
"""Share of a job's time that is left free, for a start or steps that are slower than any measured."""


@dataclass(frozen=True)
class Proposal:
    """Where a training would be cut by the time that its parts take."""

    cuts: list[int]
    """Only those of what remains."""
    why: str


def cut_steps(steps: int, segments: int) -> list[int]:
    """Steps at which ``segments`` equal segments end; fewer when there are fewer steps.

    >>> cut_steps(10, 3)
    [3, 7, 10]
    """
    return sorted({round(steps * part / segments) for part in range(1, segments + 1)} - {0})


def propose(spec: StageSpec, site: SiteConfig, pace: Pace, begin: int = 0) -> Proposal:
    """Equal segments after step ``begin``, each short enough for a job of the site's longest walltime.

    A job starts, trains, saves, and is to be done when it would be warned; without a limit of its time there is one segment.

    Raises:
        ConfigError: measured, and not even one step fits.
    """
    key = site.key_of(spec.device)
    limit = site.devices[key].walltime
    remaining = spec.steps - begin
    if limit in (None, UNKNOWN):
        return Proposal(_shifted(remaining, 1, begin), f"{pace}; no limit of a job's time is known")
    usable = (1 - MARGIN) * read_seconds(limit) - pace.start - pace.save - pace.warning
    longest = 1 + int((usable - pace.slowest_step) / pace.step) if usable >= pace.slowest_step else 0
    if longest < 1 and pace.measured:
        raise ConfigError(
            f"site.devices.{key}.walltime={limit} leaves {max(usable, 0):.0f} s for steps, and the slowest took "
            f"{pace.slowest_step:.0f} s ({pace}); use more devices, or a partition with longer jobs"
        )
    longest = max(longest, 1)
    why = f"{pace}; in a job of {limit} fit {longest} steps, with {MARGIN:.0%} and {pace.warning} s for a warning to spare"
    return Proposal(_shifted(remaining, -(-remaining // longest), begin), why)


@dataclass(frozen=True)
class Cutter:
    """Decides the cuts of a campaign's trainings.

    Args:
        segments: how many, or ``auto``.
        recut: make new cuts for what remains, whatever was decided before.
        noted: what :func:`read_cuts` found.
    """

    segments: int | str
    recut: bool
    noted: Mapping[str, dict[str, Any]]

    def cuts(self, spec: StageSpec, site: SiteConfig, parameters: int) -> list[int]:
        """Steps at which the segments of a training end.

        Args:
            parameters: of the model.

        Raises:
            ConfigError: see :func:`propose`.
        """
        note = self.noted.get(spec.id)
        if note is not None and note["segments"] == self.segments and not self.recut:
            return list(note["cuts"])
        earlier = [] if note is None else note["cuts"]
        if self.segments != AUTO and not self.recut:
            return cut_steps(spec.steps, self.segments)
        kept = kept_cuts(spec, earlier)
        begin = max(kept, default=0)
        if self.segments == AUTO:
            return [*kept, *propose(spec, site, expected_pace(spec, parameters), begin).cuts]
        pieces = -(-(spec.steps - begin) * self.segments // spec.steps)
        return [*kept, *_shifted(spec.steps - begin, pieces, begin)]


def kept_cuts(spec: StageSpec, earlier: Iterable[int]) -> list[int]:
    """The cuts of a training that stay: its published steps, and the end of a segment that somebody is working on.

    A step that another campaign published, and whose bytes were given up since, is left out: nothing here needs it.

    Args:
        earlier: the cuts so far.
    """
    steps = []
    for path in Path(spec.folder).glob(f"step*/{MANIFEST}"):
        try:
            manifest = read_manifest(path)
        except ManifestError:
            continue
        if manifest.identity == spec.identity and (manifest.step in earlier or not is_released(path.parent)):
            steps.append(manifest.step)
    if FolderLock(Path(spec.folder)).living_holder() is not None:
        steps += [cut for cut in earlier if cut > max(steps, default=0)][:1]
    return sorted(steps)


def read_cuts(campaign: str) -> dict[str, dict[str, Any]]:
    """Per training's id, how this campaign cuts it since it started: ``segments`` as asked for, and ``cuts``."""
    try:
        return json.loads((RESULTS / campaign / CUTS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def note_cuts(plan: Plan) -> None:
    """Note the cuts of a plan that is being carried out."""
    new = {
        spec.id: {"segments": plan.segments, "cuts": spec.cuts} for spec in plan.stages.values() if spec.cuts
    }
    write_json(RESULTS / plan.campaign / CUTS_FILE, read_cuts(plan.campaign) | new)


def _shifted(steps: int, segments: int, begin: int) -> list[int]:
    return [begin + cut for cut in cut_steps(steps, segments)]
