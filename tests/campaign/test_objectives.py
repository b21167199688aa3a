"""The tables of the objective: what is known, documented, added by third parties, and refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from engines.config import ConfigError, parse
from engines.training import batch
from workflow.campaign import objectives
from workflow.campaign.algorithm import AlgorithmConfig, CorrectionConfig
from workflow.campaign.code import source_root
from workflow.campaign.compose import compose_run
from workflow.campaign.identity import by_content
from workflow.campaign.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    ENTRY_POINTS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    TABLES,
    DuplicateObjectiveError,
)
from workflow.campaign.overrides import read_overrides
from workflow.campaign.paths import lookup
from workflow.campaign.relevance import irrelevant

ROOT = source_root()
CONFIGS = ROOT / "configs"
PAGE = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")


def algorithm(**values) -> AlgorithmConfig:
    return parse(AlgorithmConfig, {"name": "grpo", **values}, "algorithm")


def compose(*words):
    return compose_run(read_overrides(words, CONFIGS), CONFIGS)


def rows_of(title: str) -> dict[str, list[str]]:
    """First cell -> the others, of the first table below a title of the page."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    assert len(lines) == len({name for name, _ in lines})
    return {name: re.split(r"(?<!\\)\|", rest) for name, rest in lines}


@pytest.mark.parametrize(("title", "table"), [("Advantages", ADVANTAGES), ("Policy losses", POLICY_LOSSES)])
def test_the_page_has_a_row_for_each_row_with_the_keys_that_it_reads(title, table):
    documented = rows_of(title)
    assert list(documented) == [row.name for row in table]
    for row in table:
        named = re.findall(r"`([^`]+)`", documented[row.name][1])
        patterns = [key.replace(".", r"\.").replace("*", ".*") for key in named]
        unnamed = [key for key in row.reads if not any(re.fullmatch(p, key) or re.fullmatch(p, f"{key}.x") for p in patterns)]  # fmt: skip
        assert not unnamed, row.name
        assert all(any(re.fullmatch(p, key) or re.fullmatch(p, f"{key}.x") for key in row.reads) for p in patterns)  # fmt: skip


def test_the_page_has_every_other_row():
    names = [row.name for row in KL_ESTIMATORS]
    assert list(rows_of("KL")) == names
    assert all(f"`{name}+`" in PAGE for name in names)
    assert list(rows_of("From terms to a loss")) == [row.name for row in AGGREGATIONS]
    corrections = [f"{key}={row.name}" for key in TABLES if key.startswith("correction.") for row in TABLES[key]]  # fmt: skip
    assert list(rows_of("Rollout correction")) == corrections


def test_the_page_says_how_to_add_to_each_table():
    own = PAGE.split("\n## Your own\n")[1]
    assert dict(re.findall(r"^\| `algorithm\.([^`]+)` \| `([^`]+)` \|", own, re.MULTILINE)) == ENTRY_POINTS


EVERY_ROW = [pytest.param(row, id=f"{key}={row.name}") for key, table in TABLES.items() for row in table]


@pytest.mark.parametrize("row", EVERY_ROW)
def test_every_row_has_its_function_with_its_source(row):
    assert row.load().__name__ == {"abs": "absolute"}.get(row.name, row.name.replace("-", "_"))
    assert row.load().__doc__
    if row.selects:
        assert callable(objectives.load_function(row.selects))


@pytest.mark.parametrize("row", [*ADVANTAGES, *POLICY_LOSSES], ids=lambda row: row.name)
def test_every_estimator_and_loss_names_its_paper(row):
    assert "(" in row.load().__doc__


def test_the_engines_know_the_same_aggregations_by_name():
    assert {row.name: row.load() for row in AGGREGATIONS} == batch.AGGREGATIONS


