"""What can happen to a campaign on one machine. A set of faults is a list, so that another place can bring its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.checkpoint import StateError, StateStore, read_state
from engines.checkpoint.verify import STATE_FILE
from workflow.drill.campaign import Campaign, full_disk, until
from workflow.drill.evidence import Start, complaints, damage_noticed, newest_start, times_asked_to_end
from workflow.drill.processes import Driver, Process, descendants, drivers, parent, process_of

HOLD = 10.0
"""Seconds for which the disk stays full, unless something fails before."""


@dataclass(frozen=True)
class Hit:
    """Something was there to be hit."""

    victim: str
    """For people."""
    effect: Callable[[], tuple[bool, str]]
    """Waits for the effect: whether there was one, and what it was."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Do it at once; None when there is nothing to hit. ``folder``: of the stage that is meant, if one is."""
        raise NotImplementedError


@dataclass(frozen=True)
class Victim:
    """A process that a signal may hit."""

    process: Process
    what: str
    drivers: tuple[Driver, ...] = ()
    """Whose starts it is part of. None: it is the head, or nothing has started there yet."""


@dataclass(frozen=True)
class Signal(Fault):
    """A signal to one process of the campaign."""

    number: signal.Signals
    victims: Callable[[Campaign, Path | None], list[Victim]]

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Send it to one of the victims."""
        found = self.victims(campaign, folder)
        if not found:
            return None
        victim = draw.choice(found)
        begun = [(driver, newest_start(driver.folder)) for driver in victim.drivers]
        # What has said how it ended is only leaving.
        at_work = [(driver, start) for driver, start in begun if start is not None and start.end() is None]
        is_head, asked = victim.process == campaign.head_process, times_asked_to_end(campaign)
        if not victim.process.alive:  # a signal to what is dead already would reach its zombie
            return None
        try:
            os.kill(victim.process.pid, self.number)
        except ProcessLookupError:
            return None

        def effect() -> tuple[bool, str]:
            if not campaign.until(lambda: not victim.process.alive):
                return False, "lives on"
            return self._on_the_head(campaign, asked) if is_head else self._on_starts(campaign, at_work)

        return Hit(f"{victim.what}, {victim.process}", effect)

    def _on_the_head(self, campaign: Campaign, asked: int) -> tuple[bool, str]:
        """It ended by the signal, or said that it was asked to end."""
        code = campaign.wait()
        heard = code == -self.number or times_asked_to_end(campaign) > asked
        return code != 0 and heard, f"ended with exit code {code}"

    def _on_starts(self, campaign: Campaign, at_work: list[tuple[Driver, Start]]) -> tuple[bool, str]:
        """A start that publishes all the same was not hit: what was killed of it was not needed any more. What is asked to stop has to."""
        if not at_work:
            return False, "no start was at work"
        if not campaign.until(lambda: not any(d.process.alive and s.end() is None for d, s in at_work)):
            return False, "its start goes on"
        ends = [start.end() or "killed" for _, start in at_work]
        wanted = {"killed", "error"} if self.number == signal.SIGKILL else {"stopped"}
        return not wanted.isdisjoint(ends), f"its start ended: {', '.join(ends)}"


@dataclass(frozen=True)
class FullDisk(Fault):
    """No space is left for the campaign until something has failed of it; then there is space again."""

    how: str
    """See own_disk."""

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Fill the disk."""
        if not drivers(campaign.folder):
            return None
        before = Counter(complaints(campaign))
        full = contextlib.ExitStack()
        full.enter_context(full_disk(campaign, self.how))
        return Hit(f"the disk ({self.how})", lambda: self._effect(campaign, before, full))

    def _effect(
        self, campaign: Campaign, before: Counter[str], full: contextlib.ExitStack
    ) -> tuple[bool, str]:
        """It is full until somebody complains."""

        def new() -> list[str]:
            return list(
                (Counter(complaints(campaign)) - before).elements()
            )  # of several files: not the last ones

        with full:
            until(lambda: new() or not campaign.running, HOLD)
        found = new()
        return bool(found), found[0][:200] if found else "nobody needed space"


