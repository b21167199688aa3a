"""Manifests: written once and whole, checked against the bytes beside them, followed to everything they came from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engines.checkpoint.store import RELEASED_FILE
from engines.checkpoint.verify import STATE_FILE
from workflow.manifest import (
    MANIFEST,
    Attempt,
    Hardware,
    InputRecord,
    Manifest,
    ManifestError,
    check_files,
    describe_files,
    read_manifest,
    verify,
    write_manifest,
)

ATTEMPT = Attempt(number=1, end="published", seconds=1.5)


def publish(
    folder: Path, content: str = "weights", inputs: dict[str, InputRecord] | None = None, **changes
) -> Manifest:
    """A stage's folder with two files and its manifest."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights").write_text(content)
    (folder / "records.jsonl").write_text("{}\n")
    values = {
        "stage": "sft",
        "version": 1,
        "id": folder.name,
        "identity": folder.name * 4,
        "learning_identity": "l",
        "slug": "tiny",
        "config": {"seed": 0},
        "inputs": inputs or {},
        "files": describe_files(folder, ["model", "records.jsonl"]),
        "steps_planned": 2,
        "steps_done": 2,
        "device": {"asked": "auto", "computed": "cpu", "why": "it is there"},
        "layout": {},
        "world_size": 1,
        "dtype": "float32",
        "threads": 1,
        "environment": "e",
        "code": "c",
        "hardware": Hardware(cpu="kind"),
        "created": "2026-01-01T00:00:00+00:00",
    }
    manifest = Manifest(**(values | changes))
    write_manifest(folder / MANIFEST, manifest)
    return manifest


def input_of(folder: Path, manifest: Manifest) -> InputRecord:
    return InputRecord(
        stage="sft", id=manifest.id, manifest=f"../{folder.name}/{MANIFEST}", digest=manifest.digest
    )


@pytest.fixture
def chain(tmp_path):
    """a -> b -> c."""
    folders = [tmp_path / name for name in "abc"]
    inputs = {}
    for folder in folders:
        published = publish(
            folder, content=folder.name, inputs=inputs, metrics={"accuracy": 0.5}, attempts=[ATTEMPT]
        )
        inputs = {"model": input_of(folder, published)}
    return folders


def test_what_is_read_is_what_was_written(tmp_path):
    manifest = publish(tmp_path / "a", attempts=[ATTEMPT])
    assert read_manifest(tmp_path / "a" / MANIFEST) == manifest
    assert set(manifest.files) == {"model/weights", "records.jsonl"}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [MANIFEST, "model", "records.jsonl"]


def test_equal_results_have_equal_digests_however_they_came_about(tmp_path):
    one = publish(tmp_path / "a", created="2026-01-01T00:00:00+00:00")
    two = one.model_copy(
        update={"created": "later", "attempts": [Attempt(number=2, end="published", seconds=9)]}
    )
    assert one.digest == two.digest
    assert one.digest != publish(tmp_path / "b", identity=one.identity, content="other").digest


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "missing"), ("{", "not JSON"), ('{"stage": "sft"}', "not a manifest"), ("[]", "not a manifest")],
)
def test_no_manifest_is_named(tmp_path, text, told):
    path = tmp_path / MANIFEST
    if text is not None:
        path.write_text(text)
    with pytest.raises(ManifestError, match=f"{path}: {told}"):
        read_manifest(path)


def test_files_outside_the_folder_or_missing_are_not_published(tmp_path):
    with pytest.raises(ManifestError, match="must lie in"):
        describe_files(tmp_path, ["../x"])
    with pytest.raises(ManifestError, match="missing"):
        describe_files(tmp_path, ["x"])


def test_a_chain_as_published_is_verified_to_its_root(chain):
    found = verify(chain[2] / MANIFEST)
    assert (found.manifests, found.files, found.problems) == (3, 6, [])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda root: (root / "model/weights").write_text("b"), "its digest is not the published one"),
        (lambda root: (root / "model/weights").write_text("longer"), "6 bytes, 1 were published"),
        (lambda root: (root / "model/weights").unlink(), "missing"),
        (lambda root: (root / MANIFEST).unlink(), "missing"),
        (lambda root: (root / MANIFEST).write_text("{"), "not JSON"),
    ],
)
def test_damage_anywhere_in_a_chain_is_found(chain, damage, told):
    damage(chain[0])
    problems = verify(chain[2] / MANIFEST).problems
    assert len(problems) == 1
    assert str(chain[0]) in problems[0]
    assert told in problems[0]


def test_whatever_is_altered_in_a_manifest_is_found(chain):
    """Not what is said about files alone: an accuracy, a seed, a date."""
    path = chain[0] / MANIFEST
    published = json.loads(path.read_text())
    assert set(published) == {*Manifest.model_fields, "checksum"}
    for key, value in published.items():
        path.write_text(json.dumps(published | {key: _another(value)}))
        problems = verify(chain[2] / MANIFEST).problems
        assert [str(path) in line for line in problems] == [True], key
    path.write_text(json.dumps(published, sort_keys=True))
    assert verify(chain[2] / MANIFEST).problems == []


def _another(value):
    """Of the same type, and allowed by the schema as far as can be."""
    if isinstance(value, dict):
        return {**value, "altered": 0.5} if not value else {k: _another(v) for k, v in value.items()}
    if isinstance(value, list):
        return []
    return value + 1 if isinstance(value, int | float) else f"{value}x"


def test_everything_published_is_on_disk_before_the_manifest(tmp_path, monkeypatch):
    """Every file and every folder on the way to it, so that no power cut leaves a manifest of what is not there."""
    manifest, durable = tmp_path / "a" / MANIFEST, {}
    fsync = os.fsync

    def noted(descriptor):
        fsync(descriptor)
        durable.setdefault(os.fstat(descriptor).st_ino, manifest.exists())

    monkeypatch.setattr(os, "fsync", noted)
    publish(tmp_path / "a")
    below = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {path.name: durable[path.stat().st_ino] for path in below} == {
        "a": False,
        "model": False,
        "weights": False,
        "records.jsonl": False,
        MANIFEST: False,
    }


def test_an_input_that_was_computed_anew_with_another_result_is_found(chain):
    root = chain[0]
    (root / "model/weights").write_text("other")
    changed = read_manifest(root / MANIFEST).model_copy(
        update={"files": describe_files(root, ["model", "records.jsonl"])}
    )
    write_manifest(root / MANIFEST, changed)
    assert [
        "is not the result it was computed from" in line for line in verify(chain[2] / MANIFEST).problems
    ] == [True]


def test_a_released_state_has_no_bytes_to_check_but_its_description(chain):
    root = chain[0]
    (root / "model/weights").unlink()
    (root / RELEASED_FILE).write_text("{}")
    found = verify(chain[2] / MANIFEST)
    assert (found.manifests, found.files, found.released, found.problems) == (3, 4, 1, [])
    assert check_files(root, read_manifest(root / MANIFEST)) == []
    (root / STATE_FILE).write_text("{}")
    state = {"files": describe_files(root, [STATE_FILE])}
    write_manifest(root / MANIFEST, read_manifest(root / MANIFEST).model_copy(update=state))
    assert check_files(root, read_manifest(root / MANIFEST)) == []
    (root / RELEASED_FILE).write_text("[]")
    assert "digest" in check_files(root, read_manifest(root / MANIFEST))[0]
