"""The rules of the launcher that need no cluster: progress over starts, and a rule's command taken apart."""

from __future__ import annotations

import json

import pytest

from engines.config import ConfigError
from workflow.cluster.launcher import unprogressed
from workflow.cluster.stage_job import StageCommand


def record(path, *starts):
    """Starts of the segment that ends at step 20: (job, restart, first step, last step, end)."""
    lines = []
    for number, (job, restart, first, last, end) in enumerate(starts, 1):
        lines.append({"segment": 20, "number": number, "job": job, "restart": restart})
        steps = {"first_step": first, "last_step": last}
        lines.append({"segment": 20, "number": number, "end": end} | (steps if end != "killed" else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')


@pytest.mark.parametrize(
    ("starts", "restart", "count"),
    [
        ([("7", 0, 1, 4, "stopped")], 0, 0),
        ([("7", 0, None, None, "stopped")], 0, 0),
        ([("7", 0, None, None, "stopped"), ("7", 1, None, None, "stopped")], 1, 2),
        ([("7", 0, 1, 4, "stopped"), ("7", 1, None, None, "stopped"), ("7", 2, None, None, "stopped")], 2, 2),
        ([("7", 0, None, None, "stopped"), ("7", 1, 1, 2, "stopped")], 1, 0),
        ([("6", 0, None, None, "stopped"), ("7", 0, None, None, "stopped")], 0, 0),
        ([("7", 0, None, None, "killed"), ("7", 1, 5, 6, "stopped"), ("7", 2, None, None, "stopped")], 2, 0),
        ([("7", 0, 1, 2, "stopped")], 2, 2),
        ([("6", 0, 1, 20, "withdrawn"), ("7", 0, 1, 8, "stopped"), ("7", 1, 9, 16, "stopped")], 1, 0),
    ],
    ids=[
        "progress",
        "once",
        "twice",
        "after",
        "then",
        "another job",
        "killed",
        "before the stage began",
        "anew",
    ],
)
def test_two_starts_of_a_job_without_a_new_step_are_enough(tmp_path, starts, restart, count):
    path = tmp_path / "attempts.jsonl"
    record(path, *starts)
    assert unprogressed(path, 20, "7", restart) == count


def test_a_rules_command_is_taken_apart():
    command = StageCommand.read(
        "PYTHONSAFEPATH=1 PYTHONPATH='a b':. /usr/bin/python -m workflow.stages train --plan p.json --id x --step 000020"
    )
    assert command.variables == {"PYTHONSAFEPATH": "1", "PYTHONPATH": "a b:."}
    assert command.arguments[:3] == ["-m", "workflow.stages", "train"]
    assert command.arguments[-1] == "000020"


@pytest.mark.parametrize("shell", ["echo done", "", "python -m workflow.stages.report --plan p.json"])
def test_other_commands_are_refused(shell):
    with pytest.raises(ConfigError, match="localrule"):
        StageCommand.read(shell)
