"""Two heads never work in one results folder for long: who lost the lock goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from workflow.campaign.head import GAVE_WAY
from workflow.campaign.lock import process_start

ROOT = Path(__file__).parents[2]
HEAD = """
import time
from workflow.campaign import lock
from workflow.campaign.head import open_campaign

lock.HEARTBEAT_SECONDS = 0.05
head = open_campaign({"campaign": "drill", "site": "local"})
head.start(lambda job: None)
print("started", flush=True)
time.sleep(60)
"""


def test_a_head_that_another_took_for_dead_ends_and_says_so(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    path = tmp_path / "results/.head.json"
    holder = json.loads(path.read_text()) | {"pid": os.getpid(), "started": process_start(os.getpid())}
    path.write_text(json.dumps(holder))
    _, said = process.communicate(timeout=30)
    assert process.returncode == GAVE_WAY
    assert "another head has taken over" in said
    assert json.loads(path.read_text()) == holder
