"""Drills: the campaign that is left alone and the one under faults, on this machine; and that a drill can fail."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from tests.support.jobs import ROOT
from tests.support.processes import fork
from workflow.drill.campaign import Campaign, DrillError, until
from workflow.drill.checks import problems
from workflow.drill.faults import CorruptState, Fault, Hit, Signal, damage, driver_processes
from workflow.drill.keeper import mounts_in
from workflow.drill.processes import Driver, Process, process_of, working_in
from workflow.drill.report import reported
from workflow.drill.run import Drill, Record, Strike
from workflow.drill.watch import SAVE, Moment
from workflow.rl.metrics import METRICS_FILE, read_metrics

SMALL = {
    "name": "small",
    "segments": 1,  # left alone, it never loads a state
    "common": [
        *("model=micro-qwen3", "data.train_size=16", "data.heldout_size=8", "evaluate.problems=8"),
        *("sft.steps=2", "sft.batch_size=4", "sft.demonstrations=16", "rollout.max_new_tokens=8"),
        *(
            "algorithm=grpo",
            "algorithm.steps=6",
            "algorithm.prompts_per_step=4",
            "algorithm.samples_per_prompt=2",
        ),
        *("algorithm.mini_batch_size=8", "algorithm.lr=1e-3", "algorithm.entropy_coefficient=0.01"),
        "checkpoint.save_every=1",
    ],
    "runs": {"grpo": []},
}


@dataclass
class SmallCampaign(Campaign):
    """Without a workflow engine, and with a defect if one is named."""

    defect: str = "none"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.drills.head", *self.words, self.defect]


@dataclass
class Short(Campaign):
    """Without a plan; completes at once where it is left alone, and runs something else in every other folder."""

    otherwise: tuple[str, ...] = ("false",)

    def command(self) -> list[str]:
        return ["true"] if self.folder.name == "reference" else list(self.otherwise)

    def room(self) -> int:
        return 0


def test_a_command_that_is_refused_for_ever_is_a_difference(tmp_path):
    record = Drill([], 5, 0, tmp_path / "drill", make=partial(Short, disk=False)).run()
    assert not record.passed
    (round,) = record.rounds
    assert round.starts <= 8
    assert "the command fails though no fault comes in between" in round.problems[0]


def test_a_drill_in_the_folder_of_the_script_that_started_it_is_refused(tmp_path):
    """As in a batch job, without a terminal: in the end it would kill that script, and itself before its report."""
    script = f"{sys.executable} -m workflow.cli drill nothing --output .; echo the script goes on after $?"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert f"refused: {tmp_path}: process" in done.stdout, done.stdout + done.stderr
    assert "start it from another folder, or name another --output" in done.stdout
    assert "the script goes on after 2" in done.stdout
    assert not list(tmp_path.iterdir())


WRITER = "echo $BASHPID > writer.pid; while true; do mkdir -p more; echo > more/line; rm -r more; done"


def test_what_is_left_of_a_campaign_is_ended_before_its_disk_is_gone(tmp_path, monkeypatch):
    """It goes on writing while the disk is copied, and could not be found any more by the folder that it works in."""
    leaves = ("bash", "-c", f"setsid bash -c '{WRITER}' & until test -s writer.pid; do sleep 0.1; done")
    monkeypatch.setattr("workflow.drill.run.problems", lambda campaign, reference: ["a process is left"])
    record = Drill([], 1, 0, tmp_path / "drill", make=partial(Short, otherwise=leaves)).run()
    assert [one.problems for one in record.rounds] == [["a process is left"]]
    left = process_of(int((tmp_path / "drill/disturbed1/writer.pid").read_text()))
    if left is not None:
        os.kill(left.pid, signal.SIGKILL)
    assert left is None


@dataclass
class Unstartable(Short):
    """Something that nobody has thought of."""

    def start(self) -> None:
        if self.folder.name != "reference":
            raise ProcessLookupError(errno.ESRCH, "No such process")
        super().start()


def test_what_ends_a_drill_before_its_time_stands_in_its_report(tmp_path):
    with pytest.raises(ProcessLookupError):
        reported(Drill([], 1, 0, tmp_path / "drill", make=Unstartable))
    page = (tmp_path / "drill/drill.md").read_text()
    assert page.startswith("# Drill: ended before its time")
    assert "**ended by**: ProcessLookupError(3, 'No such process')" in page
    assert not json.loads((tmp_path / "drill/drill.json").read_text())["passed"]
    assert not mounts_in(tmp_path)


def sleeping_drill(folder: Path) -> None:
    reported(Drill([], 1, 0, folder, make=partial(Short, otherwise=("sleep", "600"))))


def test_a_drill_that_a_batch_system_ends_writes_its_report(tmp_path):
    drill = fork(sleeping_drill, tmp_path / "drill")
    assert until(lambda: any(p.program == "sleep" for p in working_in(tmp_path)), 60)
    os.kill(drill.pid, signal.SIGTERM)
    drill.join(60)
    assert drill.exitcode == 128 + signal.SIGTERM
    assert "**ended by**: SystemExit(143)" in (tmp_path / "drill/drill.md").read_text()
    assert not working_in(tmp_path)
    assert not mounts_in(tmp_path)


def test_a_drill_that_has_not_begun_writes_no_report(tmp_path):
    (tmp_path / "drill.md").write_text("of another drill")
    with pytest.raises(DrillError, match="not empty"):
        reported(Drill([], 1, 0, tmp_path))
    assert (tmp_path / "drill.md").read_text() == "of another drill"


def test_a_victim_that_is_gone_already_is_not_hit(tmp_path, monkeypatch):
    gone = subprocess.Popen(["true"])
    process = process_of(gone.pid) or Process(gone.pid, "earlier", "true")
    gone.wait()
    store = Mock(**{"return_value.newest.return_value": tmp_path / "step000001"})
    monkeypatch.setattr("workflow.drill.faults.StateStore", store)
    driver = Driver(process, tmp_path / "train/a-run")
    monkeypatch.setattr("workflow.drill.faults._meant", lambda campaign, folder: [driver])
    assert CorruptState("corrupted").strike(Campaign(tmp_path, []), random.Random(0), None) is None


def small_drill(folder: Path, defect: str) -> Record:
    """A drill that asks the training to stop while it saves, so that another process goes on."""
    campaign = folder / "small.yaml"
    campaign.write_text(yaml.safe_dump(SMALL))
    stop = Signal("SIGTERM to the driver", signal.SIGTERM, driver_processes)
    return Drill(
        words=[str(campaign)],
        kills=1,
        seed=0,
        output=folder / "drill",
        faults=lambda how: [stop],
        make=partial(SmallCampaign, defect=defect),
        phases=[SAVE],
        aimed=1,
        share_in_time=0,
    ).run()


def test_what_goes_on_as_it_should_passes(tmp_path):
    record = small_drill(tmp_path, "none")
    assert (record.passed, len(record.hits)) == (True, 1), record
    assert len(record.phases["save"]) == 6
    assert not (tmp_path / "drill" / "disturbed1").exists()


@pytest.mark.parametrize(
    ("defect", "told"),
    [
        ("optimizer_is_not_restored", "train micro-qwen3-sorting-grpo step 6: optimizer different"),
        ("data_begin_anew", "train micro-qwen3-sorting-grpo step 6: samples different"),
    ],
)
def test_a_planted_defect_is_found(tmp_path, defect, told):
    record = small_drill(tmp_path, defect)
    assert not record.passed
    found = record.rounds[-1].problems
    assert any(problem.startswith(told) for problem in found), found
    assert (tmp_path / "drill" / "disturbed1").exists()  # to be looked at


def test_a_step_that_was_cut_while_its_filter_asked_for_more_is_done_again_in_full(tmp_path):
    """Dynamic sampling: prompts drawn, answered and left out in an unfinished step leave no trace."""
    filtering = ["algorithm.filter.by=reward", "reward.overlong.buffer=8"]
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"common": [*SMALL["common"], *filtering]}))
    reference = SmallCampaign(tmp_path / "reference", [str(path)])
    killed = SmallCampaign(tmp_path / "killed", [str(path)], defect="killed_in_a_refill")
    for campaign, codes in ((reference, [0]), (killed, [1, 1, 0])):
        campaign.folder.mkdir()
        for code in codes:
            campaign.start()
            assert campaign.wait() == code, campaign.output.read_text()
    assert len(list(killed.folder.glob("killed-in-step*"))) == 2
    (train,) = killed.folder.glob("results/store/train/*")
    rounds = [line["filter_rounds"] for line in read_metrics(train / METRICS_FILE)]
    assert len(rounds) == 6
    assert rounds[1] > 1
    assert rounds[4] > 1
    assert problems(killed, reference) == []


def test_a_phase_is_looked_at_before_it_is_hit_and_what_came_meanwhile_is_no_news(tmp_path):
    done = []

    class Watching:
        def going_on(self, phase: str, folder: Path) -> bool:
            done.append("looked")
            return "struck" not in done  # whose phase it was is dead then

        def drain(self) -> None:
            done.append("drained")

    class Once(Fault):
        def strike(self, *place: object) -> Hit:
            done.append("struck")
            return Hit("it", lambda: (done.append("waited") is None, "hit"))

    drill = Drill([], 1, 0, tmp_path, tell=done.append)
    drill.record, drill.draw = Record([], 1, 0, 0), random.Random(0)
    strike = Strike(1, "", 0.0, SAVE)
    drill._strike(Campaign(tmp_path, []), Watching(), [Once("once")], strike, Moment(SAVE, tmp_path, 0.0))
    assert done[:4] == ["looked", "struck", "waited", "drained"]
    assert [hit.during for hit in drill.record.hits] == [SAVE]


@pytest.mark.drill
def test_twelve_faults_change_nothing(tmp_path):
    """The command, on the workflow as people start it."""
    words = ("drill", "faults", "--kills", "12", "--seed", "0", "--set", "site=local", "--output", "drill")
    done = subprocess.run(
        [sys.executable, "-m", "workflow.cli", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "drill" / "drill.json").read_text())
    counted = [strike for strike in found["strikes"] if strike["counted"]]
    assert found["passed"]
    assert len(counted) >= 12
    assert sum(strike["during"] is not None for strike in counted) >= 3
    assert len({strike["kind"] for strike in counted}) >= 6, Counter(strike["kind"] for strike in counted)
    page = (tmp_path / "drill" / "drill.md").read_text()
    assert page.startswith("# Drill: nothing differs")
    assert page.count("\n| ") > 12
    assert not working_in(tmp_path)


def test_damage_is_damage(tmp_path):
    file, draw = tmp_path / "state.json", random.Random(0)
    told = set()
    for _ in range(20):
        file.write_bytes(bytes(range(100)))
        told.add(damage(file, draw).split()[0])
        assert file.read_bytes() != bytes(range(100))
    assert told == {"bit", "cut"}
