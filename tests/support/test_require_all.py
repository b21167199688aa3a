"""Continuous integration sees a missing tool: whatever way a test is skipped, it fails there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = {
    "test_by_mark.py": "import pytest\n@pytest.mark.skipif(True, reason='no tool')\ndef test_it(): pass\n",
    "test_in_the_middle.py": "import pytest\ndef test_it(): pytest.skip('no tool')\n",
    "test_in_a_fixture.py": "import pytest\n@pytest.fixture\ndef tool(): pytest.skip('no tool')\ndef test_it(tool): pass\n",
    "test_whole_module.py": "import pytest\npytest.importorskip('no_tool')\ndef test_it(): pass\n",
}


@pytest.mark.parametrize("name", SKIPPED)
def test_a_skip_is_a_failure_where_all_is_required(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SKIPPED[name])
    (tmp_path / "test_passes.py").write_text("def test_it(): pass\n")
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", ".", "."]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("BATON", "PYTEST"))}
    free, required = (
        subprocess.run(command, cwd=tmp_path, env=environment | more, capture_output=True, text=True)
        for more in ({}, {"BATON_REQUIRE_ALL": "1"})
    )
    assert (free.returncode, required.returncode != 0) == (0, True), required.stdout
    assert "BATON_REQUIRE_ALL" in required.stdout
    assert name in required.stdout
