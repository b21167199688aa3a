import json
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from engines.config import parse
from workflow.campaign.schema import DataConfig
from workflow.data import DataError, Problem, RowError, Verifier, load_problems

SORTING = {
    "name": "number_sorting",
    "options": {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 99},
}


def config(**values) -> DataConfig:
    return parse(DataConfig, {"name": "test", "train_size": 60, "heldout_size": 40, **values})


def write_rows(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def files(train: str, heldout: str, **values) -> DataConfig:
    return config(train_file=train, heldout_file=heldout, **values)


def test_splits_are_complete_disjoint_and_repeatable():
    data = config(tasks=[SORTING, {"name": "chain_sum", "weight": 2.0}])
    train, heldout = load_problems(data, "train"), load_problems(data, "heldout")
    digests = [problem.digest for problem in train + heldout]
    assert (len(train), len(heldout), len(set(digests))) == (60, 40, 100)
    assert [problem.task for problem in train].count("chain_sum") == 40
    assert load_problems(data, "train") == train
    assert load_problems(data.model_copy(update={"seed": 1}), "train") != train


def test_order_does_not_depend_on_the_process():
    script = (
        "from tests.data.test_problems import *;"
        "print(load_problems(config(tasks=[SORTING]), 'heldout')[7].digest)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {load_problems(config(tasks=[SORTING]), "heldout")[7].digest.encode() + b"\n"}


def test_small_question_space_is_topped_up_and_then_refused():
    coins = {
        "name": "number_sorting",
        "options": {
            "min_numbers": 1,
            "max_numbers": 1,
            "max_decimals": 0,
            "min_value": 0,
            "max_value": 9,
        },
    }
    # 10 numbers, 2 directions: 20 different questions.
    assert len(load_problems(config(tasks=[coins], train_size=12, heldout_size=8), "heldout")) == 8
    with pytest.raises(DataError, match=r"data.tasks\[0\].*gave only 8 of 9 different heldout problems"):
        load_problems(config(tasks=[coins], train_size=12, heldout_size=9), "heldout")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "number_sortin"}, "unknown task 'number_sortin'; did you mean 'number_sorting'"),
        ({"name": "spiral_matrix"}, "runs responses as Python code"),
        ({"name": "chain_sum", "options": {"size": 3}}, r"data.tasks\[0\].options.size: set by data.seed"),
        ({"name": "chain_sum", "options": {"terms": 3}}, "refused by the generator of 'chain_sum'"),
        ({"name": "number_sorting", "options": {"min_numbers": 0}}, "must be positive"),
        ({"name": "rush_hour"}, "does not accept the task's own answer"),
    ],
)
def test_bad_tasks_are_refused(task, message):
    with pytest.raises(DataError, match=message):
        load_problems(config(tasks=[task]), "train")


def test_verification_survives_json():
    data = config(tasks=[SORTING, {"name": "chain_sum"}, {"name": "spell_backward"}, {"name": "sudoku"}])
    verifier = Verifier(data)
    for problem in load_problems(data, "train"):
        restored = Problem.from_json(json.loads(json.dumps(problem.to_json())))
        assert restored == problem
        assert verifier.score(restored, problem.answer) == 1.0
        assert verifier.score(restored, "no idea") < 1.0


def test_file_rows_may_name_a_verifier(tmp_path):
    generated = load_problems(config(tasks=[SORTING]), "train")
    train = write_rows(tmp_path / "train.jsonl", *[problem.to_json() for problem in generated[:5]])
    heldout = write_rows(
        tmp_path / "heldout.jsonl",
        *[problem.to_json() for problem in generated[4:8]],
        {"question": "2 + 2", "answer": "4"},
    )
    data = files(train, heldout)
    problems = load_problems(data, "heldout")
    # The first row also stands in the training file.
    assert problems == [*generated[5:8], Problem("2 + 2", "4")]
    verifier = Verifier(data)
    as_integers = problems[0].answer.replace(".0", "")
    assert [verifier.score(problems[0], as_integers), verifier.score(problems[0], "[1]")] == [1.0, 0.0]
    assert [verifier.score(problems[3], " 4\n"), verifier.score(problems[3], "5")] == [1.0, 0.0]


GOOD = {"question": "1 + 1", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({"question": "x"}, "answer", "missing"),
        ({"question": "", "answer": "2"}, "question", "not empty"),
        ({"question": "x", "answer": 2}, "answer", "text .* expected, not 2"),
        ({"question": "x", "answer": "2", "anser": "3"}, "anser", "unknown field"),
        ({"question": "x", "answer": "2", "metadata": [1]}, "metadata", "object is expected, not list"),
        ({"question": "x", "answer": "2", "task": 1}, "task", "text is expected"),
        (["x"], "row", "object is expected, not list"),
    ],
)
def test_a_row_of_the_wrong_schema_is_named(tmp_path, row, field, reason):
    path = write_rows(tmp_path / "train.jsonl", GOOD, row)
    with pytest.raises(RowError, match=reason) as caught:
        load_problems(files(path, path), "train")
    assert (caught.value.row, caught.value.field) == (2, field)
    assert str(tmp_path / "train.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    ("task", "answer", "message"),
    [
        ("number_sorting", "__import__('os').getcwd()", "would run this row as Python code"),
        ("bitwise_arithmetic", "0x1", "only generated problems"),
        ("n_queens", "x", "runs responses as Python code"),
        ("no_such_task", "x", "unknown task"),
    ],
)
def test_no_code_runs_from_a_file(tmp_path, task, answer, message):
    path = write_rows(tmp_path / "train.jsonl", {"question": "x", "answer": answer, "task": task})
    with pytest.raises(DataError, match=f"row 1.*{message}"):
        load_problems(files(path, path), "train")


def test_damaged_files_are_named(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", GOOD)
    cases = {
        "missing.jsonl": (None, "no such file"),
        "empty.jsonl": (b"", "no rows"),
        "cut.jsonl": (b'{"question": "1", "answer": "2"}\n{"question": "1", "ans', "row 2.*truncated"),
        "latin.jsonl": (b'{"question": "\xe9", "answer": "2"}\n', "not UTF-8"),
        "data.csv": (b"question,answer\n", "unknown kind of file '.csv'"),
        "cut.parquet": (b"PAR1", "not a complete parquet file"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_problems(files(str(path), good), "train")
    with pytest.raises(DataError, match="no problem is left"):
        load_problems(files(good, good), "heldout")


def test_parquet_rows(tmp_path):
    rows = [
        {"question": "a", "answer": "1", "task": None, "metadata": '{"level": 2}'},
        {"question": "b", "answer": "2", "task": None, "metadata": None},
    ]
    for name in ("train.parquet", "heldout.parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        rows = [{**row, "question": row["question"] * 2} for row in rows]
    data = files(str(tmp_path / "train.parquet"), str(tmp_path / "heldout.parquet"))
    assert load_problems(data, "train") == [
        Problem("a", "1", metadata={"level": 2}),
        Problem("b", "2", metadata={}),
    ]
    assert [problem.question for problem in load_problems(data, "heldout")] == ["aa", "bb"]
    truncated = (tmp_path / "train.parquet").read_bytes()[:-20]
    (tmp_path / "train.parquet").write_bytes(truncated)
    with pytest.raises(DataError, match="not a complete parquet file"):
        load_problems(data, "train")
