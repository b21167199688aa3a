"""The workflow as people start it: dry runs, refusals, kills of the head, edits while it runs, failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.fake_campaign import fake_campaign
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.lock import FolderLock
from workflow.manifest import read_manifest, verify


def spec_of(project, stage, **options):
    plan, _ = plan_campaign(read_options({"campaign": "quick", **options}), project.folder)
    return plan.stages[plan.runs["good"].stages[stage]]


# The weak teacher of the demonstrations, by which a test holds the SFT: that stage imports it, planning does not.
HOLD = """\
import time
from pathlib import Path
from workflow.data.teachers import always_ascending as answer

while Path("hold").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def held(project, monkeypatch):
    """The command of an SFT that waits until the file ``hold`` is gone, and its stage as planned."""
    Path("hold.py").write_text(HOLD)
    Path("hold").touch()
    monkeypatch.syspath_prepend(project.folder)
    words = "data.wrong_answer=hold:answer"
    spec = spec_of(project, "sft", set=words)
    return [spec.manifest(), "--config", "campaign=quick", f"set={words}"], spec


def wait_for(path: Path, head=None, seconds=240.0):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        assert head is None or head.poll() is None, Path("head.txt").read_text()
        time.sleep(0.05)


def attempts(spec):
    lines = [json.loads(line) for line in Path(spec.folder, "attempts.jsonl").read_text().splitlines()]
    return [line["end"] for line in lines if "end" in line]


def test_a_dry_run_plans_every_stage_and_starts_nothing(project):
    code, output = project.run("--dry-run", "--config", "campaign=demo", "controls=true")
    assert code == 0, output
    counts = dict(
        line.split() for line in output.splitlines() if line.split()[1:] and line.split()[1].isdigit()
    )
    assert counts["convert"] == "1"
    assert counts["train"] == "9"
    assert counts["run"] == "4"
    assert not Path("results/store").exists()
    assert not Path("results/.head.json").exists()


def test_a_dry_run_places_every_stage_by_its_device_key(project):
    words = ("campaign=demo-slurm", "site=mini")
    code, output = project.run("--dry-run", "--executor", "baton", "--jobs", "9", "--config", *words)
    assert code == 0, output
    asked = {
        rule: set(re.findall(rf"^rule {rule}:$.*?device=(\w+)", output, re.DOTALL | re.MULTILINE))
        for rule in ("convert", "sft", "train")
    }
    assert asked == {"convert": {"cpu"}, "sft": {"cuda"}, "train": {"cuda", "npu"}}
    assert not Path("results/store").exists()


def test_a_stage_without_a_place_is_refused_before_the_first_job(project):
    text = Path("configs/site/mini.yaml").read_text()
    Path("configs/site/vague.yaml").write_text(
        text.replace("name: mini", "name: vague").replace("partition: ascend\n", "partition: unknown\n")
    )
    words = ("campaign=demo-slurm", "site=vague")
    code, output = project.run("--executor", "baton", "--jobs", "9", "--config", *words)
    assert code != 0
    assert "site.devices.npu.partition is unknown" in output, output
    assert not Path("results/.jobs").exists()
    assert not Path("results/store").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["campaign=dmeo"], "did you mean 'demo'"),
        (["campaign=demo", "set=algorithm.lrr=1"], "algorithm.lrr: unknown key; did you mean 'lr'?"),
    ],
)
def test_bad_input_is_refused_before_anything_exists(project, words, told):
    code, output = project.run("--config", *words)
    assert code != 0
    assert told in output
    assert not Path("results").exists()


def test_bad_data_is_refused_before_the_first_job(project):
    Path("rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": "2 + 2"}\n')
    words = "data=files data.train_file=rows.jsonl data.heldout_file=rows.jsonl"
    code, output = project.run("--config", "campaign=quick", f"set={words}")
    assert code != 0
    assert "rows.jsonl, row 2, field 'answer': missing" in output
    assert not Path("results/store").exists()


def test_a_second_head_names_the_first_and_stops(project):
    with FolderLock(Path("results"), ".head.json"):
        code, output = project.run("--config", "campaign=quick")
    assert code != 0
    assert f"another head is running: results is in use by process {os.getpid()}" in output
    assert not Path("results/store").exists()


def test_a_killed_head_is_continued_by_the_same_command(project, held):
    command, spec = held
    head = project.start(*command)
    wait_for(Path(spec.folder, "attempts.jsonl"), head)
    head.kill()  # the head alone: its job runs on as an orphan
    head.wait()
    assert not Path(spec.manifest()).exists()
    head = project.start(*command)
    while "waiting for process" not in (output := Path("head.txt").read_text()):
        assert head.poll() is None, output
        time.sleep(0.05)
    Path("hold").unlink()
    assert head.wait(timeout=240) == 0, Path("head.txt").read_text()
    assert attempts(spec) == ["published"]
    assert verify(Path(spec.manifest())).problems == []


