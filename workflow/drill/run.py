"""A drill: the campaign left alone, then the same campaign under faults until enough have hit; then both are compared."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.streams import stream_key
from workflow.drill.campaign import Campaign, DrillError, Pulse, check_room, empty, own_disk
from workflow.drill.checks import problems
from workflow.drill.faults import Fault, local_faults
from workflow.drill.keeper import kept
from workflow.drill.processes import drivers, halted, working_in
from workflow.drill.watch import PHASES, Moment, Watcher

PER_CAMPAIGN = 12
"""Faults that one campaign takes before another one is started: it must get somewhere in between."""
AIMED = 1 / 3
"""Share of the faults that wait for a save, a load or a publication; some come too late, and a quarter must be in time."""
IN_TIME = 1 / 4
TAKEN = 1 / 2
"""Probability that a phase which is aimed at is hit when it comes: never always the first one after a start."""
AT_WORK = 3 / 4
"""Share of the other faults whose time is counted from where a stage is at work again: else a slow machine would see little but
starting heads."""
HASTE = -10
"""Niceness of the drill, where it may: to see a save that takes milliseconds on a busy machine."""
AFTERMATH = 3
"""Starts in a row that may fail without another fault: what was hit last may fail once, and what waited for it once more."""
TRIES = 10
"""Campaigns, besides one for each fault, after which too few have hit something and the drill ends."""


@dataclass
class Strike:
    """One fault that was drawn."""

    round: int
    kind: str
    at: float
    """Seconds since the campaign was started."""
    aim: str | None
    """The phase that it waited for, if any."""
    during: str | None = None
    """The phase in which it hit."""
    victim: str = ""
    effect: str = ""
    counted: bool = False
    """Whether it hit something."""


@dataclass
class Round:
    """One disturbed campaign."""

    seconds: float = 0.0
    starts: int = 0
    """How often the command was run."""
    problems: list[str] = field(default_factory=list)


@dataclass
class Record:
    """All of a drill."""

    words: list[str]
    kills: int
    seed: int
    share_in_time: float
    """Of the faults, how many must hit during a load, save or publication."""
    disk: str = ""
    """How the disk was filled: ``tmpfs`` (a small filesystem) or ``limit`` (of the size of files)."""
    reference_seconds: float = 0.0
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of every load, save and publication of the reference."""
    strikes: list[Strike] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    ended: str = ""
    """What ended the drill before its time, if anything did."""

    @property
    def hits(self) -> list[Strike]:
        """The faults that count."""
        return [strike for strike in self.strikes if strike.counted]

    @property
    def in_time(self) -> int:
        """Of these, how many hit during a load, save or publication."""
        return sum(strike.during is not None for strike in self.hits)

    @property
    def enough(self) -> bool:
        """Whether no more faults are needed."""
        return len(self.hits) >= self.kills and self.in_time >= self.share_in_time * self.kills

    @property
    def passed(self) -> bool:
        """Whether the faults changed nothing."""
        return self.enough and not self.ended and not any(one.problems for one in self.rounds)


