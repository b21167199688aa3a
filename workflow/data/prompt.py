"""From a problem to token ids: the prompt's template, the chat template, the tokenizer. Loads no framework."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.config import nearest
from workflow.data.problems import Problem, load_problems

if TYPE_CHECKING:
    from workflow.campaign.schema import DataConfig


class PromptError(ValueError):
    """A prompt that cannot be made: an unknown field, a tokenizer without the characters, too many tokens."""


class _Template(string.Formatter):
    """``str.format`` with named fields only, lists joined by ", ", and ``{field!i}``: whole numbers without ".0"."""

    def get_value(self, key: int | str, args: Any, kwargs: dict[str, Any]) -> Any:
        if key not in kwargs:
            raise PromptError(f"unknown field {str(key)!r}; {nearest(str(key), list(kwargs))}")
        return kwargs[key]

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion != "i":
            return super().convert_field(value, conversion)
        return [whole_number(item) for item in value] if isinstance(value, list) else whole_number(value)

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            value = ", ".join(str(item) for item in value)
        return super().format_field(value, format_spec)


def whole_number(value: Any) -> str:
    """A number, or its text, without ".0" when it is whole."""
    number = float(value)
    return str(int(number)) if number.is_integer() else str(value)


def _render(key: str, template: str, problem: Problem, **more: str) -> str:
    fields = {**problem.metadata, "question": problem.question, **more}
    try:
        return _Template().vformat(template, (), fields)
    except (PromptError, ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise PromptError(f"data.{key}={template!r}: {error}") from None


def render_prompt(config: DataConfig, problem: Problem) -> str:
    """What the user says: ``data.prompt`` with the problem's question and metadata filled in."""
    return _render("prompt", config.prompt, problem)


def demonstration(config: DataConfig, problem: Problem) -> str:
    """What a right answer looks like: ``data.answer`` filled in. SFT imitates it, partial credit compares with it."""
    return _render("answer", config.answer, problem, answer=problem.answer)


def tokenizer_texts(config: DataConfig, chat_template: str) -> list[str]:
    """The texts that a tokenizer for this data is trained on: training prompts (in the chat template) and answers."""
    template = ChatTemplate(chat_template)
    problems = load_problems(config, "train")
    prompts = [template.prompt(render_prompt(config, problem)) for problem in problems]
    return prompts + [demonstration(config, problem) for problem in problems]


class ChatTemplate:
    """A Hugging Face chat template (jinja2, sandboxed), rendered without transformers."""

    def __init__(self, source: str, **tokens: str):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = raise_exception
        self._template = environment.from_string(source)
        self._tokens = tokens

    def prompt(self, user: str) -> str:
        """One user turn and the opening of the assistant's."""
        messages = [{"role": "user", "content": user}]
        return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)


class PromptEncoder:
    """Encodes prompts and answers with the tokenizer and chat template of a model folder.

    Args:
        folder: holds tokenizer.json, tokenizer_config.json, and the chat template in either of its two places.

    Raises:
        PromptError: a file is missing, or the tokenizer has no EOS token or no chat template.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.folder = folder
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise PromptError(f"{folder}: no {name}; a model folder with its tokenizer is needed")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self.eos_token_id = self._special("eos_token", tokens["eos_token"])
        template_file = folder / "chat_template.jinja"
        source = template_file.read_text() if template_file.is_file() else settings.get("chat_template")
        if not isinstance(source, str):
            raise PromptError(f"{folder}: the tokenizer has no chat template (chat_template.jinja)")
        self.template = ChatTemplate(source, **{name: text for name, text in tokens.items() if text})

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, special ones included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def prompt_ids(self, config: DataConfig, problem: Problem) -> list[int]:
        """Token ids of the chat prompt; PromptError when it exceeds ``data.max_prompt_tokens``."""
        ids = self._encode(self.template.prompt(render_prompt(config, problem)))
        if len(ids) > config.max_prompt_tokens:
            raise PromptError(
                f"a prompt has {len(ids)} tokens, more than data.max_prompt_tokens={config.max_prompt_tokens}: "
                f"{render_prompt(config, problem)[:200]!r}"
            )
        return ids

    def answer_ids(self, answer: str) -> list[int]:
        """Token ids of an answer, closed by EOS."""
        return [*self._encode(answer), self.eos_token_id]

    def decode(self, ids: list[int]) -> str:
        """The text of a response, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        # A byte-level tokenizer with a small alphabet drops what it does not know, without a word.
        if self.tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise PromptError(
                f"the tokenizer in {self.folder} cannot spell {text[:200]!r}: it lacks characters"
            )
        return ids

    def _special(self, name: str, text: str | None) -> int:
        token_id = None if text is None else self.tokenizer.token_to_id(text)
        if token_id is None:
            raise PromptError(
                f"{self.folder}/tokenizer_config.json: {name}={text!r} is no token of the tokenizer"
            )
        return token_id


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token
