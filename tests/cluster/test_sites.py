"""Site files: all that ship are valid, what is unknown is honest, and wrong ones are refused by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.config import ConfigError, LayoutConfig, parse
from workflow.campaign.build import make_plan
from workflow.campaign.forecast import ModelFacts
from workflow.campaign.placement import place
from workflow.campaign.schema import CampaignOptions, EngineConfig
from workflow.campaign.site import (
    SiteConfig,
    cluster_name,
    detect_site,
    load_site,
    read_seconds,
    site_names,
    spell_seconds,
)
from workflow.manifest import Device

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TINY = ModelFacts("model.architecture", {"model_type": "qwen3"}, 1000)
PUBLIC = ("daint", "hkustgz-hpc4", "leonardo", "perlmutter", "vista")


@pytest.mark.parametrize("name", site_names(CONFIGS))
def test_every_site_file_is_valid_and_bears_its_files_name(name):
    assert load_site(name, CONFIGS).name == name


@pytest.mark.parametrize("name", PUBLIC)
def test_every_value_of_a_public_machine_cites_a_page_or_is_unknown(name):
    lines = (CONFIGS / f"site/{name}.yaml").read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    pages = [line for line in head if "https://" in line]
    assert pages
    body = "\n".join(lines)
    assert body.count("[") > len(pages)  # the pages are referred to below
    assert "unknown" in body


def test_an_unquoted_walltime_is_what_it_looks_like():
    site = parse(SiteConfig, {"name": "x", "devices": {"cpu": {"walltime": 24 * 3600}}})  # YAML's 24:00:00
    assert site.devices["cpu"].walltime == "1-00:00:00"
    assert read_seconds(load_site("daint", CONFIGS).devices["cuda"].walltime) == 24 * 3600


@pytest.mark.parametrize("seconds", [60, 3600, 86400, 90000, 7 * 86400])
def test_durations_are_read_as_they_are_spelled(seconds):
    assert read_seconds(spell_seconds(seconds)) == seconds


WRONG = {
    "site.devices.cuda.partion": ({"partion": "gpu"}, "did you mean 'partition'"),
    "site.devices.cuda.max_nodes": ({"max_nodes": "many"}, "or unknown"),
    "site.devices.cuda.walltime": ({"walltime": "1h"}, "1h"),
    "gpu:{devices}": ({"gres": "gpu:4"}, "gres='gpu:4'"),
    "gres_multiple": ({"gres_multiple": 2, "devices_per_node": 3}, "devices_per_node=3"),
    "twin": ({"preemptible": True}, "preemptible=true"),
    "path": ({"environment": {"kind": "venv"}}, "kind venv"),
    "image": ({"environment": {"kind": "apptainer"}}, "kind is apptainer"),
    "modules": ({"environment": {"kind": "modules"}}, "kind modules"),
    "mounts": ({"environment": {"mounts": ["/x"]}}, "kind is none"),
}


@pytest.mark.parametrize(("key", "case"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_value_is_refused_by_its_key(key, case):
    values, said = case
    with pytest.raises(ConfigError) as refused:
        parse(SiteConfig, {"name": "x", "devices": {"cuda": values}}, path="site")
    assert key in str(refused.value)
    assert said in str(refused.value)


def test_a_site_is_found_by_the_clusters_name(tmp_path, monkeypatch):
    conf = tmp_path / "slurm.conf"
    monkeypatch.setenv("SLURM_CONF", str(conf))
    conf.write_text("SlurmctldPort=1\nClusterName=mini\n")
    assert (cluster_name(), detect_site(CONFIGS)) == ("mini", "mini")
    conf.write_text("ClusterName=elsewhere\n")
    with pytest.raises(ConfigError, match=r"elsewhere.*site=NAME"):
        detect_site(CONFIGS)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", "")
    assert detect_site(CONFIGS) == "local"


def test_an_unknown_site_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'perlmutter'"):
        load_site("perlmuter", CONFIGS)


def test_a_stand_in_computes_on_cpu_and_is_placed_by_its_own_key():
    site = load_site("mini", CONFIGS)
    engine, device = place(EngineConfig(device="npu"), "language_model", TINY, site, "actor.engine")
    assert (engine.device, device.asked, device.computed) == ("cpu", "npu", "cpu")
    assert site.key_of(device) == "npu"
    assert "stand-in" in device.why
    assert site.key_of(Device(asked="cpu", computed="cpu", why="")) == "cpu"


def test_where_a_run_is_placed_does_not_change_what_it_is():
    local, mini = (
        make_plan(CampaignOptions(campaign="drill", site=site), ROOT)[0] for site in ("local", "mini")
    )
    assert set(local.stages) == set(mini.stages)
    assert {spec.device.asked for spec in mini.stages.values()} == {"cpu", "cuda"}


@pytest.mark.parametrize(("ranks", "said"), [(3, "have 2 or 4"), (6, "at most 4 ranks")])
def test_a_layout_that_does_not_fill_nodes_is_refused_while_planning(ranks, said):
    engine = EngineConfig(device="cuda", layout=LayoutConfig(data_parallel_size=ranks))
    with pytest.raises(ConfigError, match=rf"actor\.engine\.layout.*{said}"):
        place(engine, "language_model", TINY, load_site("mini", CONFIGS), "actor.engine")
