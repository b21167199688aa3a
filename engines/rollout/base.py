"""What every rollout engine offers: weights come in by their on-disk names, requests become responses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.config import RolloutConfig

if TYPE_CHECKING:
    from torch import Tensor


class RolloutError(ValueError):
    """A request that cannot be served, or weights that do not fit; the message names what and by how much."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen."""

    temperature: float = 1.0
    """Logits are divided by it; recorded log-probs are of that distribution."""
    top_p: float = 1.0
    """Sample among the fewest most likely tokens that together reach this probability; 1 is off."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 is off."""
    max_new_tokens: int = 64
    """Longest response, EOS included."""
    greedy: bool = False
    """Take the most likely token (the first of equals) and draw nothing."""

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise RolloutError(
                f"temperature={self.temperature}: must be above 0 (greedy=True takes the likeliest)"
            )
        if not 0 < self.top_p <= 1:
            raise RolloutError(f"top_p={self.top_p}: must be in (0, 1]")
        if self.top_k < 0:
            raise RolloutError(f"top_k={self.top_k}: must be 0 (off) or more")
        if self.max_new_tokens < 1:
            raise RolloutError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")

    @classmethod
    def from_config(
        cls, config: RolloutConfig, *, greedy: bool = False, max_new_tokens: int | None = None
    ) -> SamplingParams:
        """The parameters that ``config`` describes; evaluation passes ``greedy`` and its own length."""
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=max_new_tokens or config.max_new_tokens,
            greedy=greedy,
        )


@dataclass(frozen=True)
class Request:
    """One sample to draw. Samples of one prompt are requests with equal ``prompt_ids`` and different keys."""

    prompt_ids: list[int]
    key: int
    """63 bits, from ``stream_key(run, "rollout", step, prompt, sample)``: all the randomness the sample has."""


@dataclass(frozen=True)
class Response:
    """One sample, aligned: ``log_probs[i]`` belongs to ``token_ids[i]``."""

    token_ids: list[int]
    """With the EOS token when ``finished``."""
    log_probs: list[float]
    """Of the policy at the sampling temperature, before top-p and top-k."""
    finished: bool
    """False when cut at ``max_new_tokens``."""


class BaseRollout(ABC):
    """One replica of the policy that samples."""

    @abstractmethod
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights in place.

        ``named_tensors`` gives (name in the on-disk Hugging Face checkpoint, full tensor); each tensor is only
        read before the next one is asked for, so a stream needs the memory of one tensor.

        Raises:
            RolloutError: a name is unknown, comes twice or is missing, or a shape or dtype differs. The replica's
                weights are then undefined until the next complete update, and ``generate`` refuses.
        """

    @abstractmethod
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Response]:
        """One response per request, in the order of ``requests``.

        Given equal logits, a sample's ids depend on its key alone, never on what it is batched with.

        Raises:
            RolloutError: a prompt is empty, too long for the model, or has ids outside the vocabulary.
        """
