"""What sbatch is asked for, word for word: the golden files are what a person would have to check on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.config import ConfigError, parse
from workflow.campaign.code import environment_digest, source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.site import SiteConfig, load_site
from workflow.cluster.environment import enter, enter_on
from workflow.cluster.parts import ARGUMENTS as PART
from workflow.cluster.placement import place, place_stage

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parent / "golden"
FURTHER = "-further-node"
"""Of the golden files of what the job's first node starts on another."""
ARGUMENTS = [
    "-m",
    "workflow.stages",
    "train",
    "--plan",
    "results/demo/plan-0123.json",
    "--id",
    "0123456789abcdef",
    "--step",
    "20",
]
NODE = {
    "partition": "gpu",
    "account": "proj42",
    "gres": "gpu:a100:{devices}",
    "devices_per_node": 4,
    "cpus_per_node": 64,
    "memory_per_node_gb": 480,
    "max_nodes": 8,
    "walltime": "24:00:00",
    "cpu_bind": "cores",
    "environment": {"kind": "venv", "path": "$WORK/venv", "python": "python3"},
}
ASCEND = NODE | {
    "partition": "npu",
    "gres": "npu:{devices}",
    "devices_per_node": 8,
    "cpus_per_node": 192,
    "environment": {
        "kind": "venv",
        "path": "/shared/venv",
        "setup": ["source /usr/local/Ascend/ascend-toolkit/set_env.sh"],
    },
}
CPU = {"partition": "batch", "devices_per_node": 8, "cpus_per_node": 32, "walltime": "2:00:00"}
CPU |= {"environment": {"kind": "venv", "path": "/shared/venv"}}
APPTAINER = {
    "kind": "apptainer",
    "modules": ["apptainer"],
    "image": "/shared/cuda.sif",
    "mounts": ["$SCRATCH"],
    "options": ["--cleanenv"],
}
PYXIS = {"kind": "pyxis", "image": "/shared/cuda.sqsh", "mounts": ["/scratch:/scratch"]}
MODULES = {"kind": "modules", "modules": ["CUDA/12", "Python/3.11"], "path": "/shared/venv"}
CASES = {
    "cuda-part-of-a-node": ("cuda", NODE, 2, {}),
    "cuda-two-nodes": ("cuda", NODE, 8, {}),
    "cuda-preemptible": (
        "cuda",
        NODE | {"preemptible": True, "twin": {"partition": "gpu-low", "qos": "low"}},
        4,
        {},
    ),
    "cuda-whole-nodes-without-gres": (
        "cuda",
        NODE | {"gres": None, "memory_per_node_gb": None, "whole_nodes": "always"},
        1,
        {},
    ),
    "cuda-gpus-per-node": (
        "cuda",
        NODE | {"gres": "--gpus-per-node={devices}", "constraint": "gpu&hbm80g", "qos": "regular"},
        4,
        {},
    ),
    "cuda-excluded-nodes": (
        "cuda",
        NODE | {"whole_nodes": "ask", "sbatch": {"reservation": "course"}},
        4,
        {"exclude": ("n1", "n7")},
    ),
    "cuda-more-memory": ("cuda", NODE, 2, {"memory_factor": 1.5}),
    "cuda-modules": ("cuda", NODE | {"environment": MODULES}, 4, {}),
    "cuda-apptainer": ("cuda", NODE | {"environment": APPTAINER, "scratch": "$TMPDIR"}, 4, {}),
    "cuda-apptainer-two-nodes": ("cuda", NODE | {"environment": APPTAINER}, 8, {}),
    "cuda-pyxis": ("cuda", NODE | {"environment": PYXIS, "scratch": "/scratch"}, 4, {}),
    "cuda-pyxis-two-nodes": ("cuda", NODE | {"environment": PYXIS}, 8, {}),
    "npu-one-node": ("npu", ASCEND, 8, {}),
    "npu-two-nodes": ("npu", ASCEND, 16, {"warning_seconds": 300}),
    "npu-pairs": ("npu", ASCEND | {"gres_multiple": 2}, 1, {}),
    "cpu-one-node": ("cpu", CPU, 2, {"walltime_seconds": 1800}),
    "cpu-two-nodes": ("cpu", CPU | {"max_nodes": 2}, 16, {}),
}


def site_of(device: str, values: dict, **further) -> SiteConfig:
    return parse(
        SiteConfig, {"name": "x", "scheduler": "slurm", "devices": {device: values}, **further}, path="site"
    )


@pytest.mark.parametrize("name", CASES)
def test_the_batch_script(name):
    device, values, ranks, asked = CASES[name]
    site = site_of(device, values)
    request = place(
        "baton:train:0123456789abcdef-step000020",
        device,
        ranks,
        site,
        output=Path("results/.slurm/%j.log"),
        **asked,
    )
    offered = site.devices[device]
    how = {
        "folder": "/shared/baton",
        "scratch": offered.scratch,
        "variables": {"OMP_NUM_THREADS": "1"},
        "device": device,
        "cpus": request.tasks_per_node * (request.cpus_per_task or 1),
        "cpu_bind": offered.cpu_bind,
    }
    texts = {name: request.text(enter(offered.environment, ARGUMENTS, node="n1", **how))}
    if request.nodes > 1:
        texts[name + FURTHER] = enter_on("n2", offered.environment, PART, **how)
    golden = {
        path.stem: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.sh") if path.stem in texts
    }
    assert texts == golden


