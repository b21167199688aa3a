import itertools

import pytest

from tests.data.test_prompt import DATA
from workflow.data import (
    CHAT_TEMPLATE,
    PromptEncoder,
    load_problems,
    save_tokenizer,
    tokenizer_texts,
    train_tokenizer,
)
from workflow.data.teachers import always_ascending
from workflow.stages.sft import demonstrations

TEACHER = {"wrong_share": 0.5, "wrong_answer": "workflow.data.teachers:always_ascending"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(tokenizer_texts(DATA, CHAT_TEMPLATE), 64), folder)
    return PromptEncoder(folder)


@pytest.fixture(scope="module")
def problems():
    return load_problems(DATA.model_copy(update={"train_size": 400}), "train")


def shown(problems, encoder, run="run", **values):
    """The demonstrated answers as text, and the batch that they stand in."""
    batch = demonstrations(DATA.model_copy(update=values), problems, encoder, run)
    mask, ids = batch.tokens["loss_mask"] > 0, batch.tokens["input_ids"]
    bounds = batch.cu_seqlens.tolist()
    pieces = [ids[a:b][mask[a:b]].tolist() for a, b in itertools.pairwise(bounds)]
    assert all(piece[-1] == encoder.eos_token_id for piece in pieces)
    return [encoder.decode(piece) for piece in pieces], batch


def answers(problems):
    return [
        "[" + ", ".join(n.removesuffix(".0") for n in p.metadata["sorted_numbers"]) + "]" for p in problems
    ]


def test_a_good_teacher_shows_each_problems_own_answer(problems, encoder):
    texts, batch = shown(problems, encoder)
    assert texts == answers(problems)
    prompts = [encoder.prompt_ids(DATA, problem) for problem in problems]
    starts = batch.cu_seqlens[:-1].tolist()
    assert all(
        batch.tokens["input_ids"][start : start + len(prompt)].tolist() == prompt
        and not batch.tokens["loss_mask"][start : start + len(prompt)].any()
        for start, prompt in zip(starts, prompts, strict=True)
    )


def test_a_weak_teacher_shows_others_answers_in_about_its_share(problems, encoder):
    right = answers(problems)
    texts, _ = shown(problems, encoder, wrong_share=0.25)
    wrong = [i for i, (text, own) in enumerate(zip(texts, right, strict=True)) if text != own]
    assert 0.15 < len(wrong) / len(problems) < 0.35
    assert all(texts[i] in right for i in wrong)
    assert shown(problems, encoder, wrong_share=0.25)[0] == texts
    assert shown(problems, encoder, wrong_share=0.25, run="other")[0] != texts


def test_a_teacher_of_ones_own(problems, encoder):
    texts, _ = shown(problems, encoder, **TEACHER)
    for text, own, problem in zip(texts, answers(problems), problems, strict=True):
        assert text in (own, always_ascending(problem))
        if problem.metadata["direction"] == "ascending":
            assert text == own
    changed = sum(text != own for text, own in zip(texts, answers(problems), strict=True))
    assert 0.15 < changed / len(problems) < 0.35  # half of the descending half
