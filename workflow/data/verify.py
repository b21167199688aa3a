"""reasoning-gym's generators and verifiers, behind the checks that make them safe to use in training.

Several of its verifiers hand the *response* to ``eval`` (or to sympy, which does the same). A policy samples arbitrary
text, so such tasks are refused. Others evaluate the problem itself: fine when it was generated here, refused for rows of
a file, except that a sorting task's answer may be a plain literal.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from typing import TYPE_CHECKING, Any

from engines.config import nearest
from workflow.data.errors import DataError

if TYPE_CHECKING:
    from workflow.campaign.schema import DataConfig
    from workflow.data.problems import Problem

EVALUATES_RESPONSE = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
EVALUATES_PROBLEM = frozenset({"bitwise_arithmetic", "codeio", "number_sorting"})


def check_task(name: str, where: str) -> None:
    """Refuse a task that does not exist or whose verifier would run a response as code; ``where`` names the key or row."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(f"{where}: unknown task {name!r}; {nearest(name, list(DATASETS))}")
    if name in EVALUATES_RESPONSE:
        raise DataError(
            f"{where}: the verifier of {name!r} runs responses as Python code; choose another task"
        )


def check_file_row(task: str, answer: str, where: str) -> None:
    """Refuse a file's row whose verification would run text of the file as code."""
    check_task(task, where)
    if task not in EVALUATES_PROBLEM:
        return
    try:
        if task != "number_sorting":
            raise ValueError("only generated problems of this task can be verified")
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(
            f"{where}: the verifier of {task!r} would run this row as Python code ({error})"
        ) from None


def create_generator(name: str, options: dict[str, Any], seed: int, size: int, where: str = "task") -> Any:
    """reasoning-gym's own dataset object, with a clear error for options that it does not take."""
    import reasoning_gym

    reserved = sorted({"seed", "size"} & set(options))
    if reserved:
        raise DataError(f"{where}.options.{reserved[0]}: set by data.seed and the data sizes, not per task")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}.options={options}: refused by the generator of {name!r} ({error})"
        ) from None


class Verifier:
    """Scores responses: by the task's own verifier, or by exact match where a problem has no task."""

    def __init__(self, config: DataConfig):
        self._options = {task.name: json.dumps(task.options) for task in config.tasks or []}

    def score(self, problem: Problem, response: str) -> float:
        """In [0, 1]; 1.0 is right, whatever lies below is not."""
        if problem.task is None:
            return float(response.strip() == problem.answer.strip())
        verifier = _verifier(problem.task, self._options.get(problem.task, "{}"))
        entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}
        return float(verifier.score_answer(response, entry))


@cache
def _verifier(name: str, options: str) -> Any:
    return create_generator(name, json.loads(options), seed=0, size=1)
