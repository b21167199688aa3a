"""A copy of the project in an empty folder, and ways to run its workflow and its stages there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from workflow.campaign.code import source_root

ROOT = source_root()
PARTS = ("engines", "workflow", "configs", "env", "profiles", "snakemake_executor_plugin_baton")

# Convert, supervised steps and evaluations only: a chain of a few seconds.
QUICK = """\
name: quick
segments: 1
common:
  - model=micro-qwen3
  - data.train_size=32
  - data.heldout_size=8
  - sft.steps=2
  - sft.batch_size=4
  - sft.demonstrations=16
  - rollout.max_new_tokens=4
  - evaluate.problems=8
  - algorithm=sft
  - algorithm.steps=1
runs:
  good: []
"""


@dataclass
class Project:
    """The copy."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Everything is imported from the copy."""
        return os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen:
        """A workflow head, running; its output is in ``head.txt``."""
        command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local", *arguments]
        with (self.folder / "head.txt").open("w") as out:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *arguments: str) -> tuple[int, str]:
        """A workflow head from start to end: exit code and output."""
        code = self.start(*arguments).wait(timeout=300)
        return code, (self.folder / "head.txt").read_text()

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A Python process in the copy."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A fresh copy, and the current folder."""
    monkeypatch.chdir(tmp_path)
    return copy_project(tmp_path)


def copy_project(folder: Path) -> Project:
    """A copy in an empty folder."""
    for part in PARTS:
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", folder)
    (folder / "configs" / "campaign" / "quick.yaml").write_text(QUICK)
    return Project(folder)