REFUSED = {
    "an unknown estimator": ({"advantage": "rlo"}, ["algorithm.advantage='rlo'", "did you mean 'rloo'"]),
    "an unknown loss": ({"policy_loss": "sapoo"}, ["algorithm.policy_loss='sapoo'", "did you mean 'sapo'"]),
    "an unknown aggregation": ({"aggregation": "token-meen"}, ["algorithm.aggregation='token-meen'", "did you mean 'token-mean'"]),
    "an unknown KL estimator": ({"kl": {"place": "loss", "estimator": "k4"}}, ["algorithm.kl.estimator='k4'", "known: abs, k1, k2, k3 (or module:function)"]),
    "weights that there are not": ({"correction": {"weights": "tokens"}}, ["algorithm.correction.weights='tokens'", "did you mean 'token'"]),
    "a bound that there is not": ({"correction": {"bound": "none"}}, ["algorithm.correction.bound='none'", "known: mask, truncate"]),
    "weights under another name for none": ({"correction": {"weights": "off"}}, ["algorithm.correction.weights='off'", "known: none, sequence, token"]),
    "an unknown rejection": ({"correction": {"reject": "men"}}, ["algorithm.correction.reject='men'", "did you mean 'mean'"]),
    "a loss straight through": ({"policy_loss": "ppo+"}, ["algorithm.policy_loss='ppo+'", "did you mean 'ppo'"]),
    "a name that says nothing": ({"name": "mine"}, ["algorithm.name='mine'", "set algorithm.advantage"]),
    "nothing to compare": ({"advantage": "rloo", "samples_per_prompt": 1}, ["algorithm.samples_per_prompt=1", "'rloo' compares", "at least 2"]),
    "fewer samples than k": ({"advantage": "pass_at_k", "pass_k": 9}, ["algorithm.samples_per_prompt=8", "pass_k=9", "at least 9"]),
    "k of one": ({"advantage": "pass_at_k", "pass_k": 1}, ["algorithm.pass_k=1", "greater than or equal to 2"]),
    "a filter without differences": ({"advantage": "remax", "samples_per_prompt": 1, "filter": {"by": "reward"}}, ["algorithm.samples_per_prompt=1", "filter.by='reward'"]),
    "nothing to correct": ({"old_log_probs": "rollout", "correction": {"weights": "token"}}, ["algorithm.old_log_probs='rollout'", "recompute"]),
    "bounds the wrong way round": ({"correction": {"low": 3.0}}, ["algorithm.correction.low=3.0", "below high=2.0"]),
    "bounds of a rejection": ({"correction": {"reject_low": 2.0}}, ["algorithm.correction.reject_low=2.0", "below reject_high"]),
    "covariances the wrong way round": ({"covariance": {"low": 9.0}}, ["algorithm.covariance.low=9.0", "below high=5.0"]),
    "a gradient of a reward": ({"kl": {"place": "reward", "estimator": "k1+"}}, ["algorithm.kl.estimator='k1+'", "write k1"]),
    "a penalty that could become a reward": ({"kl": {"place": "loss", "adaptive": True, "horizon": 102}}, ["algorithm.kl.horizon=102", "512 samples per step", "at least 103"]),
    "a coefficient that stays 0": ({"kl": {"place": "loss", "adaptive": True, "coefficient": 0}}, ["algorithm.kl.coefficient=0", "above 0"]),
    "a dual clip of less than one": ({"dual_clip": 0.5}, ["algorithm.dual_clip=0.5", "greater than 1"]),
}  # fmt: skip


@pytest.mark.parametrize(("values", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_together_is_refused_by_key_value_and_remedy(values, told):
    with pytest.raises(ConfigError) as caught:
        algorithm(**{"mini_batch_size": 8, **values})
    assert [text for text in told if text not in str(caught.value)] == [], str(caught.value)


DEAD = {
    "algorithm.dual_clip=3": "algorithm.policy_loss=gspo",
    "algorithm.clip_low=0.1": "algorithm.policy_loss=reinforce",
    "algorithm.clip_high=0.1": "algorithm.policy_loss=sapo",
    "algorithm.sapo.temperature_positive=2": "algorithm.policy_loss=ppo",
    "algorithm.covariance.coefficient=2": "algorithm.policy_loss=clip_cov",
    "algorithm.covariance.low=0": "algorithm.policy_loss=kl_cov",
    "algorithm.pass_k=3": "algorithm.advantage=rloo",
    "algorithm.normalize_by_std=false": "algorithm.advantage=opo",
    "algorithm.gamma=0.9": "algorithm.advantage=remax",
    "critic.engine.token_budget=9": "algorithm.advantage=rloo",
    "algorithm.critic_lr=0.1": "algorithm.advantage=gpg",
    "algorithm.correction.high=3": "algorithm.correction.reject=mean",
    "algorithm.correction.low=0.1": "algorithm.correction.weights=token",
    "algorithm.correction.bound=mask": "algorithm.correction.reject=mean",
    "algorithm.correction.reject_low=0.1": "algorithm.correction.weights=token",
    "algorithm.filter.max_rounds=3": "algorithm.advantage=rloo",
    "algorithm.options.x=3": "algorithm.advantage=rloo",
    "reward.overlong.penalty=3": "reward.overlong.buffer=0",
}


@pytest.mark.parametrize(("dead", "other"), DEAD.items(), ids=DEAD.keys())
def test_keys_that_nothing_reads_are_named(dead, other):
    key = dead.partition("=")[0]
    assert list(irrelevant(compose(other, dead), [key])) == [key]


def test_a_third_partys_estimator_reads_no_correction():
    words = ["algorithm.advantage=tests.rl.test_trainer:own_advantage", "algorithm.correction.weights=token"]
    assert list(irrelevant(compose(*words, "algorithm.correction.low=0.3"), ["algorithm.correction.low"]))
    own = [*words, "algorithm.correction.bound=tests.rl.test_trainer:own_bound"]
    assert not irrelevant(compose(*own, "algorithm.correction.low=0.3"), ["algorithm.correction.low"])


def test_why_a_key_has_no_effect_is_the_first_cause():
    key = "algorithm.correction.low"
    assert irrelevant(compose(f"{key}=0.3"), [key]) == {key: "algorithm.correction.weights=none"}
    bounded = compose("algorithm.correction.weights=token", f"{key}=0.3")
    assert irrelevant(bounded, [key]) == {key: "algorithm.correction.bound=truncate does not read it"}


def test_keys_that_are_read_are_not_named():
    words = ["algorithm.advantage=pass_at_k", "algorithm.pass_k=3", "algorithm.policy_loss=clip_cov", "algorithm.covariance.low=0.5", "algorithm.clip_low=0.1"]  # fmt: skip
    assert irrelevant(compose(*words), [word.partition("=")[0] for word in words]) == {}


def test_a_third_partys_function_may_read_anything():
    words = ["algorithm.advantage=tests.rl.test_trainer:own_advantage", "algorithm.options.bonus=2", "algorithm.pass_k=3"]  # fmt: skip
    run = compose(*words)
    assert run.algorithm.options == {"bonus": 2}
    assert irrelevant(run, [word.partition("=")[0] for word in words]) == {}


@pytest.fixture
def their_package(tmp_path: Path, monkeypatch):
    """Installs a package with a function under the given name of an entry point."""

    def install(key: str, name: str) -> None:
        (tmp_path / "their_objective.py").write_text("def compute(*arguments):\n    return {}\n")
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS[key]}]\n{name} = their_objective:compute\n")
        monkeypatch.syspath_prepend(tmp_path)
        objectives.tables.cache_clear()

    yield install
    sys.modules.pop("their_objective", None)
    monkeypatch.undo()
    objectives.tables.cache_clear()


