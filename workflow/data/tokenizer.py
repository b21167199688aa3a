"""A small byte-level BPE for models that are made from a configuration.

Numbers are split into digits, so that arithmetic has something to hold on to. Merges may span spaces: the texts are
few and alike, and a prompt's fixed words then cost one token. The alphabet is what the texts contain, so a vocabulary
can be far below 256.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
# ChatML without the line break between turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` tokens, special ones included; equal texts give an equal tokenizer.

    Raises:
        ValueError: ``vocab_size`` is below the special tokens and the characters of ``texts``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, START, END], show_progress=False, initial_alphabet=[]
    )
    # Special tokens are found before merges apply, so their spelling must not be learnt.
    special = re.compile("|".join(map(re.escape, (PAD, START, END))))
    tokenizer.train_from_iterator((part for text in texts for part in special.split(text) if part), trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"model.tokenizer.vocab_size={vocab_size} is too small: special tokens and characters of the training "
            f"texts alone are {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer`` as Hugging Face files: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
