"""From words on the command line to typed runs, and everything that is refused on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engines.config import ConfigError
from workflow.campaign.code import source_root
from workflow.campaign.compose import compose_run, load_campaign
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.overrides import GROUPS, choices, read_overrides, split_words

ROOT = source_root()
CONFIGS = ROOT / "configs"


def runs_of(**options):
    _, runs = plan_campaign(read_options({"site": "local"} | options), ROOT)
    return {run.name: run.config for run in runs}


def compose(*words):
    return compose_run(read_overrides(words, CONFIGS), CONFIGS)


def test_the_documented_overrides_are_accepted():
    runs = runs_of(campaign="demo", set="algorithm.lr=1e-5 engine=fsdp")
    assert {run.algorithm.lr for run in runs.values()} == {1e-5}
    assert {run.role_engine(role).backend for run in runs.values() for role in ("actor", "critic")} == {
        "fsdp"
    }


def test_engine_sets_all_roles_and_a_later_role_only_its_own():
    run = compose("actor.engine=fsdp", "engine=fsdp2", "critic.engine=fsdp")
    assert (run.engine.backend, run.actor.engine.backend, run.critic.engine.backend) == (
        "fsdp2",
        "fsdp2",
        "fsdp",
    )


def test_a_role_inherits_what_it_does_not_set():
    run = compose("engine.token_budget=1000", "actor.engine.layout.data_parallel_size=2")
    assert run.actor.engine.token_budget == 1000
    assert (run.actor.engine.layout.world_size, run.critic.engine.layout.world_size) == (2, 1)


def test_the_seed_of_the_command_line_wins():
    assert {run.seed for run in runs_of(campaign="demo", seed=1).values()} == {1}


def test_quotes_keep_blanks():
    assert split_words("data.prompt='a b' seed=1") == ["data.prompt=a b", "seed=1"]
    words = split_words(
        r'reward.pattern="answer:\s*(\d+)" reward.kind=regex'
    )  # as docs/getting-started.md has it
    assert words == [r"reward.pattern=answer:\s*(\d+)", "reward.kind=regex"]
    with pytest.raises(ConfigError, match=r"No closing quotation.*put another key=value behind it"):
        split_words("data.prompt='a b")


def test_text_is_taken_as_it_stands():
    prompt = "Sort {direction}: {numbers!i}"
    assert compose(f"data.prompt={prompt}").data.prompt == prompt


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_of_every_group_is_valid(group):
    needs = {
        "model=local": ["model.path=a"],
        "data=files": ["data.train_file=a.jsonl", "data.heldout_file=b.jsonl"],
    }
    words = [f"{group}={choice}" for choice in choices(CONFIGS, group)]
    assert words
    for word in words:
        compose(word, *needs.get(word, []))


@pytest.mark.parametrize("file", sorted((CONFIGS / "campaign").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_campaign_plans(file):
    accelerators = "engine.device=" in file.read_text()  # which only a cluster, or its stand-in, has
    site = "mini" if accelerators else "local"
    runs = runs_of(campaign=file.stem, site=site)
    assert runs
    if yaml.safe_load(file.read_text()).get("controls"):
        assert len(runs_of(campaign=file.stem, site=site, controls=True)) > len(runs)


def test_a_campaign_can_start_from_another():
    based = load_campaign("demo-slurm", CONFIGS)
    base = load_campaign("demo", CONFIGS)
    assert (based.name, based.common, based.segments) == ("demo-slurm", base.common, base.segments)
    assert based.controls == base.controls
    assert based.runs["ppo"] == [*base.runs["ppo"], "engine.device=cuda"]


BAD = {
    "engine=fdsp": ["engine='fdsp'", "did you mean 'fsdp'"],
    "engine.backend=fsdpp": ["engine.backend='fsdpp': unknown backend", "did you mean 'fsdp'"],
    "engine=torchtitan": ["torchtitan on cpu: not built yet", "built: fsdp on cpu"],
    "engine.device=cuda": ["engine.device='cuda'", "offers cpu"],
    "engine.device=tpu": ["engine.device='tpu'", "'cpu', 'cuda' or 'npu'"],
    "algorithm=gppo": ["algorithm='gppo'", "did you mean"],
    "algorithm.name=ppoo": ["algorithm.name='ppoo'", "'grpo', 'ppo'"],
    "algorithm.lrr=1": ["algorithm.lrr: unknown key; did you mean 'lr'?"],
    "algoritm.lr=1": ["algoritm: unknown key; did you mean 'algorithm'?"],
    "model.architecture.hidden_size=-1": ["model.architecture.hidden_size=-1", "positive"],
    "algorithm.lr=-1e-5": ["algorithm.lr=-1e-05", "greater than 0"],
    "algorithm.lr=nan": ["algorithm.lr='nan'", "finite"],
    "algorithm.lr=inf": ["algorithm.lr='inf'", "finite"],
    "algorithm.lr=fast": ["algorithm.lr='fast'", "number"],
    "algorithm.clip_low=1.5": ["algorithm.clip_low=1.5", "less than 1"],
    "algorithm.clip_high=0": ["algorithm.clip_high=0", "greater than 0"],
    "algorithm.optimizer.betas=[0.9,1.5]": ["algorithm.optimizer", "each must be in [0, 1)"],
    "algorithm.gamma=1.1 algorithm=ppo": ["algorithm.gamma=1.1", "less than or equal to 1"],
    "rollout.max_new_tokens=0": ["rollout.max_new_tokens=0", "greater than or equal to 1"],
    "rollout.temperature=0": ["rollout.temperature=0", "greater than 0"],
    "data.max_prompt_tokens=-3": ["data.max_prompt_tokens=-3"],
    "algorithm.mini_batch_size=7": ["algorithm.mini_batch_size=7 does not divide"],
    "algorithm.samples_per_prompt=1 algorithm.mini_batch_size=1": ["algorithm.samples_per_prompt=1: advantage='grpo' compares the samples", "at least 2"],
    "algorithm.advantage=rlo": ["algorithm.advantage='rlo': unknown; did you mean 'rloo'?"],
    "algorithm.policy_loss=gsppo": ["algorithm.policy_loss='gsppo': unknown; did you mean 'gspo'?"],
    "engine.layout.data_parallel_size=2 engine.layout.shard_size=3": ["shard_size=3 does not divide"],
    "engine.layout.data_parallel_size=64": ["64 ranks", "site.devices.cpu.devices_per_node"],
    "evaluate.problems=1000000": ["evaluate.problems=1000000", "data.heldout_size"],
    "sft.demonstrations=1000000": ["sft.demonstrations=1000000", "data.train_size"],
    "sft.batch_size=1000000": ["sft.batch_size=1000000", "sft.demonstrations"],
    "model=local model.path=/nowhere": ["/nowhere", "no such folder"],
    "model=local": ["exactly one of architecture, path and package"],
    "model.package=json": ["exactly one of architecture, path and package"],
    "data=files data.train_file=/nowhere.jsonl data.heldout_file=/nowhere.jsonl": ["/nowhere.jsonl", "no such file"],
    "seed=-1": ["seed=-1"],
    "seed": ["'seed': an override is key=value"],
    "algorithm.lr.peak=1": ["algorithm.lr"],
    "engine.micro_batch_size=4": ["engine.micro_batch_size: has no effect", "dynamic_micro_batches"],
    "algorithm=grpo algorithm.critic_lr=1e-3": ["algorithm.critic_lr: has no effect", "critic"],
    "algorithm.kl.target=0.2": ["algorithm.kl.target: has no effect", "adaptive"],
    "reference.engine.token_budget=9": ["reference.engine.token_budget: has no effect", "algorithm.kl.place"],
    "algorithm.kl.adaptive=true": ["algorithm.kl.adaptive=true needs place=reward or place=loss"],
    "reward.pattern=x": ["pattern belongs to kind=regex"],
    "reward=verifier reward.kind=function reward.function=no_such_module:f": ["reward.function", "importable"],
    "engine.fused_kernels=true": ["fused_kernels=True", "no fused kernels"],
    "engine.forward_only=true": ["forward_only=True", "has to train"],
}  # fmt: skip


@pytest.mark.parametrize(("words", "told"), BAD.items(), ids=BAD.keys())
def test_bad_input_is_refused_by_name(words, told):
    with pytest.raises(ConfigError) as caught:
        runs_of(campaign="demo", set=words)
    assert [text for text in told if text not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"campaing": "demo"}, "--config.campaing: unknown key; did you mean 'campaign'?"),
        ({"campaign": "dmeo"}, "did you mean 'demo'"),
        ({"seed": "one"}, "--config.seed='one'"),
        ({"seed": -1}, "--config.seed=-1"),
        ({"site": "moon"}, "site='moon'"),
        ({"campaign": "drill", "controls": True}, "'drill' has no controls"),
    ],
)
def test_bad_options_are_refused(options, told):
    with pytest.raises(ConfigError) as caught:
        runs_of(**options)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\nruns: {}\n", "at least 1"),
        ("name: x\nrun: {a: []}\n", "run: unknown key; did you mean 'runs'?"),
        ("name: x\nruns: {a: [algorithm=ppo], b: [algorithm.critic_lr=1]}\n", "run 'b': algorithm.critic_lr: has no effect"),
        ("- x\n", "expected keys and values"),
        ("name: [\n", "not YAML"),
        ("name: x\nruns: {a/b: []}\n", "'a/b'"),
    ],
)  # fmt: skip
def test_bad_campaign_files_are_refused(tmp_path: Path, text, told):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        runs_of(campaign=str(file))
    assert told in str(caught.value)
