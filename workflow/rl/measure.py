"""What an iteration says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from engines.rollout.base import Response
from engines.training.batch import PackedBatch
from workflow.campaign.algorithm import KLConfig
from workflow.rl.batches import per_sequence_sum
from workflow.rl.correction import mismatch
from workflow.rl.kl import kl_estimate
from workflow.rl.metrics import Stopwatch
from workflow.rl.rewards import Scores


def samples(scores: Scores, responses: Sequence[Response]) -> dict[str, float]:
    """Rewards, accuracy and lengths of the step's responses."""
    lengths = [len(response.token_ids) for response in responses]
    return {
        "reward": sum(scores.rewards) / len(scores.rewards),
        "accuracy": sum(scores.correct) / len(scores.correct),
        "response_length": sum(lengths) / len(lengths),
        "response_length_max": max(lengths),
        "finished": sum(response.finished for response in responses) / len(responses),
    }


def rollout(batch: PackedBatch) -> dict[str, float]:
    """How far the policy that sampled is from the one that is trained; 1 and 0 where both compute the same.

    ``rollout_ratio_*`` are the extremes of exp(log-prob of the training engine - log-prob that the rollout recorded).
    """
    chosen = batch.tokens["loss_mask"] > 0
    difference = (batch.tokens["old_log_probs"] - batch.tokens["rollout_log_probs"])[chosen]
    extremes = {
        "rollout_ratio_min": float(difference.min().exp()),
        "rollout_ratio_max": float(difference.max().exp()),
    }
    return {**extremes, **mismatch(batch)}


def before_update(batch: PackedBatch, kl: KLConfig) -> dict[str, float]:
    """What the batch shows before anything learns from it; little when all of it was rejected."""
    chosen = batch.tokens["loss_mask"] > 0
    metrics = {"rejected": 1 - float(_kept(batch).double().mean())}
    if not bool(chosen.any()):
        return metrics
    if "reference_log_probs" in batch.tokens:
        metrics["reference_kl"] = float(divergence(batch, kl)[chosen].double().mean())
    if "returns" in batch.tokens:
        metrics["explained_variance"] = explained_variance(
            batch.tokens["old_values"][chosen], batch.tokens["returns"][chosen]
        )
    return metrics


def divergence(batch: PackedBatch, config: KLConfig) -> Tensor:
    """(tokens,) estimated KL from the reference of the policy that sampled."""
    return kl_estimate(batch.tokens["old_log_probs"], batch.tokens["reference_log_probs"], config)


def response_divergence(batch: PackedBatch, config: KLConfig) -> Tensor:
    """(responses that were not rejected,) float64: the estimated KL of each, summed over its tokens."""
    return per_sequence_sum(divergence(batch, config), batch)[_kept(batch)]


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 when the returns do not vary."""
    variance = float(returns.double().var(correction=0))
    residual = float((returns.double() - values.double()).var(correction=0))
    return 1 - residual / variance if variance > 0 else 0.0


def updates(
    actor: Mapping[str, tuple[float, float]], critic: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Means of what the updates reported, as ``actor/...`` and ``critic/...``."""
    return {
        f"{role}/{name}": total / count
        for role, metrics in (("actor", actor), ("critic", critic))
        for name, (total, count) in metrics.items()
        if count
    }


def speed(batch: PackedBatch, watch: Stopwatch) -> dict[str, float]:
    """Seconds per part and in all, and response tokens per second of the whole iteration."""
    total = watch.total()
    parts = {f"seconds/{name}": seconds for name, seconds in watch.seconds.items()}
    return {**parts, "seconds": total, "tokens_per_second": float(batch.tokens["loss_mask"].sum()) / total}


def _kept(batch: PackedBatch) -> Tensor:
    """(sequences,) bool: which responses were not rejected."""
    return per_sequence_sum(batch.tokens["loss_mask"], batch) > 0
