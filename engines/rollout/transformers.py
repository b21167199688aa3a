"""Rollout with transformers' own ``generate``, made fast on ragged batches and exact in its randomness.

Notable:
- The choice of the token is a logits processor (``sampling.SeededSampler``); ``generate`` only takes its argmax.
- A prompt that many samples share is read once, and its cache repeated.
- ``generate`` runs for ``compact_every`` tokens at a time; samples that finished leave the batch in between, so the
  long tail of a batch costs what it holds.
- The cache grows in place (``cache.RoomyLayer``), and prompts of equal length need no padding.

Left out: continuous batching (new samples joining a running batch).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList

from engines.config import RolloutConfig
from engines.hf_checkpoint import on_disk_parameters
from engines.rollout import attention
from engines.rollout.base import BaseRollout, Request, Response, RolloutError, SamplingParams
from engines.rollout.cache import keep_rows, new_cache
from engines.rollout.sampling import SeededSampler


@dataclass
class _Sample:
    """What a request has become so far."""

    request: Request
    index: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False

    def response(self) -> Response:
        return Response(self.token_ids, self.log_probs, self.finished)


class TransformersRollout(BaseRollout):
    """One replica in this process, float32.

    Args:
        model_path: Hugging Face folder with the initial weights, config and generation config.
        config: batch size and how often finished samples leave.
        device: where the replica lives.
    """

    def __init__(self, model_path: Path, config: RolloutConfig, device: str | torch.device = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        if model.config._attn_implementation == "sdpa":  # other models keep what they need (sinks, soft caps)
            model.set_attn_implementation(attention.NAME)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self._eos = _eos_token_ids(self.model)
        # Whatever sampling the model's author recommends must not act behind the recorded log-probs.
        self.model.generation_config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=self._eos or None,
            pad_token_id=(self._eos or [0])[0],
        )
        self._parameters = on_disk_parameters(self.model)
        self._tied = dict(self.model.all_tied_weights_keys or {})
        self._complete = True

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._complete = False
        missing = set(self._parameters)
        for name, tensor in named_tensors:
            target = self._parameters.get(self._tied.get(name, name))
            if target is None:
                raise RolloutError(f"weight {name!r} is not one of this {type(self.model).__name__}'s")
            if tensor.shape != target.shape or tensor.dtype != target.dtype:
                raise RolloutError(
                    f"weight {name!r} is {tuple(tensor.shape)} {tensor.dtype}, the model's is {tuple(target.shape)} {target.dtype}"
                )
            if (
                name in self._tied
            ):  # a tied weight is its source under a second name; it brings nothing of its own
                continue
            if name not in missing:
                raise RolloutError(f"weight {name!r} came twice")
            missing.remove(name)
            target.copy_(tensor)
        if missing:
            raise RolloutError(
                f"{len(missing)} of {len(self._parameters)} weights did not come, e.g. {sorted(missing)[:3]}"
            )
        self._complete = True

    @torch.inference_mode()
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Response]:
        if not self._complete:
            raise RolloutError("the last weight update failed half-way: update the weights before generating")
        for request in requests:
            self._check(request, params)
        samples = [_Sample(request, index) for index, request in enumerate(requests)]
        # Equal prompts side by side, so that each is read once; equal lengths side by side, so that few are padded.
        samples.sort(key=lambda s: (len(s.request.prompt_ids), s.request.prompt_ids, s.index))
        for start in range(0, len(samples), self.config.batch_size):
            self._run_batch(samples[start : start + self.config.batch_size], params)
        return [sample.response() for sample in sorted(samples, key=lambda s: s.index)]

    def _check(self, request: Request, params: SamplingParams) -> None:
        length = len(request.prompt_ids)
        if length == 0:
            raise RolloutError(f"the request with key {request.key} has an empty prompt")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and length + params.max_new_tokens > limit:
            raise RolloutError(
                f"a prompt of {length} tokens and max_new_tokens={params.max_new_tokens} exceed the model's {limit} positions"
            )
        vocabulary = self.model.config.vocab_size
        if not (min(request.prompt_ids) >= 0 and max(request.prompt_ids) < vocabulary):
            raise RolloutError(
                f"the request with key {request.key} has ids outside the vocabulary of {vocabulary}"
            )

    def _run_batch(self, samples: list[_Sample], params: SamplingParams) -> None:
        """Generate for all of ``samples``, in rounds between which finished ones leave."""
        input_ids, mask, cache, rows = self._prefill([sample.request.prompt_ids for sample in samples])
        done = 0
        while samples:
            steps = min(self.config.compact_every, params.max_new_tokens - done)
            if cache is not None:
                keep_rows(cache, rows, room=steps)
            input_ids, mask = input_ids[rows], mask[rows]
            sampler = SeededSampler([s.request.key for s in samples], done, steps, params, self.device)
            output = self.model.generate(
                input_ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=steps,
                logits_processor=LogitsProcessorList([sampler]),
                return_dict_in_generate=True,
            )
            new_ids = output.sequences[:, input_ids.shape[1] :]
            self._append(samples, new_ids.tolist(), sampler.log_probs.tolist())
            done += new_ids.shape[1]
            going = (
                [] if done == params.max_new_tokens else [i for i, s in enumerate(samples) if not s.finished]
            )
            samples = [samples[i] for i in going]
            rows = torch.tensor(going, dtype=torch.long, device=self.device)
            input_ids, cache = output.sequences, output.past_key_values
            mask = torch.cat([mask, mask.new_ones(new_ids.shape)], dim=1)

    def _append(self, samples: list[_Sample], ids: list[list[int]], log_probs: list[list[float]]) -> None:
        for sample, row, row_log_probs in zip(samples, ids, log_probs, strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in self._eos), None)
            sample.finished = end is not None
            sample.token_ids += row[:end]
            sample.log_probs += row_log_probs[: len(row[:end])]

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor, object | None, Tensor]:
        """Read all but the last token of each distinct prompt.

        Returns:
            left-padded ids and mask (distinct, longest), the cache of all but the last position (None when prompts
            are one token long), and the row of each prompt.
        """
        distinct = {tuple(prompt): None for prompt in prompts}
        row_of = {prompt: row for row, prompt in enumerate(distinct)}
        longest = max(map(len, distinct))
        input_ids = torch.zeros(len(distinct), longest, dtype=torch.long, device=self.device)
        mask = torch.zeros_like(input_ids)
        for prompt, row in row_of.items():
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=self.device)
            mask[row, longest - len(prompt) :] = 1
        rows = torch.tensor([row_of[tuple(prompt)] for prompt in prompts], device=self.device)
        if longest == 1:
            return input_ids, mask, None, rows
        cache = new_cache(self.model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
        self.model.base_model(  # no logits are needed here
            input_ids=input_ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions,
            past_key_values=cache,
        )
        return input_ids, mask, cache, rows


def _eos_token_ids(model: torch.nn.Module) -> list[int]:
    """The ids that end a response, from the generation config or else from the model's."""
    eos = model.generation_config.eos_token_id
    eos = model.config.eos_token_id if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
