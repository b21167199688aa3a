"""``baton doctor`` on a real cluster: a site file that is right, one that is wrong, one that is still open."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from workflow.campaign.site import load_site
from workflow.cli import app
from workflow.cluster.doctor import examine

pytestmark = pytest.mark.slurm
CONFIGS = Path(__file__).parents[2] / "configs"
BROKEN = {
    "name": "broken",
    "scheduler": "slurm",
    "cluster_names": ["other"],
    "devices": {
        "cpu": {"partition": "cdua", "cpus_per_node": 8, "walltime": "1:00:00"},
        "cuda": {
            "partition": "cuda",
            "account": "nobody",
            "gres": "gpu:a100:{devices}",
            "cpus_per_node": 64,
            "memory_per_node_gb": 512,
            "walltime": "7-00:00:00",
            "twin": {"partition": "cuda-preempt"},
        },
        "npu": {
            "stand_in": True,
            "partition": "ascend",
            "gres": "npu:{devices}",
            "devices_per_node": 4,
            "cpus_per_node": 8,
            "walltime": "1:00:00",
        },
    },
}
INSIDE = {
    "partition": "ascend",
    "cpus_per_node": 8,
    "walltime": "1:00:00",
    "internet": False,
    "interface": "nowhere0",
    "scratch": "/nowhere/$USER",
    "environment": {"kind": "venv", "path": "/nowhere/venv"},
}


def verdicts(values: dict, folder: Path, look_inside: bool) -> dict[str, str]:
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(values))
    findings = examine(load_site(str(path), CONFIGS), folder, look_inside)
    return {finding.subject: finding.verdict for finding in findings if finding.verdict != "good"}


def test_the_clusters_own_site_file_is_right(in_cluster, tmp_path):
    findings = list(examine(load_site("mini", CONFIGS), tmp_path))
    assert [str(finding) for finding in findings if finding.verdict != "good"] == []
    for device in ("cpu", "cuda", "npu"):
        subjects = {
            finding.subject for finding in findings if finding.subject.startswith(f"site.devices.{device}")
        }
        assert {f"site.devices.{device}.environment", f"site.devices.{device}: {tmp_path}"} <= subjects


def test_every_wrong_value_is_found(in_cluster, tmp_path):
    assert set(verdicts(BROKEN, tmp_path, look_inside=False)) == {
        "site.cluster_names",
        "site.devices.cpu.partition",
        "site.devices.cpu: 1 rank",
        "site.devices.cuda.account",
        "site.devices.cuda.gres",
        "site.devices.cuda.cpus_per_node",
        "site.devices.cuda.memory_per_node_gb",
        "site.devices.cuda.walltime",
        "site.devices.cuda.twin.partition",
        "site.devices.cuda: 1 rank",
        "site.devices.npu.devices_per_node",
        "site.devices.npu: 4 ranks",
    }


def test_what_only_a_node_knows_is_found(in_cluster, tmp_path):
    site = {
        "name": "x",
        "scheduler": "slurm",
        "cluster_names": ["mini"],
        "launcher": {"aarch64": "/x", "x86_64": "/x"},
    }
    architecture = platform.machine()
    assert verdicts(site | {"devices": {"cpu": INSIDE}}, tmp_path, look_inside=True) == {
        f"site.launcher.{architecture}": "wrong",
        "site.devices.cpu.scratch": "wrong",
        "site.devices.cpu.interface": "wrong",
        "site.devices.cpu.environment": "wrong",
    }
    assert not list(tmp_path.glob(".baton-probe*"))


def test_the_command_says_what_to_change(in_cluster, tmp_path):
    right = CliRunner().invoke(app, ["doctor", "--no-look-inside"])
    assert right.exit_code == 0, right.output
    assert "0 open, 0 wrong" in right.output
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(BROKEN))
    wrong = CliRunner().invoke(app, ["doctor", "--site", str(tmp_path / "broken.yaml"), "--no-look-inside"])
    assert wrong.exit_code == 1
    assert "site.devices.cpu.partition: did you mean 'cuda'?" in wrong.output
    template = CliRunner().invoke(app, ["doctor", "--site", "template", "--no-look-inside"])
    assert template.exit_code == 0, template.output
    assert "site.cluster_names: set cluster_names: [mini]" in template.output
