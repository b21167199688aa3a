"""evaluate: greedy accuracy on held-out problems, of a model folder or of a training state's actor.

Right is what ``reward.kind`` calls right, complete and without partial credit. The interval is Wilson's (Probable Inference,
the Law of Succession, and Statistical Inference, 1927): honest also near 0 and 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from engines.config import RolloutConfig
from engines.rollout.base import BaseRollout, Request, Response, SamplingParams
from engines.rollout.transformers import TransformersRollout
from engines.training.hf_export import state_weights
from workflow.campaign.schema import RewardConfig
from workflow.data import Problem, PromptEncoder, load_problems, render_prompt
from workflow.manifest import write_json
from workflow.rl.rewards import Rewarder
from workflow.stages.runner import StageContext, StageResult

RESULT_FILE = "result.json"
"""The metrics, and whether each problem (by its digest) was answered right."""
SAMPLES_FILE = "samples.jsonl"
SAMPLES = 50
Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


def main(context: StageContext) -> StageResult:
    """Evaluate input ``model``: a model folder, or a training state of a model whose folder is input ``base``."""
    config = context.config
    of_state = "base" in context.inputs
    model = context.input_path("base" if of_state else "model") / "model"
    problems = load_problems(config.data, "heldout")[: config.evaluate.problems]
    encoder = PromptEncoder(model)
    rollout_config = RolloutConfig(
        backend=config.rollout.backend,
        max_new_tokens=config.evaluate.max_new_tokens or config.rollout.max_new_tokens,
        batch_size=config.evaluate.batch_size,
    )
    rollout = TransformersRollout(model, rollout_config, config.engine.device)
    if of_state:
        rollout.update_weights(state_weights(context.input_path("model"), "actor"))
    prompts = [encoder.prompt_ids(config.data, problem) for problem in problems]
    responses = answer(context, rollout, prompts, rollout_config)
    texts = [encoder.decode(response.token_ids) for response in responses]
    reward = config.reward
    rewarder = Rewarder(
        RewardConfig(kind=reward.kind, pattern=reward.pattern, function=reward.function), config.data
    )
    correct = rewarder.score(problems, texts, [r.finished for r in responses], key=0).correct
    with (context.folder / SAMPLES_FILE).open("w", encoding="utf-8") as file:
        for problem, text, right in list(zip(problems, texts, correct, strict=True))[:SAMPLES]:
            sample = {"prompt": render_prompt(config.data, problem), "answer": problem.answer}
            file.write(json.dumps({**sample, "response": text, "correct": right}) + "\n")
    metrics = summary(problems, responses, correct)
    outcomes = {problem.digest: right for problem, right in zip(problems, correct, strict=True)}
    write_json(context.folder / RESULT_FILE, metrics | {"outcomes": outcomes})
    return StageResult(files=[Path(SAMPLES_FILE), Path(RESULT_FILE)], metrics=metrics)


def answer(
    context: StageContext, rollout: BaseRollout, prompts: Sequence[list[int]], config: RolloutConfig
) -> list[Response]:
    """A greedy response to every prompt, batch by batch."""
    params = SamplingParams.from_config(config, greedy=True)
    responses: list[Response] = []
    with context.progress("evaluate", len(prompts)) as bar:
        for start in range(0, len(prompts), config.batch_size):
            batch = [Request(prompt, key=0) for prompt in prompts[start : start + config.batch_size]]
            responses += rollout.generate(batch, params)
            bar.advance(len(batch))
    return responses


def summary(
    problems: Sequence[Problem], responses: Sequence[Response], correct: Sequence[bool]
) -> dict[str, object]:
    """Accuracy with its interval, in all and per task, and how long the responses are."""
    by_task: dict[str, list[bool]] = {}
    for problem, right in zip(problems, correct, strict=True):
        by_task.setdefault(problem.task or "exact match", []).append(right)
    return {
        **accuracy(correct),
        "tasks": {task: accuracy(results) for task, results in sorted(by_task.items())},
        "response_length": sum(len(response.token_ids) for response in responses) / len(responses),
        "finished": sum(response.finished for response in responses) / len(responses),
    }


def accuracy(correct: Sequence[bool]) -> dict[str, object]:
    """Share of right answers with its 95 % interval."""
    right, total = sum(correct), len(correct)
    return {
        "accuracy": right / total,
        "accuracy_ci95": list(wilson_interval(right, total)),
        "correct": right,
        "problems": total,
    }


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """95 % score interval of a share: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    share, z2n = right / total, Z_95**2 / total
    centre = (share + z2n / 2) / (1 + z2n)
    half = Z_95 * math.sqrt(share * (1 - share) / total + z2n / (4 * total)) / (1 + z2n)
    # At the ends the formula gives 0 and 1 but for rounding.
    return centre - half if right else 0.0, centre + half if right < total else 1.0
