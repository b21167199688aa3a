"""train: one segment of an RL run, from the newest state at or before its end to the state at its end.

A segment ends at ``context.step``. Where it begins is found, not told: the newest verified state in the stage's folder (its
own, or the previous segment's), or else the SFT model. So a killed segment goes on from what is there, and a run that is
never cut takes the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from engines.checkpoint import StateError, StateStore, read_state, verify_state
from engines.checkpoint.verify import STATE_FILE
from engines.workers.group import WorkerGroup, build_groups
from engines.workers.spec import RoleSpec
from workflow.campaign.pace import LOAD_SECONDS, MEAN_STEP_SECONDS, SAVE_SECONDS, START_SECONDS, STEP_SECONDS
from workflow.campaign.slice import Slice
from workflow.data import PromptEncoder, load_problems
from workflow.manifest import is_released
from workflow.rl.metrics import METRICS_FILE, MetricsLog, Stopwatch, read_metrics
from workflow.rl.rewards import Rewarder
from workflow.rl.saving import StateSaver
from workflow.rl.trainer import PPOTrainer, optimizer_steps
from workflow.stages.retention import published_steps
from workflow.stages.runner import StageContext, StageResult
from workflow.stages.stop import StoppedByUser, StoppedOnRequest


class TooFewSteps(RuntimeError):
    """A segment would end before the step at which it was planned to end."""


def main(context: StageContext) -> StageResult:
    """Train up to ``context.step`` and publish the state there."""
    context.stop.will_poll()
    store, watch = StateStore(context.folder), Stopwatch()
    done = -1
    while done < context.step:  # once; again only where the state at a change of layout was lost
        with watch.part("load"):
            state = store.newest(at_most=context.step)
        end = layout_end(context.config, 0 if state is None else read_state(state)["step"], context.step)
        with worker_groups(context.config, context.input_path("model") / "model", end) as groups:
            trainer = new_trainer(context, groups)
            with watch.part("load"):
                resume(context, trainer, state)
            pace = advance(context, trainer, store, end)
        done = end
    if trainer.steps_done != context.step:
        raise TooFewSteps(f"{trainer.steps_done} steps are done, {context.step} were planned")
    planned = context.step - max((cut for cut in context.spec.cuts if cut < context.step), default=0)
    return StageResult(
        files=[Path(STATE_FILE), *map(Path, read_state(context.output)["files"])],
        metrics=_metrics_at(context.folder / METRICS_FILE, context.step),
        steps_planned=planned,
        steps_done=planned,
        seeds={"seed": context.config.seed},
        extra={
            "samples": trainer.samples_seen,
            "response_tokens": trainer.response_tokens,
            LOAD_SECONDS: watch.seconds["load"],
            **pace,
        },
    )


def layout_end(config: Slice, begin: int, end: int) -> int:
    """Up to which step, ``end`` at most, the layouts hold in which the step after ``begin`` is computed."""
    roles = [role for role in ("actor", "critic", "reference") if role in config.to_json()]
    changes = [change.after for role in roles for change in getattr(config, role).relay]
    return min([after for after in changes if after > begin] + [end])


@contextmanager
def worker_groups(config: Slice, model: Path, step: int) -> Iterator[dict[str, WorkerGroup]]:
    """The groups of all roles in the segment that ends at ``step``, with a rollout beside the actor; shut down at the end."""
    groups = build_groups(role_specs(config, model, step))
    try:
        groups["actor"].add_rollout(config.rollout, model)
        yield groups
    finally:
        for group in {id(group): group for group in groups.values()}.values():
            group.shutdown()


def role_specs(config: Slice, model: Path, step: int) -> list[RoleSpec]:
    """The roles of the run: an actor; a critic where the estimator has one; a reference when there is a KL penalty. All start from ``model``.

    Args:
        step: at which the segment ends; it chooses the layouts.
    """
    algorithm = config.algorithm
    optimizers = {"actor": algorithm.optimizer.at(algorithm.lr)}
    if algorithm.has_critic:
        optimizers["critic"] = algorithm.critic_optimizer.at(algorithm.critic_lr)
    if algorithm.kl.place != "none":
        optimizers["reference"] = None
    return [
        RoleSpec(
            name=role,
            model_type="value_model" if role == "critic" else "language_model",
            engine=engine.model_copy(update={"forward_only": optimizer is None}),
            model_path=model,
            optimizer=optimizer,
            total_steps=optimizer_steps(algorithm, role),
            temperature=config.rollout.temperature,
        )
        for role, optimizer in optimizers.items()
        for engine in [getattr(config, role).engine_at(step)]
    ]


def new_trainer(context: StageContext, groups: dict[str, WorkerGroup]) -> PPOTrainer:
    """The trainer before its first step."""
    config = context.config
    return PPOTrainer(
        run=context.spec.learning_identity,
        algorithm=config.algorithm,
        rollout_config=config.rollout,
        data=config.data,
        problems=load_problems(config.data, "train"),
        encoder=PromptEncoder(context.input_path("model") / "model"),
        rewarder=Rewarder(config.reward, config.data),
        groups=groups,
    )


def resume(context: StageContext, trainer: PPOTrainer, state: Path | None) -> None:
    """Load the newest verified state at or before the segment's end, if there is one."""
    if state is None:
        context.log.info("starting from the SFT model")
        return
    trainer.load(state)
    context.log.info("going on after step %d", trainer.steps_done)


