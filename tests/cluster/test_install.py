"""Snakemake finds the executor of a fresh installation, regular or editable, from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("engines", "workflow", "snakemake_executor_plugin_baton")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.mark.parametrize("how", [[], ["--editable"]], ids=["regular", "editable"])
def test_snakemake_finds_the_executor(tmp_path, how):
    source = tmp_path / "source"
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv/bin/python")
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")  # all but the project itself

    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run([*install, *how, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # -P: as the command snakemake, which does not look for modules in the current folder
    command = [python, "-P", "-m", "snakemake", "--help"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=True
    ).stdout
    assert "--executor {baton,local,dryrun,touch}" in shown
