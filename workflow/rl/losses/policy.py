"""The actor's loss: a policy loss of the table, an entropy bonus, a KL penalty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.training.batch import PackedBatch
from engines.training.schedule import Metrics, ModelOutputs
from workflow.campaign.algorithm import AlgorithmConfig
from workflow.campaign.objectives import load_function
from workflow.rl.kl import kl_estimate
from workflow.rl.losses.ratios import Ratios
from workflow.rl.losses.report import over_loss_tokens


@dataclass(frozen=True)
class PolicyLoss:
    """term_t = correction_t surrogate_t - entropy_coefficient H_t + kl_coefficient KL_t.

    Reads ``old_log_probs``, ``advantages`` and, where they are used, ``correction``, ``selected`` and ``reference_log_probs``.
    """

    algorithm: AlgorithmConfig
    kl_coefficient: float = 0.0
    """Of this step; counts when the penalty is part of the loss."""
    needs_entropy: bool = True
    """The entropy is a metric even when it is no part of the loss."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The per-token fields that the trainer has to give a batch."""
        noise = ("noise",) if self.algorithm.surrogate.selects else ()
        correction = ("correction",) if self.algorithm.correction.weighting else ()
        reference = ("reference_log_probs",) if self.algorithm.kl.place == "loss" else ()
        return ("old_log_probs", "advantages", *noise, *correction, *reference)

    def select(self, mini_batch: PackedBatch, log_probs: Tensor) -> PackedBatch:
        """Adds ``selected``, chosen from the whole mini-batch with the log-probs that the policy has now."""
        choose = load_function(self.algorithm.surrogate.selects)
        return mini_batch.with_tokens(selected=choose(mini_batch, log_probs, self.algorithm))

    def __call__(self, outputs: ModelOutputs, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        config, ratios = self.algorithm, Ratios(outputs.log_probs, batch)
        terms, fields = config.surrogate.load()(ratios, config)
        if config.correction.weighting:
            terms = terms * batch.tokens["correction"]
        metrics = {
            "policy_loss": terms,
            "entropy": outputs.entropy,
            "ratio": ratios.ratio,
            "ratio_deviation": (ratios.ratio - 1).abs(),
            **fields,
            "approx_kl": torch.expm1(ratios.log_ratio) - ratios.log_ratio,
        }
        if config.entropy_coefficient:
            terms = terms - config.entropy_coefficient * outputs.entropy
        if config.kl.place == "loss":
            kl = kl_estimate(outputs.log_probs, batch.tokens["reference_log_probs"], config.kl)
            terms = terms + self.kl_coefficient * kl
            metrics["kl"] = kl
        return terms, over_loss_tokens(metrics, batch.tokens["loss_mask"])
