"""Entering an environment, for real: variables win, signals arrive, and what is not there is a refusal."""

from __future__ import annotations

import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from engines.config import ConfigError
from workflow.campaign.site import StageEnvironment
from workflow.cluster.environment import REFUSED, enter
from workflow.stages import runner

WAITING = """
import os, signal, sys
signal.signal(signal.SIGUSR2, lambda *_: (print("warned", os.environ["OMP_NUM_THREADS"], sys.prefix), sys.exit(75)))
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environments")
    venv.create(path / "with blank", symlinks=True)
    return path


def test_the_shell_becomes_the_stage_and_the_warning_reaches_it(folder):
    environment = StageEnvironment(
        kind="venv", path=str(folder / "with blank"), setup=["export OMP_NUM_THREADS=7"]
    )
    script = enter(environment, ["-c", WAITING], folder=str(folder), variables={"OMP_NUM_THREADS": "1"})
    process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGUSR2)
    said, _ = process.communicate(timeout=20)
    assert said.split(maxsplit=2) == ["warned", "1", f"{folder / 'with blank'}\n"]
    assert process.returncode == 75


def test_without_an_environment_it_is_the_interpreter_of_the_launcher(folder):
    script = enter(StageEnvironment(), ["-c", "import sys; print(sys.executable)"], folder=str(folder))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == sys.executable


def test_what_cannot_be_entered_is_refused_and_not_retried(folder):
    script = enter(StageEnvironment(kind="venv", path="$HOME/no/such/venv"), ["-V"], folder=str(folder))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == REFUSED == runner.REFUSED
    assert "cannot be entered: venv" in done.stderr


def test_a_path_expands_variables_and_runs_nothing(folder):
    environment = StageEnvironment(kind="venv", path='$HOME/$(touch ran)/`touch ran`/"')
    subprocess.run(["bash", "-c", enter(environment, ["-V"], folder=str(folder))], capture_output=True)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(("kind", "name"), [("venv", "path"), ("apptainer", "image"), ("pyxis", "image")])
def test_an_unknown_environment_is_refused(kind, name):
    environment = StageEnvironment(kind=kind, **{name: "unknown"})
    with pytest.raises(ConfigError, match=rf"site\.devices\.npu\.environment\.{name} is unknown"):
        enter(environment, ["-V"], folder="/shared", key="site.devices.npu.environment")
