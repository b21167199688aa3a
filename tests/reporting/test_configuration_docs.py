"""docs/configuration.md is what the typed configuration says."""

from pathlib import Path

from workflow.campaign.schema import RunConfig
from workflow.reporting import configuration_docs

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert configuration_docs.main(["--check"]) == 0


def test_old_page_is_noticed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert configuration_docs.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert configuration_docs.main([]) == 0
    assert configuration_docs.main(["--check"]) == 0
    page = tmp_path / "docs" / "configuration.md"
    page.write_text(page.read_text().replace("`1e-08`", "`1e-07`"))
    assert configuration_docs.main(["--check"]) == 1


def test_every_key_of_a_run_is_described() -> None:
    page = configuration_docs.render()
    for key in (
        "algorithm.kl.estimator",
        "data.tasks.options",
        "engine.layout.shard_size",
        "site.devices.devices_per_node",
    ):
        assert f"| `{key}` |" in page
    assert all(f"| `{name}` |" in page for name in RunConfig.model_fields)
    assert "| `algorithm.clip_low` | number, > 0, < 1 | `0.2` | Lower clip" in page
