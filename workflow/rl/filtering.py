"""Samples of one step, and dynamic sampling: prompts from which nothing can be learnt are replaced by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engines.rollout.base import Response
from engines.training.batch import PackedBatch
from workflow.campaign.algorithm import FilterConfig
from workflow.rl.advantages import EPSILON
from workflow.rl.rewards import Scores


@dataclass(frozen=True)
class Samples:
    """Responses with what they earned; those to one prompt stand in a row."""

    batch: PackedBatch
    responses: list[Response]
    scores: Scores

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, indices: Sequence[int]) -> Samples:
        """The samples ``indices``, in the order given."""
        rewards, correct = self.scores.rewards, self.scores.correct
        scores = Scores([rewards[i] for i in indices], [correct[i] for i in indices])
        return Samples(self.batch.select(indices), [self.responses[i] for i in indices], scores)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """All samples of ``parts``, in order."""
        scores = Scores(
            [reward for part in parts for reward in part.scores.rewards],
            [right for part in parts for right in part.scores.correct],
        )
        batch = PackedBatch.concatenate([part.batch for part in parts])
        return Samples(batch, [response for part in parts for response in part.responses], scores)


def informative(samples: Samples, size: int, config: FilterConfig) -> list[bool]:
    """Of each prompt, whether its ``size`` samples differ in what ``config.by`` says (Yu et al., DAPO, equation 11)."""
    by = samples.scores.rewards if config.by == "reward" else samples.scores.correct
    values = torch.tensor(by, dtype=torch.float64).view(-1, size)
    return ((values.amax(1) - values.amin(1)) > EPSILON).tolist()


def chosen_prompts(useful: Sequence[bool], wanted: int) -> list[int]:
    """``wanted`` prompts in the order in which they were drawn: the useful ones, filled up with others when they are too few."""
    order = sorted(range(len(useful)), key=lambda prompt: not useful[prompt])
    return sorted(order[:wanted])


def with_left_out(batch: PackedBatch, left_out: Sequence[bool], size: int) -> PackedBatch:
    """Adds ``left_out`` per sequence: whether its prompt, of ``size`` samples each, fills up the step without being useful."""
    of_samples = torch.tensor(left_out).repeat_interleave(size)
    return replace(batch, sequences={**batch.sequences, "left_out": of_samples})


def without_advantage(batch: PackedBatch) -> PackedBatch:
    """Takes the advantages of prompts that were left out: samples that are alike to the filter may differ in what it does not look at."""
    left_out = torch.repeat_interleave(batch.sequences["left_out"], batch.lengths)
    return batch.with_tokens(advantages=torch.where(left_out, 0.0, batch.tokens["advantages"]))