@dataclass
class Drill:
    """See :meth:`run`."""

    words: list[str]
    """Of ``snakemake --config``."""
    kills: int
    seed: int
    output: Path
    """A folder that is new or empty."""
    faults: Callable[[str], list[Fault]] = local_faults
    """The faults that may happen, given how a disk can be filled."""
    make: Callable[[Path, list[str]], Campaign] = Campaign
    """Where the campaign runs."""
    phases: Sequence[str] = PHASES
    """What is aimed at."""
    aimed: float = AIMED
    share_in_time: float = IN_TIME
    tell: Callable[[str], None] = print
    record: Record | None = field(init=False, default=None)
    """What it found so far; None before it has begun."""
    draw: random.Random = field(init=False)

    def run(self) -> Record:
        """Run the reference and as many disturbed campaigns as it takes.

        Raises:
            DrillError: the folder is not the drill's own, the campaign does not complete when it is left alone, or there is no room
                for another one.
        """
        if self.output.exists() and any(self.output.iterdir()):
            raise DrillError(f"{self.output}: not empty; a drill starts from nothing")
        for process in working_in(self.output, this_one=True):
            raise DrillError(
                f"{self.output}: {process} works in it ({process.command[:100]}), and a drill ends all that does; "
                "start it from another folder, or name another --output"
            )
        self.record = Record(self.words, self.kills, self.seed, self.share_in_time)
        self.draw = random.Random(stream_key("drill", self.seed))
        self.output.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, HASTE)
        try:
            with kept(self.output):
                self._campaigns()
        except BaseException as error:
            self.record.ended = str(error) if isinstance(error, DrillError) else repr(error)
            raise
        return self.record

    def _campaigns(self) -> None:
        """The one that is left alone, then the disturbed ones."""
        reference = self._reference()
        room = reference.room()
        check_room(self.output, room)
        while not self.record.enough and len(self.record.rounds) < TRIES + self.kills:
            self._round(reference, room)
            if self.record.rounds[-1].problems:
                return

    def _reference(self) -> Campaign:
        campaign = self.make(self.output / "reference", self.words)
        campaign.folder.mkdir()
        begun = time.monotonic()
        with self._ended(campaign), Watcher(campaign.folder) as watcher:
            campaign.start()
            pulse = Pulse(campaign)
            while campaign.running:
                pulse.check()
                for moment in watcher.moments(0.5):
                    if moment.ended is not None:
                        self.record.phases.setdefault(moment.phase, []).append(moment.ended - moment.begun)
            if campaign.head.returncode != 0:
                raise DrillError(f"the campaign fails without any fault: see {campaign.output}")
        self.record.reference_seconds = time.monotonic() - begun
        self.tell(f"reference: complete after {self.record.reference_seconds:.0f} s")
        return campaign

    def _round(self, reference: Campaign, room: int) -> None:
        """One campaign that is disturbed until it is complete, or has had its share of faults."""
        number = len(self.record.rounds) + 1
        this = Round()
        self.record.rounds.append(this)
        campaign = self.make(self.output / f"disturbed{number}", self.words)
        with own_disk(campaign, room) as self.record.disk, self._ended(campaign):
            with Watcher(campaign.folder) as watcher:
                begun = time.monotonic()
                try:
                    campaign.start()
                    self._disturb(campaign, watcher, number)
                    this.problems += self._finish(campaign)
                except DrillError as error:  # it hangs, or is refused for ever
                    this.problems.append(str(error))
            this.seconds, this.starts = time.monotonic() - begun, campaign.starts
            this.problems += [] if this.problems else problems(campaign, reference)
            if not this.problems:
                empty(campaign.folder)  # the rest is kept, to be looked at
        self.tell(f"campaign {number}: complete after {this.starts} starts, {len(this.problems)} differences")
        if not this.problems:
            campaign.folder.rmdir()

    def _disturb(self, campaign: Campaign, watcher: Watcher, number: int) -> None:
        faults, begun = self.faults(self.record.disk), time.monotonic()
        struck = failures = 0
        while struck < self._share and not self.record.enough:
            aim = (
                self.draw.choice(self.phases)
                if self.draw.random() < self.aimed or self._only_aims()
                else None
            )
            moment = self._wait(campaign, watcher, aim)
            if not campaign.running:
                if campaign.head.returncode == 0:
                    return
                failures += 1
                if failures > AFTERMATH:
                    raise DrillError(
                        f"the command fails though no fault comes in between: see {campaign.output}"
                    )
                campaign.start()
                continue
            strikes = len(self.record.strikes)
            struck += self._strike(
                campaign, watcher, faults, Strike(number, "", time.monotonic() - begun, aim), moment
            )
            failures = failures if len(self.record.strikes) == strikes else 0

    @property
    def _share(self) -> int:
        """Faults of one campaign."""
        return min(PER_CAMPAIGN, self.kills)

    def _only_aims(self) -> bool:
        """Whether what is still missing are faults during loads, saves and publications."""
        return len(self.record.hits) >= self.kills

    def _wait(self, campaign: Campaign, watcher: Watcher, aim: str | None) -> Moment | None:
        """Until the fault is due: a random time, or a random time into the next phase of the kind that is aimed at."""
        pulse = Pulse(campaign)
        if aim is None:
            if self.draw.random() < AT_WORK:
                while campaign.running and not drivers(campaign.folder):
                    pulse.check()
                    watcher.moments(0.2)
            longest = 2 * self.record.reference_seconds / self._share
            end = time.monotonic() + self.draw.uniform(0, longest)
            while campaign.running and time.monotonic() < end:
                watcher.moments(min(0.2, max(end - time.monotonic(), 0.001)))
            return None
        usual = statistics.median(self.record.phases.get(aim) or [0.0])
        while campaign.running:
            pulse.check()
            for moment in watcher.moments(0.2):
                if moment.phase == aim and moment.ended is None and self.draw.random() < TAKEN:
                    due = moment.begun + self.draw.uniform(0, usual)
                    time.sleep(max(due - time.monotonic(), 0))
                    if watcher.going_on(moment.phase, moment.folder):
                        return moment
        return None

    def _strike(
        self, campaign: Campaign, watcher: Watcher, faults: list[Fault], strike: Strike, moment: Moment | None
    ) -> bool:
        """Let one of the faults happen, of a kind that has hit least; returns whether it hit something.

        Where only kinds are possible that have hit more often than most, as when nothing but a head runs yet, nothing happens.
        """
        hits = Counter(one.kind for one in self.record.hits)
        most = 1 + hits.total() / max(len(hits), 1)
        rare = [fault for fault in faults if hits[fault.name] <= most]
        with halted(moment.folder if moment else None):
            # Looked at before it is hit: then nobody may be left whose phase it is.
            if moment is not None and watcher.going_on(moment.phase, moment.folder):
                strike.during = moment.phase
            for fault in sorted(rare, key=lambda fault: (hits[fault.name], self.draw.random())):
                hit = fault.strike(campaign, self.draw, moment.folder if moment else None)
                if hit is not None:
                    break
            else:
                return False
        strike.kind, strike.victim = fault.name, hit.victim
        strike.counted, strike.effect = hit.effect()
        watcher.drain()
        self.record.strikes.append(strike)
        self.tell(
            f"{len(self.record.hits):3d} {strike.kind}{f' during {strike.during}' if strike.during else ''}: "
            f"{strike.victim}: {strike.effect}{'' if strike.counted else ' (does not count)'}"
        )
        return strike.counted

    def _finish(self, campaign: Campaign) -> Iterator[str]:
        """Run the command until the campaign is complete; nothing disturbs it any more."""
        failures = 0
        while campaign.wait() != 0:
            failures += 1
            if failures > AFTERMATH:
                yield f"the command fails though nothing disturbs it any more: see {campaign.output}"
                return
            campaign.start()

    @contextlib.contextmanager
    def _ended(self, campaign: Campaign) -> Iterator[None]:
        """Whatever happens, nothing of the campaign runs on: what does is seen before, and nobody could find it on a disk that is gone."""
        try:
            yield
        finally:
            campaign.stop()
