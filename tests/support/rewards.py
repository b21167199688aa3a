"""Rewards for runs that are too small to learn a task. Their bytes are part of the identity of runs, and so of their samples."""

from workflow.data import Problem


def share_of_digits(response: str, problem: Problem) -> float:
    """What an untrained model can already earn."""
    return sum(map(str.isdigit, response)) / max(len(response), 1)
