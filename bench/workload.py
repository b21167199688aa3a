"""The workload that every GRPO benchmark in this folder runs: one tiny model, one tokenizer, random prompts.

Nothing here knows about a training library, so that a baseline and our own code can import the same functions
and be compared on identical weights and identical prompts. The model is random on purpose: with an initial
standard deviation of 0.02 its next-token distribution is almost uniform over 64 tokens, so a sampled
completion ends at each position with a probability of about 1/64. Completion lengths are thus close to
geometric, with a few long completions in every batch: the shape that makes rollouts of a real policy
expensive.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY_SIZE = 64
PAD_ID = 0
EOS_ID = 1
FIRST_PLAIN_ID = 2
PROMPT_LENGTH = 32
MAX_COMPLETION_LENGTH = 256
PROMPTS_PER_STEP = 16
SAMPLES_PER_PROMPT = 8


def model_config() -> Qwen3Config:
    """Return the configuration of the benchmark model (about 3.2 million parameters, untied embeddings)."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=PROMPT_LENGTH + MAX_COMPLETION_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.02,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def build_model(seed: int, attention: str = "sdpa") -> Qwen3ForCausalLM:
    """Return the randomly initialized fp32 model; the same seed gives the same weights.

    The attention implementation is a parameter because the fastest one differs between libraries; it does not
    influence the weights.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(), attn_implementation=attention)
    return model.to(torch.float32)


def token_text(token_id: int) -> str:
    """Return the text of one token; the two special tokens cannot be a prefix of a plain one."""
    return {PAD_ID: "<pad>", EOS_ID: "<eos>"}.get(token_id, f"t{token_id}")


def build_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Write a word-level tokenizer of 64 tokens to the directory `path` and return it.

    It adds no special tokens, so that a prompt text has exactly as many tokens as it has words. The pad token
    is a separate id which the random model samples like any other token: a completion is delimited by its
    first EOS and by nothing else, thus a sampled pad counts as a plain token.
    """
    vocabulary = {token_text(i): i for i in range(VOCABULARY_SIZE)}
    core = Tokenizer(WordLevel(vocabulary, unk_token=token_text(PAD_ID)))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=token_text(PAD_ID),
        eos_token=token_text(EOS_ID),
        padding_side="left",
    )
    tokenizer.save_pretrained(path)
    return tokenizer


def prompts(seed: int, n: int) -> list[list[int]]:
    """Return `n` prompts of 32 random plain token ids (no EOS, no pad), fixed by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n, PROMPT_LENGTH)
    return torch.randint(FIRST_PLAIN_ID, VOCABULARY_SIZE, shape, generator=generator).tolist()


def prompt_text(token_ids: list[int]) -> str:
    """Return the text which `build_tokenizer`'s tokenizer encodes to exactly `token_ids`."""
    return " ".join(token_text(i) for i in token_ids)


def even_share(completion_ids: list[int]) -> float:
    """Return the share of even token ids: a reward that costs nothing and still differs between samples."""
    return sum(1 for i in completion_ids if i % 2 == 0) / len(completion_ids)
