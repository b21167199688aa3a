"""report: the summary's schema, and the page as a real browser sees it. The campaign is made up, its plan and manifests are real."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_campaign import fake_campaign
from workflow.reporting.charts import moving_mean, nice_ticks
from workflow.stages.report import main

KEYS = {
    "run", "algorithm", "seed", "model_type", "backend", "device", "world_size", "accuracy_sft", "accuracy_final",
    "accuracy_final_ci95", "steps_planned", "steps_done", "export", "manifest",
}  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def report(folder: Path, *arguments: str, **campaign: object) -> tuple[int, Path]:
    """Make a campaign up in ``folder`` and report on it; the exit code and the results folder."""
    plan = fake_campaign(folder, **campaign)
    return main(["--plan", str(plan.relative_to(folder)), *arguments]), plan.parent


def browse(page: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    """Open ``page`` in a headless browser and return its DOM (stdout) and log (stderr)."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert browser, f"the report is tested in a browser; install one of {', '.join(BROWSERS)}"
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",        "--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_summary_has_exactly_the_promised_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, results = report(tmp_path)
    runs = json.loads((results / "summary.json").read_text())["runs"]
    assert code == 0
    assert [run["run"] for run in runs] == ["ppo", "grpo"]
    assert all(set(run) == KEYS for run in runs)
    grpo = runs[1]
    assert grpo["algorithm"] == "grpo"
    assert (grpo["model_type"], grpo["backend"], grpo["device"]) == ("language_model", "fsdp2", "cpu")
    assert grpo["steps_done"] == grpo["steps_planned"] > 0
    assert grpo["accuracy_sft"] == pytest.approx(0.664)
    assert grpo["accuracy_final_ci95"][0] < grpo["accuracy_final"] < grpo["accuracy_final_ci95"][1]
    assert json.loads(Path(grpo["manifest"]).read_text())["step"] == grpo["steps_done"]
    assert not Path(grpo["export"]).is_absolute()


def test_incomplete_campaign_needs_partial(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, results = report(tmp_path, failing=("ppo",))
    assert code == 1
    assert "ppo (train, step" in capsys.readouterr().err
    assert not (results / "summary.json").exists()
    code, results = report(tmp_path, "--partial", failing=("ppo",))
    assert code == 0
    ppo, grpo = json.loads((results / "summary.json").read_text())["runs"]
    assert set(ppo) == KEYS | {"failure"}
    assert ppo["failure"]["class"] == "RewardError"
    assert "returned nan" in ppo["failure"]["message"]
    assert ppo["failure"]["log"].endswith(".txt")
    assert ppo["accuracy_final"] is ppo["accuracy_final_ci95"] is ppo["export"] is None
    assert 0 < ppo["steps_done"] < ppo["steps_planned"]
    assert "failure" not in grpo
    assert "&lt;b&gt;3 &amp; 4&lt;/b&gt;" in (results / "report.html").read_text()


def test_a_run_that_never_started_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = fake_campaign(tmp_path)
    shutil.rmtree(tmp_path / "results" / "store")
    assert main(["--plan", str(plan.relative_to(tmp_path)), "--partial"]) == 0
    run = json.loads((plan.parent / "summary.json").read_text())["runs"][0]
    assert run["failure"]["class"] == "NotFinished"
    assert run["failure"]["stage"] == "convert"


def test_a_run_that_diverged_is_shown(tmp_path: Path, monkeypatch) -> None:
    """Steps whose numbers are not finite are gaps, whether the file has null or what Python writes."""
    monkeypatch.chdir(tmp_path)
    plan = fake_campaign(tmp_path)
    for path in Path("results/store").glob("*/*/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line, value in zip(lines, [math.nan, math.inf, -math.inf, None], strict=False):
            line |= dict.fromkeys(line.keys() - {"step"}, value)
        for line in lines:
            line |= {name: math.nan for name in line if name in ("nll", "actor/grad_norm")}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--plan", str(plan)]) == 0
    page = (plan.parent / "report.html").read_text()
    assert not re.findall(r"[\s,\"](nan|-?inf)[\s,\"]", page)
    assert "Gradient norm" not in page
    assert "Entropy" in page


def test_altered_plan_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    plan = fake_campaign(tmp_path)
    plan.write_text(plan.read_text().replace('"fsdp2"', '"fsdp"'))
    assert main(["--plan", str(plan)]) == 64
    assert "altered" in capsys.readouterr().err


def test_needs_no_framework(tmp_path: Path) -> None:
    plan = fake_campaign(tmp_path)
    code = (
        "import sys; from workflow.stages.report import main; code = main(sys.argv[1:]); "
        "loaded = sorted({'torch', 'transformers', 'ray', 'tensordict'} & set(sys.modules)); sys.exit(code or loaded or 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, "--plan", str(plan.relative_to(tmp_path))],
        cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "accuracy 66.4 % ->" in done.stdout


def test_page_in_a_browser(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, results = report(tmp_path, controls=True)
    seen = browse(results / "report.html", tmp_path / "profile")
    assert not re.findall(r"CONSOLE.*", seen.stderr), seen.stderr
    dom = re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", " ", seen.stdout, flags=re.DOTALL))
    text = re.sub(r"\s+", " ", dom)
    for run in json.loads((results / "summary.json").read_text())["runs"]:
        assert run["run"] in text
        assert f"{100 * run['accuracy_final']:.1f} %" in text
        assert (
            f"{100 * run['accuracy_final_ci95'][0]:.1f} % to {100 * run['accuracy_final_ci95'][1]:.1f} %"
            in text
        )
    for heading in ("Held-out accuracy", "Reward", "Entropy", "Throughput", "Supervised loss", "Provenance"):
        assert heading in text
    assert seen.stdout.count('class="boundary"') >= 3
    assert seen.stdout.count('class="card control"') == 2
    assert seen.stdout.count("<svg") > 12


def test_the_browser_would_report_errors_and_requests(tmp_path: Path, monkeypatch) -> None:
    """The page's own policy forbids every request, so one that is tried is an error on the console."""
    monkeypatch.chdir(tmp_path)
    _, results = report(tmp_path)
    page = (results / "report.html").read_text()
    planted = '<img src="http://127.0.0.1:9/x.png"><script>undefined_function()</script></body>'
    (tmp_path / "planted.html").write_text(page.replace("</body>", planted))
    log = browse(tmp_path / "planted.html", tmp_path / "profile").stderr
    assert re.search(r"CONSOLE.*http://127.0.0.1:9/x.png.*Content Security Policy", log)
    assert re.search(r"CONSOLE.*undefined_function is not defined", log)


def test_ticks_are_round_and_cover_the_data() -> None:
    assert nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert nice_ticks(0, 60, 6) == [0, 10, 20, 30, 40, 50, 60]
    for low, high in ((0.637, 0.962), (3, 3), (-0.2, 11000), (1e-5, 3e-5)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high
        assert 2 <= len(ticks) <= 8
    assert moving_mean([(1, 0), (2, 3), (3, 6)], 3) == [(1, 1.5), (2, 3), (3, 4.5)]