def test_a_killed_job_is_started_again_by_the_same_command(project, held):
    command, spec = held
    head = project.start(*command)
    wait_for(Path(spec.folder, "attempts.jsonl"), head)
    os.killpg(head.pid, signal.SIGKILL)  # head and job
    head.wait()
    Path("hold").unlink()
    code, output = project.run(*command)
    assert code == 0, output
    assert attempts(spec) == ["killed", "published"]
    manifest = read_manifest(Path(spec.manifest()))
    assert [attempt.end for attempt in manifest.attempts] == ["killed", "published"]
    assert manifest.device_seconds.used > manifest.device_seconds.lost


def test_an_interrupted_campaign_is_continued_by_the_same_command(project, held):
    command, spec = held
    head = project.start(*command)
    wait_for(Path(spec.folder, "attempts.jsonl"), head)
    os.killpg(head.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    assert head.wait(timeout=240) != 0
    assert not Path(spec.manifest()).exists()
    assert attempts(spec) == ["stopped"]
    assert not Path("results/.head.json").exists()
    Path("hold").unlink()
    code, output = project.run(*command)
    assert code == 0, output
    assert attempts(spec) == ["stopped", "published"]


def test_a_run_that_somebody_stopped_starts_nothing_and_says_how_to_go_on(project):
    stop = Path("results/quick/good/stop")
    stop.parent.mkdir(parents=True)
    stop.touch()
    code, output = project.run("--config", "campaign=quick")
    assert code != 0
    assert f"run good: stopped by {stop}; to go on, rm {stop} and run the same command" in output
    assert not list(Path("results/store").rglob("attempts.jsonl"))


def test_edits_while_jobs_run_change_none_of_them(project):
    spec = spec_of(project, "sft")
    head = project.start(spec.manifest(), "--config", "campaign=quick")
    convert = spec_of(project, "convert")
    wait_for(Path(convert.folder, "attempts.jsonl"), head)
    campaign = Path("configs/campaign/quick.yaml")
    campaign.write_text(campaign.read_text().replace("sft.steps=2", "sft.steps=3"))
    Path("workflow/stages/sft.py").write_text("raise SystemExit('edited')\n")
    assert head.wait(timeout=120) == 0, Path("head.txt").read_text()
    manifest = read_manifest(Path(spec.manifest()))
    assert manifest.config["sft"]["steps"] == manifest.steps_done == 2
    plan = next(Path("results/quick").glob("plan-*.json"))
    code, output = project.run("--dry-run", "--config", f"plan={plan}")
    assert code != 0
    assert "made by another version of the code" in output


def test_one_failed_run_leaves_the_others_and_is_reported(project):
    Path("broken.py").write_text("raise LookupError('absent today')\ndef score(response, problem): ...\n")
    campaign = Path("configs/campaign/quick.yaml")
    bad = "  bad: [reward.kind=function, 'reward.function=broken:score']\n"
    campaign.write_text(campaign.read_text() + bad)
    code, output = project.run("--config", "campaign=quick")
    assert code != 0
    summary = json.loads(Path("results/quick/summary.json").read_text())
    runs = {run["run"]: run for run in summary["runs"]}
    assert runs["good"]["accuracy_final"] is not None
    assert runs["bad"]["accuracy_final"] is None
    failure = runs["bad"]["failure"]
    recorded = json.loads(Path(failure["log"]).with_name("failure.json").read_text())
    assert "absent today" in recorded["message"]
    assert failure["class"] == recorded["class"]
    report = Path("results/quick/report.html").read_text()
    for shown in (failure["class"], failure["log"]):
        assert shown in report
    assert "report: results/quick/report.html" in output


def test_a_campaign_folder_shows_the_plan_that_was_asked_for_last(project):
    for seed in (0, 1):
        fake_campaign(project.folder, campaign="drill", seed=seed)
    for seed in (0, 1, 0):
        code, output = project.run(
            "results/drill/grpo/run.json", "--config", "campaign=drill", f"seed={seed}"
        )
        assert code == 0, output
        assert json.loads(Path("results/drill/grpo/run.json").read_text())["seed"] == seed


def test_a_finished_campaign_is_shown_and_snakemake_reports_it(project):
    fake_campaign(project.folder, campaign="drill")
    shutil.rmtree("results/drill")
    code, output = project.run("--config", "campaign=drill")
    assert code == 0, output
    assert "report: results/drill/report.html" in output
    run = json.loads(Path("results/drill/grpo/run.json").read_text())
    assert all(Path("results/drill/grpo", stage["manifest"]).exists() for stage in run["stages"])
    links = sorted(path.name for path in Path("results/drill/grpo").iterdir() if path.is_symlink())
    evaluations = ["evaluate-sft", "evaluate-step000002", "evaluate-step000004", "evaluate-step000006"]
    assert links == ["convert", *evaluations, "export", "sft", "train"]
    code, output = project.run("--config", "campaign=drill", "--report", "snakemake-report.html")
    assert code == 0, output
    assert Path("snakemake-report.html").stat().st_size > 100_000
    for word in ("controls=false", "recut=true"):  # new cuts of what is all published are the old ones
        code, output = project.run("--config", "campaign=drill", word)
        assert "Nothing to be done" in output
    noted = json.loads(Path("results/drill/cuts.json").read_text())
    assert {tuple(note["cuts"]) for note in noted.values()} == {(2, 4, 6)}