def advance(context: StageContext, trainer: PPOTrainer, store: StateStore, end: int) -> dict[str, float]:
    """Iterate until step ``end``; save there, every ``checkpoint.save_every`` steps, and when asked to.

    It is asked by signals, and by the files ``save`` and ``stop`` in the run's folder. This one process decides for all ranks, after
    a step.

    Returns:
        Seconds that its parts took, for the cuts and the warning time of segments to come.

    Raises:
        StoppedOnRequest, StoppedByUser: after the state was saved.
    """
    log, config = MetricsLog(context.folder / METRICS_FILE), context.config.checkpoint
    again = damaged_steps(context.folder)  # passed over: now they can be made good
    started, steps = context.attempts.seconds, []

    def is_due(step: int) -> bool:
        return step in again or (config.save_every > 0 and step % config.save_every == 0)

    def published(step: int) -> None:
        # States inside a segment are for resuming only; published ones may still have readers. One that is computed again
        # has later ones, from which nothing here goes on.
        keep = {*context.spec.cuts, *published_steps(context.folder)}
        store.retain("last", keep=keep, of=lambda earlier: earlier <= step)
        context.log.info("the state after step %d is saved", step)

    with (
        StateSaver(trainer, store, config.asynchronous, published, context.leave_if_lost) as saver,
        context.progress("train", end - trainer.steps_done) as bar,
    ):
        while trainer.steps_done < end:
            begun = time.monotonic()
            metrics = trainer.step()
            steps.append(time.monotonic() - begun)
            context.step_done(trainer.steps_done)  # first: it ends a process whose folder is another's
            log.append(metrics)
            bar.advance(**_shown(metrics))
            saver.check()
            save, stopped = context.triggers.save_asked, _asked_to_stop(context)
            wait = save or stopped is not None or trainer.steps_done == end
            if (wait or is_due(trainer.steps_done)) and saver.save(wait):
                stopped = stopped or _asked_to_stop(context)  # while it was saved
            if save:
                context.triggers.saved()
            if stopped and trainer.steps_done < context.step:
                raise stopped(f"the state after step {trainer.steps_done} is saved")
    return pace_of(started, steps, saver.slowest)


def _asked_to_stop(context: StageContext) -> type[StoppedOnRequest] | None:
    if context.triggers.stop_asked:
        return StoppedByUser
    return StoppedOnRequest if context.stop.requested else None


def damaged_steps(folder: Path) -> set[int]:
    """Published steps whose states should be there and are not intact."""
    found = set()
    for step in published_steps(folder):
        state = folder / f"step{step:06d}"
        try:
            is_released(state) or verify_state(state)
        except StateError:
            found.add(step)
    return found


def pace_of(started: float, steps: Sequence[float], save: float) -> dict[str, float]:
    """What a segment's manifest says of its times, in seconds; nothing when no step was left to be done."""
    if not steps:
        return {}
    return {
        START_SECONDS: started,
        STEP_SECONDS: max(steps),
        MEAN_STEP_SECONDS: fmean(steps[1:] or steps),  # a first step takes many times as long as the others
        SAVE_SECONDS: save,
    }


def _metrics_at(path: Path, step: int) -> dict[str, Any]:
    """The line of ``step``; later ones are there when a segment is computed anew."""
    return next((line for line in read_metrics(path) if line["step"] == step), {})


def _shown(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in ("reward", "accuracy", "tokens_per_second")}
