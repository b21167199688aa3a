"""The documentation's shell examples that are marked to run do run, word for word, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from snakemake.cli import parse_config

from workflow.campaign.head import read_options
from workflow.campaign.overrides import read_overrides, split_words
from workflow.campaign.schema import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"<!-- runs in CI -->\n```(?:bash|console)\n(.*?)```", re.DOTALL)
EXAMPLES = [
    (page.name, block) for page in PAGES for block in MARKED.findall(page.read_text(encoding="utf-8"))
]
NEEDED = ("Snakefile", "workflow", "engines", "configs", "profiles", "env", "docs", "pyproject.toml")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without its results and environments."""
    folder = tmp_path_factory.mktemp("repository")
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.mark.parametrize(
    ("page", "block"), EXAMPLES, ids=[f"{page}-{i}" for i, (page, _) in enumerate(EXAMPLES)]
)
def test_marked_examples_run(copy: Path, page: str, block: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{page}:\n{block}\n{done.stdout}\n{done.stderr}"


def test_there_are_marked_examples() -> None:
    assert {"README.md", "getting-started.md"} <= {page for page, _ in EXAMPLES}


SETTINGS = [
    (page.name, words)
    for page in PAGES
    for words in re.findall(r"set='([^'\n.][^'\n]*)'", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "words"), SETTINGS)
def test_settings_can_be_given_as_they_stand(page: str, words: str) -> None:
    """Through Snakemake's own reading of set='...'; what a key can be is refused when a campaign is composed."""
    options = read_options(parse_config([f"set={words}"]))
    overrides = read_overrides(split_words(options.set), ROOT / "configs")
    assert all(key.partition(".")[0] in RunConfig.model_fields for key, _ in overrides.values)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
