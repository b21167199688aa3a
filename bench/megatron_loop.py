"""A training loop as one writes it by hand on megatron-core, for one model in one layout: what the engine is compared with.

``GPTModel`` with labels, Megatron's schedule, gradients and AdamW. In the place of its core attention, which knows no packing and makes
all scores, it has torch's attention kernel, one call per matrix of equal sequences or per packed sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines.training.megatron  # noqa: F401  first: Megatron alone asks for triton

# isort: split
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from bench.update import BUDGET, CLIP, RATE
from engines.config import LayoutConfig
from engines.training.megatron.model import read_config, transformer_config


@dataclass(frozen=True)
class Rows:
    """A micro-batch as Megatron takes it."""

    input_ids: Tensor
    """(batch, sequence) int64; of packed sequences the batch is 1."""
    labels: Tensor
    mask: Tensor
    """(batch, sequence) float32: 1 where the label counts."""
    positions: Tensor
    packing: PackedSeqParams | None = None

    @classmethod
    def matrix(cls, sequences: list[Tensor]) -> Rows:
        """Of equal length."""
        return cls._of(torch.stack(sequences), torch.arange(len(sequences[0])).expand(len(sequences), -1))

    @classmethod
    def packed(cls, sequences: list[Tensor]) -> Rows:
        """One after the other."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        ends = pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        return cls._of(torch.cat(sequences)[None], positions[None], packing)

    @classmethod
    def _of(cls, ids: Tensor, positions: Tensor, packing: PackedSeqParams | None = None) -> Rows:
        """The label of a row is the next; of a sequence's last it counts for nothing."""
        following = torch.cat([positions.flatten()[1:], torch.zeros(1, dtype=torch.int64)])
        mask = (following > 0).float().view(ids.shape)
        labels = ids.flatten().roll(-1).view(ids.shape)
        return cls(ids, labels, mask, positions, packing)


def matrices(sequences: list[Tensor]) -> list[Rows]:
    """Micro-batches of equal sequences, as many as the budget holds."""
    count = BUDGET // len(sequences[0])
    return [Rows.matrix(sequences[start : start + count]) for start in range(0, len(sequences), count)]


def packs(sequences: list[Tensor]) -> list[Rows]:
    """Sequences in order, end to end, until the budget is full."""
    waiting, micro_batches = list(sequences), []
    while waiting:
        taken = [waiting.pop(0)]
        while waiting and sum(map(len, taken)) + len(waiting[0]) <= BUDGET:
            taken.append(waiting.pop(0))
        micro_batches.append(Rows.packed(taken))
    return micro_batches


class KernelAttention(nn.Module):
    """Megatron's core attention by torch's kernel."""

    def __init__(self, config: Any, *args: Any, **named: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """(sequence, batch, heads, dim) or, packed, (tokens, heads, dim) each -> heads and dim as one axis."""
        if packed_seq_params is None:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = [tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value)]
        outputs = [
            scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


class BareLoop:
    """Model, gradients and optimizer. Megatron's parallel state is there already, and its scope is entered by the caller.

    Args:
        folder: of the model, for its configuration.
        weights: of another of Megatron's models of it, in the same layout.
    """

    def __init__(self, folder: Path, layout: LayoutConfig, weights: dict[str, Tensor]) -> None:
        config = read_config(folder)
        megatron = transformer_config(config, layout)
        layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = KernelAttention
        model = GPTModel(
            megatron,
            layer,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=int(config.rope_parameters["rope_theta"]),
            share_embeddings_and_output_weights=config.tie_word_embeddings,
        )
        model.load_state_dict(weights)
        gradients = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(megatron, gradients, model)
        megatron.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=CLIP),
            [self.model],
            use_gloo_process_groups=False,
        )
        self.schedule = get_forward_backward_func()

    def update(self, micro_batches: list[Rows]) -> tuple[float, float]:
        """One optimizer step; returns the mean loss of the batch, and the norm of its gradient."""
        tokens = sum(float(rows.mask.sum()) for rows in micro_batches)

        def forward_step(data: Iterator[Rows], model: nn.Module) -> tuple[Tensor, Any]:
            rows = next(data)
            losses = model(
                rows.input_ids, rows.positions, None, labels=rows.labels, packed_seq_params=rows.packing
            )

            def loss(losses: Tensor) -> tuple[Tensor, dict[str, float]]:
                total = (losses * rows.mask).sum() / tokens
                return total * len(micro_batches), {"loss": total.item()}  # Megatron takes their mean

            return losses, loss

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        told = self.schedule(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].input_ids.shape[1],
            micro_batch_size=micro_batches[0].input_ids.shape[0],
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return sum(part["loss"] for part in told), float(norm)
