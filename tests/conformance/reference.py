"""The truth that engines are held against: a plain Hugging Face model, fed one sequence at a time, without padding.

Nothing here comes from the code under test. A sequence is a dict of one-dimensional tensors of its length: ``input_ids``,
``loss_mask`` and whatever the loss reads. Outputs are about the token at the same place; the first token has none.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

Sequence = dict[str, Tensor]


@dataclass
class Training:
    """What some optimizer steps gave. Parameters and gradients are by their names on disk."""

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    """The loss's own, each the mean over the mini-batch's loss tokens."""
    gradient_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    parameters: dict[str, Tensor] = field(default_factory=dict)


class Reference:
    """One model on one process."""

    def __init__(self, model_path: Path, model_type: str, temperature: float = 1.0) -> None:
        self.is_value_model = model_type == "value_model"
        if self.is_value_model:
            self.model = AutoModelForTokenClassification.from_pretrained(
                model_path, num_labels=1, attn_implementation="eager", dtype=torch.float32
            )
            torch.nn.init.zeros_(self.model.score.bias)  # value heads have none
            self.model.score.bias.requires_grad_(False)
            self.model.dropout = torch.nn.Identity()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(
                model_path, attn_implementation="eager", dtype=torch.float32
            )
        self.model.eval()
        self.temperature = temperature

    def outputs(self, sequence: Sequence) -> SimpleNamespace:
        """Log-probs and entropy of a language model, values of a value model, each (length,) float32."""
        logits = self.model(input_ids=sequence["input_ids"][None], use_cache=False).logits[0].float()
        before = logits[:-1]  # what is known about token t was computed from the tokens before it
        if self.is_value_model:
            return SimpleNamespace(log_probs=None, entropy=None, values=_about_tokens(before[:, 0]))
        log_probs = torch.log_softmax(before / self.temperature, dim=-1)
        chosen = log_probs.gather(-1, sequence["input_ids"][1:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return SimpleNamespace(log_probs=_about_tokens(chosen), entropy=_about_tokens(entropy), values=None)

    @torch.no_grad()
    def infer(self, sequences: list[Sequence]) -> dict[str, Tensor]:
        """Outputs of all sequences, end to end."""
        every = [vars(self.outputs(sequence)) for sequence in sequences]
        return {
            name: torch.cat([out[name] for out in every]) for name in every[0] if every[0][name] is not None
        }

    def backward(
        self, sequences: list[Sequence], loss: Any, aggregation: str, max_length: int | None = None
    ) -> tuple[float, dict[str, float]]:
        """The mini-batch's loss and the loss's metrics; the gradient is added to the parameters'."""
        total, sums = 0.0, {}
        for sequence in sequences:
            if not sequence["loss_mask"].any():
                continue
            terms, metrics = loss(self.outputs(sequence), SimpleNamespace(tokens=sequence))
            share = _aggregate(terms[sequence["loss_mask"] > 0], sequences, aggregation, max_length)
            share.backward()
            total += share.item()
            for name, pair in metrics.items():
                sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0)), pair, strict=True)]
        return total, {name: value / count for name, (value, count) in sums.items()}

    def train(
        self,
        batches: list[list[Sequence]],
        loss: Any,
        optimizer: dict[str, Any],
        aggregation: str = "token-mean",
        max_length: int | None = None,
    ) -> Training:
        """One optimizer step of each mini-batch.

        Args:
            optimizer: lr, betas, eps, weight_decay, clip_grad_norm, and optionally schedule (name, warmup, total, min_ratio).
        """
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        options = {key: optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")}
        adamw = torch.optim.AdamW(parameters.values(), **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, _rate_factor(**optimizer.get("schedule", {})))
        done = Training()
        for batch in batches:
            adamw.zero_grad()
            value, metrics = self.backward(batch, loss, aggregation, max_length)
            done.losses.append(value)
            done.metrics.append(metrics)
            if not done.gradients:
                done.gradients = self.on_disk({name: p.grad for name, p in parameters.items()})
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), optimizer["clip_grad_norm"])
            done.gradient_norms.append(norm.item())
            done.rates.append(scheduler.get_last_lr()[0])
            adamw.step()
            scheduler.step()
        done.parameters = self.on_disk(parameters)
        return done

    def on_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors named and shaped like the parameters, as transformers names and shapes them in its files."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            files = [load_file(file) for file in Path(folder).glob("*.safetensors")]
        return {name: t for file in files for name, t in file.items() if name != "score.bias"}


def _about_tokens(known: Tensor) -> Tensor:
    return torch.cat([known.new_zeros(1), known])


def _aggregate(terms: Tensor, sequences: list[Sequence], aggregation: str, max_length: int | None) -> Tensor:
    """One sequence's share of the mini-batch's loss, from its terms on loss tokens."""
    loss_tokens = [int(sequence["loss_mask"].sum()) for sequence in sequences]
    with_any = sum(count > 0 for count in loss_tokens)
    if aggregation == "token-mean":
        return terms.sum() / sum(loss_tokens)
    if aggregation == "token-sum":
        return terms.sum()
    if aggregation == "seq-mean-token-sum":
        return terms.sum() / with_any
    if aggregation == "seq-mean-token-mean":
        return terms.mean() / with_any
    if aggregation == "seq-mean-token-sum-norm":
        return terms.sum() / max_length / with_any
    raise ValueError(aggregation)


def _rate_factor(
    name: str = "constant", warmup: int = 0, total: int = 1, min_ratio: float = 0.0
) -> Callable[[int], float]:
    """The learning rate's share of its peak after so many optimizer steps."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        done = min(1.0, (step - warmup) / (total - warmup))
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[name]
        return shape if name == "constant" else min_ratio + (1 - min_ratio) * shape

    return factor
