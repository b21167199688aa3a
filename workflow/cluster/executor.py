"""The stage jobs of one head: submit, watch, and say what became of them. Knows nothing of Snakemake. No torch.

One thread calls ``poll``. Success is a valid manifest and nothing else; it is looked for first, in the file system, so a finished
stage is seen at once and without asking SLURM. SLURM is asked, once for all jobs and ever less often, only to find out about jobs
that ended without a word.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engines.config import ConfigError
from workflow.campaign.pace import SIGNAL_SLACK, estimated_save, measured_pace, warning_for
from workflow.campaign.plan import StageSpec
from workflow.campaign.site import SiteConfig
from workflow.campaign.triggers import Triggers
from workflow.cluster.jobs import JobFolder, job_log, published, read_start, unpublished
from workflow.cluster.launcher import Task
from workflow.cluster.nodes import expand_nodes
from workflow.cluster.placement import SbatchRequest, check_place, place_stage
from workflow.cluster.slurm import SlurmLimit, SlurmRefused, SlurmUnavailable, slurm
from workflow.cluster.stage_job import Failure, StageCommand, StageJob
from workflow.cluster.states import (
    UNKNOWN,
    FailureClass,
    StateWatch,
    classify,
    ended_for_memory,
    failed_nodes,
    find_jobs,
    last_lines,
    settled,
)
from workflow.cluster.submit import give_task, preamble, submit

ASK_SECONDS = (1.0, 15.0)
"""Between questions to SLURM: at first, and at most when nothing changes."""
WAIT_SECONDS = (2.0, 60.0)
"""Before a submission that SLURM could not take is tried again: at first, and at most."""
UNTOLD_SECONDS = 90.0
"""For SLURM to tell why a job ended, and for a manifest to be seen on this host."""
WARNING_SECONDS = 2 * SIGNAL_SLACK
"""At least, before the end of a job."""
ATTEMPTS = "attempts.jsonl"


class StageJobs:
    """All jobs of a head.

    Args:
        site: where jobs go.
        results: the results folder.
        code: the copy of the source that jobs run.
        say: tells people.
        triggers: what people ask of a stage by files.
        warning_seconds: before the end of a job, when its stage is told to save; from measured steps and saves when None.
    """

    def __init__(
        self,
        site: SiteConfig,
        results: Path,
        code: Path,
        say: Callable[[str], None],
        triggers: Callable[[StageSpec], Triggers],
        warning_seconds: int | None,
    ) -> None:
        self._site, self._results, self._code, self._say = site, results, code.absolute(), say
        self._triggers, self._warning = triggers, warning_seconds
        self._jobs: list[StageJob] = []
        self._watch = StateWatch()
        self._lock = threading.Lock()
        self._cancelled = False
        self._ask_at, self._ask_every = 0.0, ASK_SECONDS[0]

    def __len__(self) -> int:
        return len(self._jobs)

    def check(self, specs: Iterable[StageSpec]) -> None:
        """Refuse before the first job what could not be submitted after hours of others.

        Raises:
            ConfigError: what :func:`workflow.cluster.placement.place_stage` says of the stages, each message once.
        """
        refused = {}
        for spec in specs:
            for step in spec.cuts or [None]:  # each segment has the ranks of its own layout
                try:
                    check_place(spec, self._site, step, self._warning or warning_of(spec))
                except ConfigError as error:
                    refused[str(error)] = None
        if refused:
            raise ConfigError("\n".join(refused))

    def start(
        self,
        spec: StageSpec,
        step: int | None,
        command: StageCommand,
        walltime_seconds: int | None = None,
        retried: bool = False,
    ) -> StageJob:
        """Take up a stage: its job is submitted, or found again, by the next ``poll``."""
        folder = JobFolder(self._results, spec.stage, spec.id, step)
        job = StageJob(spec, step, command, walltime_seconds, retried, folder)
        with self._lock:
            self._jobs.append(job)
            self._ask_at = 0.0
        return job

    def poll(self) -> None:
        """One look at everything; what ended has its ``outcome`` afterwards."""
        with self._lock:
            for job in self._jobs:
                self._advance(job)
            self._ask_slurm()
            for job in self._jobs:
                self._judge(job)
            self._jobs = [job for job in self._jobs if job.outcome is None]

    def cancel(self) -> list[str]:
        """End all jobs of this head that are known; nothing is submitted any more. Returns their ids."""
        with self._lock:
            self._cancelled = True
            ids = [job.record.job for job in self._jobs if job.record is not None and job.record.job]
            if ids:
                self._say(f"cancelling {len(ids)} SLURM jobs: {', '.join(ids)}")
                try:
                    slurm("scancel", *ids)
                except (SlurmUnavailable, SlurmRefused, SlurmLimit) as error:
                    self._say(
                        f"they go on, for SLURM did not take it: {error}; `scancel {' '.join(ids)}` ends them"
                    )
            self._jobs.clear()
            return ids

    # --- from a stage to a job

    def _advance(self, job: StageJob) -> None:
        """Look for the manifest; without one, make sure that there is a job."""
        if published(job.spec, job.step):
            job.outcome = True
            return
        if job.submitted or self._cancelled or time.monotonic() < job.not_before:
            return
        try:
            self._find_again(job)
            if not job.submitted and self._triggers(job.spec).stop_asked:
                job.outcome = self._fail(job, FailureClass.STOPPED, "no job is submitted for it")
            elif not job.submitted:
                self._submit(job)
        except (SlurmUnavailable, SlurmLimit) as error:
            seconds = min(WAIT_SECONDS[0] * 2**job.waits, WAIT_SECONDS[1])
            job.waits += 1
            job.not_before = time.monotonic() + seconds
            if job.said != str(error):
                job.said = str(error)
                self._say(f"{job.title}: SLURM takes no job now, trying again: {error}")
        except (SlurmRefused, ConfigError) as error:
            job.outcome = self._fail(job, FailureClass.REFUSED, str(error))

    def _find_again(self, job: StageJob) -> None:
        """The job that an earlier head submitted, or an sbatch that did not seem to work, when it has not ended."""
        record = job.folder.read()
        if record is None or record.failure is not None:
            return
        if record.job is None:
            with self._no_sbatch_under_way(job.folder):
                ids = find_jobs(record.name)
            if not ids:
                # A busy controller may still come to what it was asked by an sbatch that gave up waiting for it.
                if job.missed != record.name:
                    job.missed = record.name
                    raise SlurmUnavailable(f"job {record.name} is not known yet; asking once more")
                return
            record = job.folder.write(record, job=ids[-1])
            give_task(ids[-1], self._task(job, self.request(job)), job.folder.path)
        state = self._watch.query([record.job])[record.job]
        if state.final:
            return
        job.record, job.submitted, job.state = record, True, state
        self._say(f"{job.title}: going on with SLURM job {record.job} ({state.state})")

    @contextmanager
    def _no_sbatch_under_way(self, folder: JobFolder) -> Iterator[None]:
        """Whoever was killed may have left an sbatch behind that is still busy."""
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.submit_lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SlurmUnavailable(
                    f"{folder.submit_lock}: an earlier sbatch is still under way"
                ) from None
            yield

    def _submit(self, job: StageJob) -> None:
        earlier = job.folder.read()
        memory, excluded = 1.0, []
        if earlier is not None:
            memory = earlier.memory_factor
            excluded = earlier.excluded if job.retried else []
        request = self.request(job, memory, excluded)
        job.folder.path.mkdir(parents=True, exist_ok=True)
        request.output.parent.mkdir(parents=True, exist_ok=True)
        text = preamble(self._site, self._code, Path.cwd())
        log = str(job_log(job.spec, job.step))
        record = job.folder.intend(
            request.name,
            log,
            earlier,
            partition=request.partition,
            excluded=excluded,
            memory_factor=memory,
        )
        named = replace(request, name=record.name)
        try:
            id = submit(named, self._task(job, request), job.folder.path, text, job.folder.submit_lock)
        except SlurmLimit:
            job.missed = record.name  # it was answered, so nothing is on its way
            raise
        job.record = job.folder.write(record, job=id)
        job.submitted = True
        self._ask_every = ASK_SECONDS[0]
        where = f" on {request.partition}" if request.partition else ""
        self._say(f"{job.title}: SLURM job {id}{where}, log {log}")

    def request(self, job: StageJob, memory: float = 1.0, excluded: list[str] = ()) -> SbatchRequest:
        """What SLURM is asked for on behalf of a stage.

        Raises:
            ConfigError: see :func:`workflow.cluster.placement.place_stage`.
        """
        return place_stage(
            job.spec,
            self._site,
            output=job_log(job.spec, job.step).absolute(),
            step=job.step,
            walltime_seconds=job.walltime_seconds,
            warning_seconds=self._warning or warning_of(job.spec),
            memory_factor=memory,
            exclude=excluded,
        )

    def _task(self, job: StageJob, request: SbatchRequest) -> str:
        spec, key = job.spec, self._site.key_of(job.spec.device)
        task = Task(
            stage=spec.stage,
            name=spec.name,
            step=job.step,
            folder=str(Path.cwd()),
            registry=str(job.folder.path.absolute()),
            arguments=job.command.arguments,
            variables=job.command.variables,
            nodes=request.nodes,
            ranks_per_node=request.tasks_per_node,
            device=spec.device.computed,
            site_key=f"site.devices.{key}",
            offered=self._site.devices[key],
            manifest=spec.manifest(job.step),
            attempts=f"{spec.folder}/{ATTEMPTS}",
            time_seconds=request.time_seconds,
            warning_seconds=request.warning_seconds,
            requeue=self._site.requeue,
        )
        return json.dumps(task.model_dump(mode="json"))

    # --- from a job to an outcome

    def _ask_slurm(self) -> None:
        running = [job for job in self._jobs if job.submitted and job.outcome is None]
        now = time.monotonic()
        if not running or now < self._ask_at:
            return
        states = self._watch.query([job.record.job for job in running])
        changed = False
        for job in running:
            new = states[job.record.job]
            changed |= new.state != job.state.state
            job.state = new
        restless = changed or any(job.ended is not None or job.folder.end(job.record.job) for job in running)
        self._ask_every = ASK_SECONDS[0] if restless else min(self._ask_every * 1.5, ASK_SECONDS[1])
        self._ask_at = now + self._ask_every

    def _judge(self, job: StageJob) -> None:
        """Has the job ended without a manifest?"""
        if not job.submitted or job.outcome is not None:
            return
        end = job.folder.end(job.record.job)
        if not settled(end):
            # SLURM tells why, or the manifest of a job that completed is still to be seen on this host.
            silent = end is not None and end.outcome != "requeued" and job.state.state == UNKNOWN
            if not (silent or job.state.final):
                job.ended = None
                return
            job.ended = job.ended or time.monotonic()
            late = time.monotonic() - job.ended > UNTOLD_SECONDS
            complete = job.state.state == "COMPLETED" or (end is not None and end.outcome == "published")
            if not late and (silent or complete):
                return
        if published(job.spec, job.step):  # between the first look and SLURM's answer
            job.outcome = True
            return
        over_memory = ended_for_memory(job_log(job.spec, job.step), job.record.job)
        start = read_start(job.folder.path)
        kind = classify(job.state, end, over_memory, start is not None and start.job == job.record.job)
        told = f"SLURM job {job.record.job} ended" + (f" as {job.state.state}" if job.state.final else "")
        if end is not None:
            told += f"; its launcher: {end.outcome}, exit code {end.code}, on {end.node}"
            told += f" ({end.message})" if end.message else ""
            told += f"; {unpublished(job.spec, job.step)}" if end.outcome == "published" else ""
        job.outcome = self._fail(job, kind, told)

    def _fail(self, job: StageJob, kind: FailureClass, told: str) -> Failure:
        log = job_log(job.spec, job.step)
        if job.record is not None:
            changes: dict[str, object] = {"failure": str(kind)}
            if kind == FailureClass.NODE_FAIL and job.state.nodes:
                changes["excluded"] = sorted(
                    {*job.record.excluded, *failed_nodes(expand_nodes(job.state.nodes))}
                )
            if kind == FailureClass.OUT_OF_MEMORY:
                changes["memory_factor"] = job.record.memory_factor * 2
            job.folder.write(job.record, **changes)
        stage_log = Path(job.spec.log(job.step))
        if kind == FailureClass.STOPPED:
            return Failure(kind, f"{job.title}: {told}; {self._triggers(job.spec).way_on}")
        lines = [f"{job.title}: {kind}: {told}"]
        for path in (log, stage_log):
            if tail := last_lines(path):
                lines += [f"last lines of {path}:", *(f"  {line}" for line in tail)]
        return Failure(kind, "\n".join(lines))


def warning_of(spec: StageSpec) -> int:
    """Seconds before the end of its job at which a stage is told to save: at least WARNING_SECONDS, more where saves take longer.

    By published segments of a training, or of others like it; before the first by the size of its state.
    """
    if not spec.cuts:
        return WARNING_SECONDS
    pace = measured_pace(spec)
    needed = warning_for(estimated_save(spec)) if pace is None else pace.warning
    return max(WARNING_SECONDS, needed)
