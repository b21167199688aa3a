"""The status table from manifests and the registry; what SLURM adds is seen on the test cluster."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_campaign import fake_campaign
from workflow.campaign.plan import read_plan
from workflow.cluster.jobs import JobFolder, StartRecord, write_start
from workflow.cluster.status import campaign_status
from workflow.manifest import read_manifest


def make_files(folder: Path) -> None:
    """The published files of all manifests, in their sizes."""
    for path in folder.rglob("manifest.json"):
        for name, record in read_manifest(path).files.items():
            file = path.parent / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as new:
                new.truncate(record.bytes)


def test_every_stage_and_segment_has_a_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = read_plan(fake_campaign(tmp_path, failing=["grpo"]))
    make_files(tmp_path)
    failed = next(spec for spec in plan.stages.values() if "-grpo" in spec.slug and spec.stage == "train")
    folder = JobFolder(Path("results"), "train", failed.id, failed.cuts[2])
    log = Path(failed.folder) / "job.txt"
    log.write_text("━━━━━━━━━━━━━─────── 2/3 train x  reward 0.1  3 s left\n")
    record = folder.intend("baton:train:x", str(log), None)
    folder.write(record, job="7", failure="TIMEOUT")
    write_start(folder.path, StartRecord(job="7", restart=2, node="cuda1", at=0.0))

    rows = campaign_status(plan, Path("results"))
    assert len(rows) == sum(len(spec.cuts or [None]) for spec in plan.stages.values())
    shared = next(row for row in rows if row.stage == "sft")
    assert (shared.runs, shared.state, shared.failure) == ("ppo, grpo", "published", "")
    by_step = {row.step: row for row in rows if row.name == failed.name}
    own, lost = by_step[str(failed.cuts[1])], by_step[str(failed.cuts[2])]
    assert own.failure not in ("", "TIMEOUT")  # the exception that the stage itself recorded
    assert (lost.job, lost.node, lost.progress, lost.restarts) == ("7", "cuda1", "2/3", "2")
    assert lost.failure == "TIMEOUT"
    assert lost.state != "published"
