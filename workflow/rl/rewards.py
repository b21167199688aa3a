"""What a response earns: the task's verifier, exact match, a pattern, or a user's function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines.streams import stream_key
from workflow.campaign.schema import DataConfig, OverlongConfig, RewardConfig
from workflow.data import Problem, UserFunction, Verifier, demonstration

RewardFunction = Callable[[str, Problem], float]


@dataclass(frozen=True)
class Scores:
    """Of a batch of responses, in their order."""

    rewards: list[float]
    """What training maximises."""
    correct: list[bool]
    """Complete and of base reward 1. Not touched by partial credit or shuffling."""


class Rewarder:
    """Scores responses as ``config`` says.

    reward = (1 - partial_credit) * base + partial_credit * (share of the answer's tokens in the right place).
    A response that was cut off before its end earns no base reward and is never correct. Near the longest response a
    penalty is taken off (``overlong_penalty``).

    Raises:
        UserFunctionError: the user's function cannot be imported; from ``score``, that it failed on a response.
    """

    def __init__(self, config: RewardConfig, data: DataConfig):
        self._config, self._data = config, data
        self._base = base_reward(config, data)

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        finished: Sequence[bool],
        key: int,
        room: Sequence[int] | None = None,
    ) -> Scores:
        """Score each response to the problem at its place.

        Args:
            finished: whether it ended by itself.
            key: names the permutation of the shuffled control.
            room: tokens that were left to it, for the penalty on long ones; none is taken off when it is not given.
        """
        rewards, correct = [], []
        for problem, response, complete in zip(problems, responses, finished, strict=True):
            base = self._base(response, problem) if complete else 0.0
            correct.append(base == 1.0)
            credit = self._config.partial_credit
            if credit:
                base = (1 - credit) * base + credit * placed_share(
                    response, demonstration(self._data, problem)
                )
            rewards.append(base)
        if room is not None:
            penalties = [overlong_penalty(left, self._config.overlong) for left in room]
            rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        if self._config.shuffled:
            order = sorted(range(len(rewards)), key=lambda i: stream_key(key, "shuffled", i))
            rewards = [rewards[i] for i in order]
        return Scores(rewards, correct)


def base_reward(config: RewardConfig, data: DataConfig) -> RewardFunction:
    """What judges a whole response, from ``reward.kind``; 1 is right."""
    if config.kind == "verifier":
        verifier = Verifier(data)
        return lambda response, problem: verifier.score(problem, response)
    if config.kind == "exact":
        return exact_match
    if config.kind == "regex":
        return _pattern_match(config.pattern)
    function = UserFunction("reward.function", config.function, _finite)
    return lambda response, problem: function(response, problem=problem)


def exact_match(response: str, problem: Problem) -> float:
    """1 when the response is the answer, apart from white space around it; else 0."""
    return float(response.strip() == problem.answer.strip())


def _finite(reward: Any) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"returned {value}, a finite number is needed")
    return value


def _pattern_match(pattern: str) -> RewardFunction:
    compiled = re.compile(pattern)

    def match(response: str, problem: Problem) -> float:
        found = compiled.search(response)
        # A group that took no part in the match is None.
        return exact_match((found and found.group(1)) or "", problem)

    return match


def overlong_penalty(room: int, config: OverlongConfig) -> float:
    """penalty * max(buffer - room, 0) / buffer, where a response of ``max_new_tokens - room`` tokens might have had ``room`` more.

    (Yu et al., DAPO, equation 13, soft overlong punishment: 0 up to where the buffer begins, then growing to its end.)
    """
    return config.penalty * max(config.buffer - room, 0) / config.buffer if config.buffer else 0.0


def placed_share(response: str, answer: str) -> float:
    """Share of the answer's tokens that the response has in the right place, over the longer of the two.

    Tokens are words when the answer has several, else characters.
    """
    split = str.split if len(answer.split()) > 1 else list
    given, wanted = split(response.strip()), split(answer.strip())
    placed = sum(a == b for a, b in zip(given, wanted, strict=False))
    return placed / max(len(given), len(wanted), 1)
