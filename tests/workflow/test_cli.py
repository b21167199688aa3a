"""The baton command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from engines.registry import EngineRegistry
from tests.workflow.test_manifest import input_of, publish
from workflow.campaign.plan import CURRENT
from workflow.campaign.view import find_manifests
from workflow.cli import app
from workflow.manifest import MANIFEST, ManifestError


def baton(*words):
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


def test_engines_lists_every_declared_engine():
    code, output = baton("engines")
    triples = EngineRegistry.triples()
    assert code == 0
    assert sum(line.startswith(("language_model", "value_model")) for line in output.splitlines()) == len(
        triples
    )
    assert f"{sum(t.state == 'built' for t in triples)} of {len(triples)} are built" in output


def test_plan_shows_stages_placement_and_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output = baton("plan", "drill", "--set", "engine=fsdp", "--seed", "3", "--site", "local")
    assert code == 0
    for shown in (
        "micro-qwen3-sorting-ppo",
        "cut at [2, 4, 6]",
        "dp2",
        "fsdp",
        "placement auto -> cpu",
        "17 jobs",
        "(segments: 3); proposed: [6]; start 180 s",
        "estimated from the model's size: nothing is measured yet",
        "memory of engine on each of",
        "fits 4 GB",
    ):
        assert shown in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("memory", "verdict"), [("0.01", "does NOT fit"), ("unknown", "what a device has is unknown")]
)
def test_plan_says_when_memory_is_too_little_or_not_known(tmp_path, monkeypatch, memory, verdict):
    monkeypatch.chdir(tmp_path)
    words = ("--site", "local", "--set", f"site.devices.cpu.memory_per_device_gb={memory}")
    code, output = baton("plan", "drill", *words)
    assert code == 0
    told = [line for line in output.splitlines() if line.startswith("memory of")]
    assert told
    assert all(verdict in line for line in told)


def test_plan_refuses_with_the_reason():
    code, output = baton("plan", "drill", "--set", "engine=fdsp")
    assert code == 1
    assert "did you mean 'fsdp'" in output


def test_convert_names_its_formats(tmp_path):
    code, output = baton("convert", str(tmp_path), str(tmp_path / "target"), "--to", "pickle")
    assert code == 1
    assert "--to pickle: must be megatron or hf" in output


@pytest.fixture
def campaign(tmp_path):
    """A run that consists of two results."""
    store = tmp_path / "store"
    first = publish(store / "a")
    publish(store / "b", inputs={"model": input_of(store / "a", first)})
    run = tmp_path / "demo" / "run"
    run.mkdir(parents=True)
    (run / "run.json").write_text(
        json.dumps({"stages": [{"manifest": f"../../store/{name}/{MANIFEST}"} for name in "ab"]})
    )
    (tmp_path / "demo" / CURRENT).write_text(json.dumps({"of": "another version", "runs": {"run": {}}}))
    return tmp_path


def test_verify_names_a_plan_that_is_none(campaign):
    (campaign / "demo" / CURRENT).write_text("{}")
    code, output = baton("verify", str(campaign / "demo"))
    assert (code, "not a plan" in output) == (1, True)


@pytest.mark.parametrize("path", ["store/b", f"store/b/{MANIFEST}", "demo/run", "demo"])
def test_verify_hashes_a_result_and_what_it_came_from(campaign, path):
    assert baton("verify", str(campaign / path))[0] == 0
    (campaign / "store/a/model/weights").write_text("altered")
    code, output = baton("verify", str(campaign / path))
    assert code == 1
    assert "store/a/model/weights" in output.replace("\n", "")


def test_verify_names_what_is_no_result(tmp_path):
    code, output = baton("verify", str(tmp_path))
    assert code == 1
    assert "give a result, a run or a campaign" in output.replace("\n", " ")
    with pytest.raises(ManifestError):
        find_manifests(tmp_path)
