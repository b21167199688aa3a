"""The runner, with the real `convert` of a model of a few thousand parameters."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.lock import FolderLock
from workflow.campaign.plan import Plan, write_plan
from workflow.manifest import MANIFEST, TWIN, read_manifest
from workflow.stages.runner import OWN_ERROR, PUBLISHED, REFUSED, STOPPED


@pytest.fixture
def planned(project):
    """The quick campaign's plan, its path, and its conversion."""
    plan, _ = plan_campaign(read_options({"campaign": "quick"}), project.folder)
    return plan, write_plan(plan, Path("results/quick")), plan.stages[plan.runs["good"].stages["convert"]]


def stage(project, path, spec, *more):
    return project.python("-m", "workflow.stages", spec.stage, "--plan", str(path), "--id", spec.name, *more)


def ends(spec):
    lines = [json.loads(line) for line in Path(spec.folder, "attempts.jsonl").read_text().splitlines()]
    return [line["end"] for line in lines if "end" in line]


def test_a_stage_publishes_once(project, planned):
    plan, path, spec = planned
    output = Path(spec.folder)
    done = stage(project, path, spec)
    assert done.returncode == PUBLISHED, done.stderr
    manifest = read_manifest(output / MANIFEST)
    assert (manifest.identity, manifest.code, ends(spec)) == (spec.identity, plan.code, ["published"])
    text = (output / MANIFEST).read_text()
    assert str(project.folder) not in text
    assert os.uname().nodename not in text
    assert stage(project, path, spec).returncode == PUBLISHED
    (output / MANIFEST).unlink()  # as a workflow engine does with the output of a job it takes for failed
    Path(spec.failure()).write_text("{}")  # as a start does that could not give it this name
    assert stage(project, path, spec).returncode == PUBLISHED
    assert not Path(spec.failure()).exists()
    assert read_manifest(output / MANIFEST) == manifest
    assert ends(spec) == ["published"]
    weights = next((output / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert stage(project, path, spec).returncode == PUBLISHED
    assert ends(spec) == ["published", "withdrawn", "published"]
    assert [a.end for a in read_manifest(output / MANIFEST).attempts] == ["withdrawn", "published"]
    assert read_manifest(output / MANIFEST).digest == manifest.digest


def test_a_failure_leaves_a_record_until_a_success(project, planned):
    _, path, spec = planned
    obstacle = Path(spec.folder) / "model"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("a file where a folder belongs")
    done = stage(project, path, spec)
    assert done.returncode == OWN_ERROR
    assert spec.log() in done.stderr
    record = json.loads(Path(spec.failure()).read_text())
    assert record["class"].endswith("Error")
    assert record["log"] == spec.log()
    assert any(record["class"] in line for line in record["last_lines"])
    assert not Path(spec.manifest()).exists()
    obstacle.unlink()
    assert stage(project, path, spec).returncode == PUBLISHED
    assert not Path(spec.failure()).exists()
    assert ends(spec) == ["error", "published"]
    assert [attempt.end for attempt in read_manifest(Path(spec.manifest())).attempts] == [
        "error",
        "published",
    ]


def test_a_plan_of_other_code_is_refused(project, planned):
    _, path, spec = planned
    source = project.folder / "workflow" / "stages" / "convert.py"
    source.write_text(source.read_text() + "# another version\n")
    done = stage(project, path, spec)
    assert done.returncode == REFUSED
    assert "made by another version of the code" in done.stderr
    assert not Path(spec.folder).exists()


def test_a_stage_that_is_not_what_was_planned_is_refused(project, planned):
    plan, _, spec = planned
    other = spec.model_copy(update={"config": spec.config | {"seed": 99}})
    changed = Plan.model_validate(plan.model_dump() | {"stages": plan.stages | {spec.id: other}})
    path = write_plan(changed, Path("results/quick"))
    done = stage(project, path, spec)
    assert done.returncode == REFUSED
    assert "is not what was planned" in done.stderr


def test_a_data_file_that_has_changed_is_refused_with_both_digests(project):
    rows = Path("rows.jsonl")
    rows.write_text(
        "".join(json.dumps({"question": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(32))
    )
    words = "data=files data.train_file=rows.jsonl data.heldout_file=rows.jsonl"
    plan, _ = plan_campaign(read_options({"campaign": "quick", "set": words}), project.folder)
    path = write_plan(plan, Path("results/quick"))
    spec = plan.stages[plan.runs["good"].stages["convert"]]
    before = hashlib.sha256(rows.read_bytes()).hexdigest()
    rows.write_text(rows.read_text().replace("31 + 1", "31 + 2"))
    done = stage(project, path, spec)
    assert done.returncode == REFUSED
    assert "data.train_file='rows.jsonl' has changed since it was planned" in done.stderr
    assert before in done.stderr
    assert hashlib.sha256(rows.read_bytes()).hexdigest() in done.stderr
    assert not Path(spec.folder).exists()


@pytest.mark.parametrize("more", [["--step", "1"], ["--id", "no-such-stage"]])
def test_what_the_plan_does_not_have_is_refused(project, planned, more):
    _, path, spec = planned
    done = stage(project, path, spec, *more)
    assert done.returncode == REFUSED
    assert "the plan" in done.stderr


def test_a_kill_before_the_manifest_is_there_was_no_publication(project, planned):
    _, path, spec = planned
    source = project.folder / "workflow" / "stages" / "publication.py"
    text = source.read_text()
    line = "    write_manifest(context.output / TWIN, manifest)\n"
    assert text.count(line) == 1
    source.write_text(text.replace(line, "    os.kill(os.getpid(), 9)\n"))
    plan, _ = plan_campaign(read_options({"campaign": "quick"}), project.folder)
    killed = write_plan(plan, Path("results/quick"))
    assert stage(project, killed, spec).returncode == -9
    assert ends(spec) == []
    source.write_text(text)
    assert stage(project, path, spec).returncode == PUBLISHED
    assert ends(spec) == ["killed", "published"]
    assert [a.end for a in read_manifest(Path(spec.manifest())).attempts] == ["killed", "published"]


def test_a_kill_after_the_manifest_is_there_leaves_a_success_that_no_failure_stands_beside(project, planned):
    source = project.folder / "workflow" / "stages" / "runner.py"
    text = source.read_text()
    line = "        publish(plan, context, result)\n"
    assert text.count(line) == 1
    source.write_text(text.replace(line, line + "        os.kill(os.getpid(), 9)\n"))
    plan, _ = plan_campaign(read_options({"campaign": "quick"}), project.folder)
    path, spec = write_plan(plan, Path("results/quick")), planned[2]
    obstacle = Path(spec.folder) / "model"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("a file where a folder belongs")
    assert stage(project, path, spec).returncode == OWN_ERROR
    obstacle.unlink()
    assert stage(project, path, spec).returncode == -9
    assert [a.end for a in read_manifest(Path(spec.manifest())).attempts] == ["error", "published"]
    assert not Path(spec.failure()).exists()
    assert stage(project, path, spec).returncode == PUBLISHED


def test_a_request_to_stop_comes_too_late_once_the_manifest_is_there(project, planned):
    source = project.folder / "workflow" / "stages" / "runner.py"
    text = source.read_text()
    line = "    _release(plan, spec, log)\n"
    assert text.count(line) == 1
    source.write_text(text.replace(line, "    os.kill(os.getpid(), 15)\n" + line))
    plan, _ = plan_campaign(read_options({"campaign": "quick"}), project.folder)
    path, spec = write_plan(plan, Path("results/quick")), planned[2]
    done = stage(project, path, spec)
    assert done.returncode == PUBLISHED, done.stderr
    assert ends(spec) == ["published"]


def test_a_request_to_stop_while_a_stage_waits_for_its_folder_ends_it(project, planned):
    _, path, spec = planned
    lock = FolderLock(Path(spec.folder))
    lock.acquire()
    command = [sys.executable, "-m", "workflow.stages", "convert", "--plan", str(path), "--id", spec.name]
    process = subprocess.Popen(command, env=project.environment, stderr=subprocess.PIPE, text=True)
    assert f"waiting for process {os.getpid()}" in process.stderr.readline()
    process.terminate()
    assert process.wait(timeout=60) == STOPPED
    assert "stopped before it began" in process.stderr.read()
    assert lock.holder().pid == os.getpid()
    lock.release()
    assert not Path(spec.folder, "attempts.jsonl").exists()


def test_a_damaged_input_is_refused_by_name_and_the_same_command_makes_it_anew(project, planned):
    plan, path, spec = planned
    assert stage(project, path, spec).returncode == PUBLISHED
    weights = next(Path(spec.folder, "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    sft = plan.stages[plan.runs["good"].stages["sft"]]
    done = stage(project, path, sft)
    assert done.returncode == REFUSED
    assert str(weights) in done.stderr
    assert json.loads(Path(sft.failure()).read_text())["class"] == "StageRefused"
    assert not Path(spec.manifest()).exists()
    assert stage(project, path, spec).returncode == PUBLISHED
    assert ends(spec) == ["published", "withdrawn", "published"]
    assert stage(project, path, sft).returncode == PUBLISHED


def test_a_folder_in_use_is_waited_for(project, planned):
    _, path, spec = planned
    assert stage(project, path, spec).returncode == PUBLISHED
    twin = Path(spec.folder, TWIN).read_text()
    for name in (MANIFEST, TWIN):
        Path(spec.folder, name).unlink()
    lock = FolderLock(Path(spec.folder))
    lock.acquire()
    command = [sys.executable, "-m", "workflow.stages", "convert", "--plan", str(path), "--id", spec.name]
    process = subprocess.Popen(command, env=project.environment, stderr=subprocess.PIPE, text=True)
    assert f"waiting for process {os.getpid()}" in process.stderr.readline()
    Path(spec.folder, TWIN).write_text(twin)  # the one that is waited for publishes
    lock.release()
    assert process.wait(timeout=60) == PUBLISHED
    assert ends(spec) == ["published"]
