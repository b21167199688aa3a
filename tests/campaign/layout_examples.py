"""The examples of baton preflight in docs/layouts.md, with what they print: ``python -m tests.campaign.layout_examples`` writes them anew."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from workflow.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
EXAMPLE = re.compile(r"```console\n\$ (baton preflight .*?[^\\])\n.*?```", re.DOTALL)


def with_output(page: str) -> str:
    """The page, each example followed by what it prints now."""
    return EXAMPLE.sub(lambda found: f"```console\n$ {found[1]}\n{output(found[1])}```", page)


def output(command: str) -> str:
    """What a command prints."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    return CliRunner().invoke(app, words).output


if __name__ == "__main__":
    PAGE.write_text(with_output(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
