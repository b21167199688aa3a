"""A user's function is looked for before anything starts, and without running its module."""

from __future__ import annotations

import pytest

from engines.config import ConfigError
from workflow.campaign.code import source_root
from workflow.campaign.head import plan_campaign, read_options

KEYS = {
    "reward.function": "reward.kind=function",
    "data.wrong_answer": "data.wrong_share=0.5",
}
MODULE = """\
raise RuntimeError("planning has run the module")
import json as js, os.path
from math import sqrt as root
def score(response, problem):
    def inner(): ...
    local = 1
class Judge: ...
alias = lambda hidden=1: [inside for inside in hidden]
if js:
    async def later(response, problem): ...
else:
    typed: object = score
for counted in (): ...
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a name that no other test has planned with."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def plan(key: str, value: str):
    words = f"{KEYS[key]} {key}={value}"
    return plan_campaign(read_options({"campaign": "drill", "set": words, "site": "local"}), source_root())


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["score", "js", "os", "root", "Judge", "alias", "later", "typed", "counted"])
def test_whatever_a_module_defines_is_found(module, key, name):
    assert plan(key, f"{module('defines', MODULE)}:{name}")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("scored", "did you mean 'score'?"),
        ("nope", "known: "),
        ("inner", "has no 'inner'"),
        ("local", "has no 'local'"),
        ("hidden", "has no 'hidden'"),
        ("inside", "has no 'inside'"),
        ("json", "has no 'json'"),
    ],
)
def test_what_it_does_not_define_is_refused_by_name(module, key, name, told):
    value = f"{module('defines', MODULE)}:{name}"
    with pytest.raises(ConfigError) as caught:
        plan(key, value)
    assert f"{key}={value!r}: " in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["from os.path import *\n", "def __getattr__(name): ...\n"])
def test_names_that_only_running_would_tell_are_left_to_the_job(module, text):
    assert plan("reward.function", f"{module('open_' + str(len(text)), text)}:join")


def test_a_module_that_is_no_python_is_refused(module):
    with pytest.raises(ConfigError, match=r"damaged.py is no Python"):
        plan("reward.function", f"{module('damaged', 'def score(')}:score")


def test_a_function_that_is_written_later_is_found(module):
    name = module("grows", "def other(): ...\n")
    with pytest.raises(ConfigError):
        plan("reward.function", f"{name}:score")
    module("grows", "def other(): ...\ndef score(response, problem): ...\n")
    assert plan("reward.function", f"{name}:score")
