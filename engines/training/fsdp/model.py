"""A transformers model as the FSDP engines run it: packed sequences in, one number per token out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engines.catalog import FSDP
from engines.config import EngineConfig
from engines.training import packed_attention
from engines.training.batch import PackedBatch
from engines.training.errors import UnsupportedConfigError
from engines.training.log_probs import token_log_probs
from engines.training.packed_attention import Segments
from engines.training.ulysses import SequenceGroup
from engines.training.value_head import value_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class TokenModel(nn.Module):
    """A backbone and a head. Submodules carry the names of the on-disk checkpoint: ``model``, and ``lm_head`` or ``score``."""

    def __init__(self, backbone: nn.Module, head: nn.Linear, model_type: str, temperature: float) -> None:
        super().__init__()
        self.model = backbone
        self.model_type = model_type
        self.temperature = temperature
        if model_type == "value_model":
            self.score = head
        else:
            self.lm_head = head

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: the units of sharding."""
        return self.model.layers

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, predictors: Tensor, segments: Segments, entropy: bool
    ) -> dict[str, Tensor]:
        """
        Args:
            input_ids: (tokens,) int64.
            position_ids: (tokens,) int64.
            predictors: (predicted tokens,) int64: the position before each token that has one in its sequence.
            segments: layout of the sequences.
            entropy: whether to return it.

        Returns:
            "log_probs" and "entropy", or "values": (tokens,) float32, 0 at first tokens.
        """
        shared = segments.shared
        if shared is None:
            fields = self._predict(
                input_ids, position_ids, predictors, input_ids[predictors + 1], segments, entropy
            )
        else:
            fields = self._predict_shared(input_ids, position_ids, predictors, segments, shared, entropy)
        zeros = torch.zeros(input_ids.shape[0], device=input_ids.device)
        return {name: zeros.index_copy(0, predictors + 1, field) for name, field in fields.items()}

    def _predict(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predictors: Tensor,
        labels: Tensor,
        segments: Segments,
        entropy: bool,
    ) -> dict[str, Tensor]:
        """What the predictors say of the token after each: (predicted tokens,) float32 each."""
        output = self.model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=segments,
        )
        hidden = output.last_hidden_state[0].index_select(0, predictors)
        if self.model_type == "value_model":
            return {"values": self.score(hidden)[:, 0].float()}
        log_probs, entropies = token_log_probs(hidden, self.lm_head.weight, labels, self.temperature, entropy)
        return {"log_probs": log_probs} | ({} if entropies is None else {"entropy": entropies})

    def _predict_shared(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predictors: Tensor,
        segments: Segments,
        shared: SequenceGroup,
        entropy: bool,
    ) -> dict[str, Tensor]:
        """The same from ranks of which each has a share of the tokens."""
        padding = (0, shared.padding(input_ids.shape[0]))
        own_ids, own_positions = (shared.share(pad(t, padding)) for t in (input_ids, position_ids))
        first, count = shared.rank * own_ids.shape[0], own_ids.shape[0]
        mine = predictors[(predictors >= first) & (predictors < first + count)]
        fields = self._predict(own_ids, own_positions, mine - first, input_ids[mine + 1], segments, entropy)
        columns = torch.stack(list(fields.values()), dim=1)
        own = columns.new_zeros(count, len(fields)).index_copy(0, mine - first, columns)
        whole = shared.gather(own).index_select(0, predictors)
        return dict(zip(fields, whole.unbind(1), strict=True))


def predictors(batch: PackedBatch) -> Tensor:
    """(tokens - sequences,) int64: all positions but each sequence's last, on the device of the tokens."""
    keep = torch.ones(batch.num_tokens, dtype=torch.bool)
    keep[batch.cu_seqlens[1:][batch.lengths > 0] - 1] = False
    return keep.nonzero()[:, 0].to(batch.tokens["input_ids"].device)


def load_model(folder: Path, model_type: str, config: EngineConfig, temperature: float) -> TokenModel:
    """The model of ``folder`` on cpu in float32.

    A value model whose folder has no head gets one that is drawn from ``config.seed``.

    Raises:
        UnsupportedConfigError: an architecture that these engines do not compute exactly.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _check_architecture(folder, hf_config, config)
    packed_attention.register()
    auto_class = AutoModel if model_type == "value_model" else AutoModelForCausalLM
    with _quiet():
        loaded = auto_class.from_pretrained(
            folder,
            config=hf_config,
            dtype=torch.float32,
            attn_implementation=packed_attention.NAME,
            trust_remote_code=False,
        )
    if config.activation_checkpointing:
        loaded.gradient_checkpointing_enable({"use_reentrant": False})
    if model_type == "value_model":
        return TokenModel(
            loaded, _value_head(folder, hf_config.hidden_size, config.seed or 0), model_type, temperature
        )
    return TokenModel(loaded.model, loaded.lm_head, model_type, temperature)


def _check_architecture(folder: Path, hf_config: PretrainedConfig, config: EngineConfig) -> None:
    model = hf_config.to_dict()
    if reason := FSDP.refuse_model(model) or FSDP.refuse_layout(config, model):
        raise UnsupportedConfigError(f"{folder}: {reason}")


def _value_head(folder: Path, hidden_size: int, seed: int) -> nn.Linear:
    head = nn.Linear(hidden_size, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(value_head(folder, hidden_size, seed))
    return head


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar per rank, and no warning that a value model leaves the language-model head unread."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
