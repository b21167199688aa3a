"""sft: supervised fine-tuning on demonstrations, from the base model to the model that RL starts from.

Short, and the same for all runs that share it; so it is not cut into segments, and when interrupted it starts again.
Demonstrations are the answers of the first training problems; with ``data.wrong_share`` a weak teacher gives some of them, as
real demonstrations have it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from engines.streams import stream_key
from engines.training.batch import PackedBatch
from engines.workers.group import build_groups
from engines.workers.spec import RoleSpec
from workflow.campaign.schema import DataConfig
from workflow.data import Problem, PromptEncoder, UserFunction, demonstration, load_problems
from workflow.rl.batches import demonstration_batch
from workflow.rl.losses import SftLoss
from workflow.rl.metrics import SFT_CURVE_FILE, metrics_line, read_metrics
from workflow.rl.order import DataCursor
from workflow.stages.runner import StageContext, StageResult

ROLE = "actor"


def main(context: StageContext) -> StageResult:
    """Train for ``sft.steps`` steps; publish the model folder ``model/`` and the loss curve."""
    config, run = context.config, context.spec.learning_identity
    base = context.input_path("model") / "model"
    problems = load_problems(config.data, "train")[: config.sft.demonstrations]
    examples = demonstrations(config.data, problems, PromptEncoder(base), run)
    cursor = DataCursor(run, [problem.digest for problem in problems])
    spec = RoleSpec(
        ROLE, "language_model", config.engine, base, config.sft.optimizer.at(config.sft.lr), config.sft.steps
    )
    curve: list[dict[str, float]] = []
    with build_groups([spec])[ROLE] as group, context.progress("sft", config.sft.steps) as bar:
        for step in range(1, config.sft.steps + 1):
            batch = examples.select(cursor.take(config.sft.batch_size)).to_tensordict()
            metrics = group.update(ROLE, batch, SftLoss(), mini_batch_size=config.sft.batch_size)
            point = {name: total / count for name, (total, count) in metrics.items() if name in ("nll", "lr")}
            curve.append({"step": step, **point})
            bar.advance(nll=point["nll"])
        model = context.folder / "model"
        shutil.rmtree(model, ignore_errors=True)
        group.export(ROLE, model)
    path = context.folder / SFT_CURVE_FILE
    path.write_text("".join(map(metrics_line, curve)), encoding="utf-8")
    return StageResult(
        files=[Path("model"), Path(SFT_CURVE_FILE)],
        metrics=read_metrics(path)[-1],
        steps_planned=config.sft.steps,
        steps_done=len(curve),
        seeds={"seed": config.seed},
        extra={"demonstrations": len(problems)},
    )


def demonstrations(
    data: DataConfig, problems: Sequence[Problem], encoder: PromptEncoder, run: str
) -> PackedBatch:
    """Every problem's prompt and demonstrated answer, in the order of ``problems``."""
    answers = [demonstration(data, problem) for problem in problems]
    teacher = UserFunction("data.wrong_answer", data.wrong_answer, str) if data.wrong_answer else None
    shown = [
        weak_answer(i, problems, answers, teacher, run)
        if stream_key(run, "teacher", problem.digest) < data.wrong_share * 2**63
        else answers[i]
        for i, problem in enumerate(problems)
    ]
    prompts = [encoder.prompt_ids(data, problem) for problem in problems]
    return demonstration_batch(prompts, [encoder.answer_ids(answer) for answer in shown])


def weak_answer(
    index: int, problems: Sequence[Problem], answers: Sequence[str], teacher: UserFunction | None, run: str
) -> str:
    """What a weak teacher answers to problem ``index``: what ``data.wrong_answer`` says, or another problem's answer."""
    problem = problems[index]
    if teacher is not None:
        return teacher(problem=problem)
    others = max(len(problems) - 1, 1)
    return answers[(index + 1 + stream_key(run, "wrong answer", problem.digest) % others) % len(problems)]