MEGATRON = "npu-megatron-stage"
"""Golden file of a stage that a campaign planned, here where no NPU is."""


def test_a_stage_on_megatron_goes_to_the_npus_of_the_site():
    npu = "site.devices.npu"
    words = [
        *(
            "engine=megatron",
            "engine.device=npu",
            "engine.layout.pipeline_parallel_size=2",
            "actor.engine=megatron",
        ),
        *(f"{npu}.stand_in=false", f"{npu}.environment.kind=venv", f"{npu}.environment.path=/shared/ascend"),
        f"{npu}.environment.setup=['source /usr/local/Ascend/ascend-toolkit/set_env.sh']",
    ]
    plan, runs = plan_campaign(
        read_options({"campaign": "drill", "site": "mini", "set": words}), source_root()
    )
    spec = next(spec for spec in plan.stages.values() if spec.stage == "train" and "critic" in spec.backends)
    assert spec.backends == {"actor": "megatron", "critic": "megatron"}
    assert plan.environments == {key: environment_digest(source_root(), key) for key in ("cpu", "npu")}
    site = runs[0].config.site
    request = place_stage(spec, site, output=Path("results/.slurm/%j.log"), step=6, walltime_seconds=3600)
    offered = site.devices[site.key_of(spec.device)]
    script = enter(offered.environment, ARGUMENTS, folder="/shared/baton", device=spec.device.computed)
    golden = (GOLDEN / f"{MEGATRON}.sh").read_text(encoding="utf-8")
    assert request.text(script).replace(spec.id, "0123456789abcdef") == golden


def test_there_is_no_golden_file_without_a_case():
    assert {path.stem.removesuffix(FURTHER) for path in GOLDEN.glob("*.sh")} == {*CASES, MEGATRON}


REFUSED = {
    "partition": {"partition": "unknown"},
    "account": {"account": "unknown"},
    "qos": {"qos": "unknown"},
    "constraint": {"constraint": "unknown"},
    "gres": {"gres": "unknown"},
    "walltime": {"walltime": "unknown"},
    "cpus_per_node": {"cpus_per_node": "unknown"},
    "memory_per_node_gb": {"memory_per_node_gb": "unknown"},
    "max_nodes": {"max_nodes": "unknown"},
    "interface": {"interface": "unknown"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_job_needs_and_nobody_knows_is_a_refusal_that_names_the_key(name):
    with pytest.raises(ConfigError, match=rf"site\.devices\.cuda\.{name} is unknown"):
        place("baton:x:1", "cuda", 8, site_of("cuda", NODE | REFUSED[name]), output=Path("log"))


def test_what_a_job_does_not_need_may_stay_unknown():
    values = NODE | {
        "walltime": "unknown",
        "cpus_per_node": "unknown",
        "max_nodes": "unknown",
        "interface": "unknown",
        "whole_nodes": "always",
    }
    request = place(
        "baton:x:1", "cuda", 4, site_of("cuda", values), output=Path("log"), walltime_seconds=3600
    )
    assert request.cpus_per_task is None
    assert request.parameters()["time"] == "01:00:00"


@pytest.mark.parametrize(("ranks", "nearest"), [(6, "4 or 8"), (11, "8 or 12"), (30, "28 or 32")])
def test_a_fraction_of_several_nodes_is_refused_with_the_nearest(ranks, nearest):
    with pytest.raises(ConfigError, match=f"have {nearest}"):
        place("baton:x:1", "cuda", ranks, site_of("cuda", NODE), output=Path("log"))


def test_more_nodes_than_a_job_may_have_are_refused():
    with pytest.raises(ConfigError, match=r"max_nodes=8; at most 32 ranks"):
        place("baton:x:1", "cuda", 36, site_of("cuda", NODE), output=Path("log"))


def test_a_job_longer_than_the_site_allows_is_refused():
    with pytest.raises(ConfigError, match=r"1-01:00:00 is longer than site\.devices\.cuda\.walltime"):
        place("baton:x:1", "cuda", 1, site_of("cuda", NODE), output=Path("log"), walltime_seconds=25 * 3600)


def test_a_warning_that_does_not_fit_the_job_is_refused():
    with pytest.raises(ConfigError, match="too long to save"):
        place(
            "baton:x:1",
            "cuda",
            1,
            site_of("cuda", NODE),
            output=Path("log"),
            walltime_seconds=600,
            warning_seconds=600,
        )


def test_a_device_that_the_site_lacks_and_a_site_without_slurm_are_refused():
    with pytest.raises(ConfigError, match="offers cuda, not npu"):
        place("baton:x:1", "npu", 1, site_of("cuda", NODE), output=Path("log"))
    with pytest.raises(ConfigError, match="has no SLURM"):
        place("baton:x:1", "cpu", 1, load_site("local", CONFIGS), output=Path("log"))


def test_memory_after_running_out_of_it_stays_within_the_node():
    requests = [
        place(
            "baton:x:1", "cuda", 2, site_of("cuda", NODE), output=Path("log"), memory_factor=factor
        ).memory_mb
        for factor in (1.0, 1.5, 4.0)
    ]
    assert requests == [240 * 1024, 360 * 1024, 480 * 1024]
