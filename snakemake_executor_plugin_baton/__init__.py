"""Snakemake's executor ``baton``: one SLURM job per stage. Snakemake finds plugins as top-level packages only; the work is in workflow.cluster.

No Snakemake runs in the jobs. A rule's command is run as it stands, since its one output, the manifest, is published by the stage
itself by one rename; Snakemake in the head then does its book-keeping as for a local job. That saves two seconds per job, and
nothing on a compute node reads the Snakefile or a configuration again.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.logging import LoggerExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase
from snakemake_interface_executor_plugins.workflow import WorkflowExecutorInterface

from engines.config import ConfigError
from workflow.campaign.head import RESULTS, Head
from workflow.campaign.plan import PlanError
from workflow.campaign.triggers import Triggers
from workflow.cluster.executor import StageJobs
from workflow.cluster.stage_job import Failure, StageCommand

WAKE_SECONDS = 0.05
"""In which a new job is noticed."""
FEW_JOBS = 20
"""As many are looked at in every ``poll``; for more the file system gets as many looks per second, not more."""


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """What the profile or the command line may set, as ``--baton-...``."""

    warning: Optional[int] = field(  # noqa: UP045  Snakemake reads the annotation
        default=None,
        metadata={
            "help": "Seconds before the end of a job at which its stage is told to save its state; "
            "by default 120, or more where steps and saves were slower"
        },
    )
    poll: float = field(
        default=0.5, metadata={"help": "Seconds between looks for new manifests, of up to 20 jobs"}
    )


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
)


class Executor(RemoteExecutor):
    """Snakemake's jobs on one side, :class:`workflow.cluster.executor.StageJobs` on the other."""

    def __init__(self, workflow: WorkflowExecutorInterface, logger: LoggerExecutorInterface) -> None:
        head = workflow.globals.get("HEAD")
        if not isinstance(head, Head):
            raise WorkflowError("the executor baton runs Baton's own Snakefile: no HEAD is defined")
        self._plan = head.plan
        self._wake = threading.Event()
        self._stages = StageJobs(
            head.site,
            RESULTS,
            head.code,
            logger.info,
            lambda spec: Triggers.of(head.plan, head.folder, spec),
            workflow.executor_settings.warning,
        )
        try:
            self._stages.check(head.plan.stages.values())
        except ConfigError as error:
            raise WorkflowError(str(error)) from None
        super().__init__(workflow, logger)  # starts the thread that watches

    def run_job(self, job: JobExecutorInterface) -> None:
        """Take up a job; it is submitted by the thread that watches."""
        if job.is_group():
            raise WorkflowError(
                "the executor baton runs one stage per job, whose walltime, warning and requeueing are that stage's own; "
                "remove --groups (docs/slurm.md, Groups)"
            )
        runtime = job.resources.get("runtime")
        step = job.wildcards_dict.get("step")
        try:
            stage = self._stages.start(
                self._plan.find(job.rule.name, job.wildcards_dict["id"]),
                None if step is None else int(step),
                StageCommand.read(job.shellcmd),
                walltime_seconds=None if runtime is None else int(runtime) * 60,
                retried=job.attempt > 1,
            )
        except (ConfigError, PlanError, KeyError) as error:
            raise WorkflowError(f"rule {job.rule.name}: {error}") from None
        self.report_job_submission(SubmittedJobInfo(job, aux={"stage": stage}))
        self._wake.set()

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report what has ended; yield what goes on."""
        if active_jobs:
            await asyncio.to_thread(self._stages.poll)
        for info in active_jobs:
            stage = info.aux["stage"]
            if stage.record is not None:
                info.external_jobid = stage.record.job
            if stage.outcome is None:
                yield info
            elif isinstance(stage.outcome, Failure):
                if not stage.outcome.retry:
                    info.job.attempt = info.job.restart_times + 1  # Snakemake would run it again, blindly
                self.report_job_error(info, msg=f"\n{stage.outcome.message}\n")
            else:
                self.report_job_success(info)

    async def sleep(self) -> None:
        """Until the next look, or a new job."""
        crowd = max(len(self._stages) / FEW_JOBS, 1.0)
        end = time.monotonic() + self.executor_settings.poll * crowd
        while not self._wake.is_set() and time.monotonic() < end:
            await asyncio.sleep(WAKE_SECONDS)
        self._wake.clear()

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """The head was interrupted: its jobs end with it."""
        self._stages.cancel()