NEEDED = {"kl.estimator": ["algorithm.kl.place=loss"], "correction.bound": ["algorithm.correction.weights=token"]}  # fmt: skip


@pytest.mark.parametrize("key", TABLES)
def test_third_parties_add_rows_by_entry_point(their_package, tmp_path, key):
    their_package(key, "theirs")
    run = compose(*NEEDED.get(key, []), f"algorithm.{key}=theirs")
    assert objectives.find(key, "theirs").load()(None) == {}
    assert not run.algorithm.has_critic
    assert irrelevant(run, [f"algorithm.{key}"]) == {}
    values = run.model_dump(mode="json")
    content = lookup(by_content(values)["algorithm"], key)
    assert content.startswith("their_objective:compute sha256:")
    (tmp_path / "their_objective.py").write_text("def compute(*arguments):\n    return {1: 2}\n")
    assert lookup(by_content(values)["algorithm"], key) != content


def test_an_estimator_of_theirs_is_another_one_straight_through(their_package):
    their_package("kl.estimator", "theirs")
    found = [
        by_content(compose("algorithm.kl.place=loss", f"algorithm.kl.estimator={name}").model_dump(mode="json"))
        for name in ("theirs", "theirs+", "their_objective:compute", "their_objective:compute+")
    ]  # fmt: skip
    plain, through, by_path, path_through = (values["algorithm"]["kl"]["estimator"] for values in found)
    assert plain == by_path != through == path_through


@pytest.mark.parametrize("key", TABLES)
def test_a_name_that_is_there_already_is_refused_before_anything_runs(their_package, key):
    taken = TABLES[key][0].name
    their_package(key, taken)
    with pytest.raises(DuplicateObjectiveError, match=rf"algorithm\.{key}='{taken}' is .*their_objective:compute cannot"):  # fmt: skip
        objectives.tables()
    with pytest.raises(ConfigError, match=r"their_objective:compute cannot be it too"):
        algorithm()


@pytest.mark.parametrize("name", ["none", "k9+", "their:own"])
def test_a_name_that_means_something_else_is_refused(their_package, name):
    their_package("kl.estimator", name)
    with pytest.raises(DuplicateObjectiveError, match=rf"entry point '{re.escape(name)}' in baton.kl_estimators"):  # fmt: skip
        objectives.tables()


def test_a_package_that_clashes_lets_everything_else_be_imported(their_package):
    """Who only looks at results does not meet the tables."""
    their_package("correction.bound", "truncate")
    assert parse(CorrectionConfig, {}) == CorrectionConfig()


def test_own_rows_are_known_by_name_and_defaults_by_nothing():
    """So that results from before a key was there keep their identity."""
    values = compose("algorithm.advantage=rloo").model_dump(mode="json")
    assert by_content(values)["algorithm"]["advantage"] == "rloo"
    plain = by_content(compose("algorithm=grpo").model_dump(mode="json"))
    new = {
        "advantage",
        "policy_loss",
        "dual_clip",
        "sapo",
        "covariance",
        "pass_k",
        "correction",
        "filter",
        "options",
    }
    assert not new & plain["algorithm"].keys()
    assert "overlong" not in plain["reward"]
    assert by_content(compose("algorithm.dual_clip=2").model_dump(mode="json"))["algorithm"]["dual_clip"] == 2
