"""The tables of the objective: what is known, documented, added by third parties, and refused."""

from __future__ import annotations

import re
import sys
import typing
from pathlib import Path

import pytest

from engines.config import ConfigError, parse
from workflow.campaign import objectives
from workflow.campaign.algorithm import AlgorithmConfig, KLConfig
from workflow.campaign.code import source_root
from workflow.campaign.compose import compose_run
from workflow.campaign.identity import by_content
from workflow.campaign.objectives import ADVANTAGES, POLICY_LOSSES, TABLES, DuplicateObjectiveError
from workflow.campaign.overrides import read_overrides
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


def test_the_page_has_every_other_choice():
    estimators = typing.get_args(KLConfig.model_fields["estimator"].annotation)
    assert {name.rstrip("+") for name in estimators} == set(rows_of("KL"))
    assert all(f"`{name}`" in PAGE for name in estimators)
    aggregations = typing.get_args(AlgorithmConfig.model_fields["aggregation"].annotation)
    assert set(aggregations) == set(rows_of("From terms to a loss"))


@pytest.mark.parametrize("row", [*ADVANTAGES, *POLICY_LOSSES], ids=lambda row: row.name)
def test_every_row_has_its_function_with_its_source(row):
    assert row.load().__name__ == row.name
    assert "(" in row.load().__doc__
    if row.selects:
        assert callable(objectives.load_function(row.selects))


REFUSED = {
    "an unknown estimator": ({"advantage": "rlo"}, ["algorithm.advantage='rlo'", "did you mean 'rloo'"]),
    "an unknown loss": ({"policy_loss": "sapoo"}, ["algorithm.policy_loss='sapoo'", "did you mean 'sapo'"]),
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
    "algorithm.correction.reject_low=0.1": "algorithm.correction.weights=token",
    "algorithm.filter.max_rounds=3": "algorithm.advantage=rloo",
    "algorithm.options.x=3": "algorithm.advantage=rloo",
    "reward.overlong.penalty=3": "reward.overlong.buffer=0",
}


@pytest.mark.parametrize(("dead", "other"), DEAD.items(), ids=DEAD.keys())
def test_keys_that_nothing_reads_are_named(dead, other):
    key = dead.partition("=")[0]
    assert list(irrelevant(compose(other, dead), [key])) == [key]


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
    """Installs a package with an estimator under the given name of an entry point."""

    def install(name: str) -> None:
        (tmp_path / "their_objective.py").write_text("def estimate(batch, config):\n    return {}\n")
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[baton.advantages]\n{name} = their_objective:estimate\n")
        monkeypatch.syspath_prepend(tmp_path)
        objectives.table.cache_clear()

    yield install
    sys.modules.pop("their_objective", None)
    monkeypatch.undo()
    objectives.table.cache_clear()


def test_third_parties_add_rows_by_entry_point(their_package, tmp_path):
    their_package("theirs")
    run = compose("algorithm.advantage=theirs")
    assert run.algorithm.estimator.load()(None, None) == {}
    assert not run.algorithm.has_critic
    values = run.model_dump(mode="json")
    content = by_content(values)["algorithm"]["advantage"]
    assert content.startswith("their_objective:estimate sha256:")
    (tmp_path / "their_objective.py").write_text("def estimate(batch, config):\n    return {1: 2}\n")
    assert by_content(values)["algorithm"]["advantage"] != content


def test_a_name_that_is_there_already_is_refused(their_package):
    their_package("rloo")
    with pytest.raises(DuplicateObjectiveError, match=r"advantage='rloo' is workflow.*their_objective:estimate cannot"):  # fmt: skip
        objectives.table("advantage")


def test_own_rows_are_known_by_name_and_defaults_by_nothing():
    """So that results from before a key was there keep their identity."""
    values = compose("algorithm.advantage=rloo").model_dump(mode="json")
    assert by_content(values)["algorithm"]["advantage"] == "rloo"
    plain = by_content(compose("algorithm=grpo").model_dump(mode="json"))
    new = {*TABLES, "dual_clip", "sapo", "covariance", "pass_k", "correction", "filter", "options"}
    assert not new & plain["algorithm"].keys()
    assert "overlong" not in plain["reward"]
    assert by_content(compose("algorithm.dual_clip=2").model_dump(mode="json"))["algorithm"]["dual_clip"] == 2
