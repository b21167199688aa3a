import hashlib
import json
import os
import subprocess
import sys

import pytest

from tests.data.test_problems import SORTING, config
from workflow.data import (
    CHAT_TEMPLATE,
    Problem,
    PromptEncoder,
    PromptError,
    demonstration,
    load_problems,
    render_prompt,
    save_tokenizer,
    tokenizer_texts,
    train_tokenizer,
)

DATA = config(
    tasks=[SORTING],
    prompt="{direction}: {original_numbers!i} =",
    answer="[{sorted_numbers!i}]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(tokenizer_texts(DATA, CHAT_TEMPLATE), 64), path)
    return path


def test_templates_take_question_and_metadata():
    problem = Problem("How many?", "3", metadata={"numbers": ["7.0", "2.5"], "unit": "m"})
    assert render_prompt(config(tasks=[SORTING]), problem) == "How many?"
    data = config(tasks=[SORTING], prompt="{question} {numbers} {numbers!i} {unit:>3}", answer="<{answer}>")
    assert render_prompt(data, problem) == "How many? 7.0, 2.5 7, 2.5   m"
    assert demonstration(data, problem) == "<3>"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{questio}", "unknown field 'questio'; did you mean 'question'"),
        ("{0}", "unknown field '0'"),
        ("{question", "data.prompt='{question'"),
        ("{question!i}", "data.prompt=.*could not convert"),
        ("{question.__class__.missing}", "data.prompt="),
    ],
)
def test_bad_templates_are_named(prompt, message):
    with pytest.raises(PromptError, match=message):
        render_prompt(config(tasks=[SORTING], prompt=prompt), Problem("x", "y"))


def test_tokenizer_is_the_same_in_every_process(folder):
    script = (
        "from tests.data.test_prompt import *; import sys; from pathlib import Path;"
        "save_tokenizer(train_tokenizer(tokenizer_texts(DATA, CHAT_TEMPLATE), 64), Path(sys.argv[1]))"
    )
    expected = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    for seed in ("1", "2"):
        other = folder / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        subprocess.run([sys.executable, "-c", script, other], check=True, env=environment)
        assert hashlib.sha256((other / "tokenizer.json").read_bytes()).hexdigest() == expected


def test_numbers_are_digits_and_fixed_words_are_short(folder):
    encoder = PromptEncoder(folder)
    problem = load_problems(DATA, "heldout")[0]
    prompt = encoder.prompt_ids(DATA, problem)
    tokens = [encoder.tokenizer.id_to_token(i) for i in prompt]
    digits = "".join(number.removesuffix(".0") for number in problem.metadata["original_numbers"])
    assert "".join(token for token in tokens if token.isdigit()) == digits
    assert all(len(token) == 1 for token in tokens if token.isdigit())
    # <|im_start|>, the task's word, digits with what is between them, " =", <|im_end|>, <|im_start|>, assistant.
    assert len(prompt) <= 2 + len(digits) + 2 + 4
    answer = encoder.answer_ids(demonstration(DATA, problem))
    assert answer[-1] == encoder.eos_token_id
    assert encoder.decode(answer) == demonstration(DATA, problem)


def test_transformers_reads_the_folder_and_agrees(folder):
    from transformers import AutoTokenizer

    encoder, tokenizer = PromptEncoder(folder), AutoTokenizer.from_pretrained(folder)
    for problem in load_problems(DATA, "heldout")[:5]:
        message = [{"role": "user", "content": render_prompt(DATA, problem)}]
        expected = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
        assert encoder.prompt_ids(DATA, problem) == expected
    assert tokenizer.eos_token_id == encoder.eos_token_id
    assert len(tokenizer) == encoder.vocab_size


def test_what_cannot_be_encoded_is_refused(folder):
    encoder = PromptEncoder(folder)
    question = config(tasks=[SORTING], prompt="{question}")
    with pytest.raises(PromptError, match="cannot spell"):
        encoder.prompt_ids(question, Problem("Привет", "x"))
    problem = load_problems(DATA, "train")[0]
    with pytest.raises(PromptError, match=r"more than data.max_prompt_tokens=5: '.*ending: "):
        encoder.prompt_ids(DATA.model_copy(update={"max_prompt_tokens": 5}), problem)
    with pytest.raises(ValueError, match="vocab_size=20 is too small"):
        train_tokenizer(tokenizer_texts(DATA, CHAT_TEMPLATE), 20)


def test_incomplete_folders_are_refused(folder, tmp_path):
    with pytest.raises(PromptError, match=r"no tokenizer.json"):
        PromptEncoder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for changed, message in (({}, "no chat template"), ({"eos_token": "</s>"}, "eos_token='</s>'")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | changed))
        with pytest.raises(PromptError, match=message):
            PromptEncoder(tmp_path)


def test_data_loads_no_framework():
    script = (
        "import sys; from tests.data.test_prompt import *;"
        "load_problems(DATA, 'heldout'); train_tokenizer(tokenizer_texts(DATA, CHAT_TEMPLATE), 64);"
        "print({'torch', 'transformers', 'ray', 'tensordict'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": "."}
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env=environment)
    assert output.stdout == b"set()\n"