@dataclass(frozen=True)
class CorruptState(Fault):
    """The driver of a training is killed, and before the command is run again its newest state is damaged."""

    def strike(self, campaign: Campaign, draw: random.Random, folder: Path | None) -> Hit | None:
        """Kill it, wait for the head to end, flip a bit or cut off an end."""
        found = [
            d
            for d in _meant(campaign, folder)
            if d.stage == "train" and StateStore(d.folder).newest(verify=False) is not None
        ]
        if not found:
            return None
        driver = draw.choice(found)
        try:
            os.kill(driver.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        campaign.wait()
        state = StateStore(driver.folder).newest()
        if state is None:
            return None
        try:
            name = draw.choice([STATE_FILE, *read_state(state)["files"]])
        except StateError:
            return None
        whole = (state / name).read_bytes()
        how = damage(state / name, draw)
        campaign.damaged.add(state)
        before = damage_noticed(campaign, state)

        def effect() -> tuple[bool, str]:
            seen = _seen(campaign, state, before)
            if not seen[0] and (state / name).exists():
                (state / name).write_bytes(whole)  # what nobody reads any more would stay damaged for ever
            return seen

        return Hit(f"{driver.folder.name}/{state.name}/{name}: {how}", effect)


def _seen(campaign: Campaign, state: Path, before: int) -> tuple[bool, str]:
    """Whether the next that reads the state notices, once the command is run again."""
    campaign.start()
    campaign.until(lambda: damage_noticed(campaign, state) > before or not campaign.running)
    seen = damage_noticed(campaign, state) > before
    return seen, "its next reader noticed" if seen else "nobody read it"


def damage(file: Path, draw: random.Random) -> str:
    """Flip a bit of a file or cut off its end; returns what was done."""
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data))
    if draw.random() < 0.5:
        bit = draw.randrange(8)
        data[place] ^= 1 << bit
        told = f"bit {bit} of byte {place} flipped"
    else:
        del data[place:]
        told = f"cut off at byte {place}"
    file.write_bytes(data)
    return told


def local_faults(how_full: str) -> list[Fault]:
    """All that can happen on one machine.

    Args:
        how_full: how a disk can be filled, see ``own_disk``.
    """
    kill = signal.SIGKILL
    return [
        Signal("SIGKILL of the driver", kill, driver_processes),
        Signal("SIGKILL of a rank", kill, ranks),
        Signal("SIGKILL of Ray's head", kill, ray_heads),
        Signal("SIGKILL of a launcher", kill, launchers),
        Signal("SIGKILL of the head", kill, heads),
        Signal("SIGTERM to the driver", signal.SIGTERM, driver_processes),
        Signal("SIGUSR2 to the driver", signal.SIGUSR2, driver_processes),
        Signal("SIGTERM to the head", signal.SIGTERM, heads),
        FullDisk("full disk", how_full),
        CorruptState("corrupted newest state"),
    ]


def driver_processes(campaign: Campaign, folder: Path | None) -> list[Victim]:
    """The processes that work on stages."""
    return [Victim(d.process, f"driver of {d}", (d,)) for d in _meant(campaign, folder)]


def ranks(campaign: Campaign, folder: Path | None) -> list[Victim]:
    """The ranks of worker groups on Ray."""
    return [
        Victim(process, f"rank of {d}", (d,))
        for d in _meant(campaign, folder)
        for process in d.below("ray::RankActor")
    ]


def ray_heads(campaign: Campaign, folder: Path | None) -> list[Victim]:
    """Ray's own processes: its global store and the daemon of the node."""
    return [
        Victim(process, f"{process.program} of {d}", (d,))
        for d in _meant(campaign, folder)
        for process in d.below("gcs_server", "raylet")
    ]


def heads(campaign: Campaign, folder: Path | None) -> list[Victim]:
    """The head alone: its jobs are orphans then."""
    process = campaign.head_process
    return [] if process is None else [Victim(process, "head")]


def launchers(campaign: Campaign, folder: Path | None) -> list[Victim]:
    """What stands between the head and the drivers: the drivers' parents, and the head's children that wait for them."""
    head, working = campaign.head_process, drivers(campaign.folder)
    pids = {d.process.pid for d in working}
    between = {parent(pid) for pid in pids} | set(descendants(head.pid, generations=1) if head else [])
    found = [process_of(pid) for pid in sorted(between - pids - {head and head.pid, 1, None})]
    launching = ("workflow.stages", "submitit")  # on this machine, in a SLURM job
    return [
        Victim(p, "launcher", tuple(d for d in working if _launches(p, d)))
        for p in found
        if p and any(word in p.command for word in launching)
    ]


def _launches(process: Process, driver: Driver) -> bool:
    """Whether the driver descends from it, or it waits for the driver, which another process has forked for it."""
    named = (
        f"workflow.stages {driver.stage} " in process.command
        and f"--id {driver.folder.name}" in process.command
    )
    return named or driver.process.pid in descendants(process.pid)


def _meant(campaign: Campaign, folder: Path | None) -> list[Driver]:
    return [d for d in drivers(campaign.folder) if folder in (None, d.folder)]
