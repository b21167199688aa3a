"""pytest imports test files by their names alone: of two with one name it could run only the first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_test_files_have_one_name():
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
