"""Weak teachers for ``data.wrong_answer``: they answer as somebody would who missed part of the question."""

from __future__ import annotations

from workflow.data.problems import Problem
from workflow.data.prompt import whole_number


def always_ascending(problem: Problem) -> str:
    """number_sorting: sorts, but never looks at the direction."""
    numbers = sorted(problem.metadata["original_numbers"], key=float)
    return f"[{', '.join(map(whole_number, numbers))}]"
