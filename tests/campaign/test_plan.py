"""Slices, identities, the builder and the frozen plan."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config import AdamWConfig, ConfigError
from workflow.campaign.code import code_digest, environment_digest, snapshot, source_root
from workflow.campaign.head import plan_campaign, read_options
from workflow.campaign.identity import without_execution
from workflow.campaign.plan import PlanError, read_plan, write_plan
from workflow.campaign.segments import cut_steps
from workflow.campaign.slice import Slice, UndeclaredConfigRead
from workflow.campaign.stages import STAGES, TRAIN
from workflow.stages.train import role_specs

ROOT = source_root()
DP2 = "engine.layout.data_parallel_size=2"
PROBLEM = {"question": "1 + 1", "answer": "2"}


def plan_of(**options):
    return plan_campaign(read_options({"campaign": "drill", "site": "local", **options}), ROOT)[0]


def test_what_snakemake_read_as_a_mapping_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="': ' belongs in a campaign's file"):
        read_options({"set": {"reward.pattern='answer": "(.*)'"}})


def stages_of(plan, run):
    ids = plan.runs[run].ids()
    return {(plan.stages[id].stage, plan.stages[id].slug): plan.stages[id] for id in ids}


def spec_of(plan, run, stage):
    id = plan.runs[run].stages[stage]
    return plan.stages[id if isinstance(id, str) else id[0]]


def test_a_slice_gives_declared_sections_typed_and_refuses_all_others():
    config = Slice("evaluate", spec_of(plan_of(), "grpo", "evaluate").config)
    assert config.evaluate.problems == 32
    assert config.rollout.max_new_tokens == 16
    for read, key in [
        (lambda: config.algorithm, "algorithm"),
        (lambda: config.rollout.top_p, "rollout.top_p"),
    ]:
        with pytest.raises(UndeclaredConfigRead, match=f"stage evaluate read '{key}'"):
            read()


def test_a_run_does_not_read_what_it_does_not_use():
    plan = plan_of()
    assert isinstance(Slice("train", spec_of(plan, "ppo", "train").config).algorithm.optimizer, AdamWConfig)
    with pytest.raises(UndeclaredConfigRead, match="'critic', which this run does not use"):
        _ = Slice("train", spec_of(plan, "grpo", "train").config).critic


def test_a_stage_runs_in_what_its_engines_need():
    plan = plan_of(set="critic.engine.backend=megatron conversion.megatron=true")
    on_megatron = {"critic": "megatron"}
    for spec in plan.stages.values():
        needs = spec.stage == "megatron" or on_megatron.items() <= spec.backends.items()
        assert spec.environment == ("cpu+megatron" if needs else "cpu"), spec.name
    ppo = spec_of(plan, "ppo", "train")
    assert ppo.environment == "cpu+megatron" != spec_of(plan, "grpo", "train").environment
    assert plan.environments == {key: environment_digest(ROOT, key) for key in ("cpu", "cpu+megatron")}


def test_a_slice_survives_json_and_pickle():
    config = Slice("train", spec_of(plan_of(), "ppo", "train").config)
    assert Slice("train", json.loads(json.dumps(config.to_json()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_runs_share_the_stages_that_do_not_tell_them_apart():
    plan = plan_of()
    ppo, grpo = plan.runs["ppo"].stages, plan.runs["grpo"].stages
    assert ppo["convert"] == grpo["convert"]
    assert ppo["sft"] == grpo["sft"]
    assert ppo["evaluate"][0] == grpo["evaluate"][0]
    assert ppo["train"] != grpo["train"]


def test_another_layout_is_another_result_and_the_same_learning():
    one = spec_of(plan_of(), "grpo", "train")
    two = spec_of(plan_of(set=f"actor.{DP2} critic.{DP2}"), "grpo", "train")
    assert one.identity != two.identity
    assert one.learning_identity == two.learning_identity


@pytest.mark.parametrize(
    "words", ["actor.engine.token_budget=999", "rollout.batch_size=3", "actor.engine=fsdp"]
)
def test_what_only_says_how_to_compute_is_not_learnt(words):
    one, two = (spec_of(plan_of(set=text), "ppo", "train") for text in ("", words))
    assert one.identity != two.identity
    assert one.learning_identity == two.learning_identity


def test_the_auxiliary_loss_of_a_mixture_is_learnt():
    def seen(**engine):
        engine = {"backend": "megatron", "seed": 0, **engine}
        return without_execution({"actor": {"engine": engine}}, TRAIN)["actor"]["engine"]

    assert seen(moe_aux_loss_coefficient=0.01) == {"seed": 0, "moe_aux_loss_coefficient": 0.01}
    assert seen(moe_aux_loss_coefficient=0.0) == seen() == {"seed": 0}  # as before there was such a key


@pytest.mark.parametrize(
    "words", ["checkpoint.save_every=1", "checkpoint.retain=all", "tracking.tensorboard=false"]
)
def test_settings_that_cannot_change_a_result_are_no_part_of_it(words):
    one, two = (spec_of(plan_of(set=text), "ppo", "train") for text in ("", words))
    assert one.identity == two.identity


@pytest.mark.parametrize(
    "words", ["algorithm.lr=1e-6", "seed=1", "sft.steps=5", "data.seed=3", "rollout.temperature=0.9"]
)
def test_what_is_learnt_changes_both(words):
    one, two = (spec_of(plan_of(set=text), "ppo", "train") for text in ("", words))
    assert one.identity != two.identity
    assert one.learning_identity != two.learning_identity


def test_a_cut_is_no_part_of_a_result(tmp_path):
    text = (ROOT / "configs/campaign/drill.yaml").read_text()
    file = tmp_path / "drill.yaml"
    file.write_text(text.replace("segments: 3", "segments: 2"))
    two, three = plan_of(campaign=str(file)), plan_of()
    assert spec_of(two, "ppo", "train").cuts == [3, 6]
    assert spec_of(two, "ppo", "train").identity == spec_of(three, "ppo", "train").identity


def test_a_file_counts_by_its_content_not_by_its_name(tmp_path):
    def identity(name, rows):
        file = tmp_path / name
        file.write_text("".join(json.dumps({**PROBLEM, "question": f"{i} + 1"}) + "\n" for i in range(rows)))
        words = f"data=files data.train_file={file} data.heldout_file={file} data.train_size=64 data.heldout_size=32"
        return spec_of(plan_of(set=words), "ppo", "sft").identity

    assert identity("a.jsonl", 3) == identity("b.jsonl", 3)
    assert identity("a.jsonl", 3) != identity("a.jsonl", 4)


@pytest.mark.parametrize(
    ("run", "words", "ranks"),
    [
        ("ppo", "", 1),
        ("grpo", "", 1),
        ("ppo", DP2, 2),
        ("ppo", f"{DP2} algorithm.kl.place=loss", 2),
        ("ppo", f"critic.{DP2}", 3),
        ("ppo", "critic.engine=fsdp", 2),
        ("ppo", f"actor.{DP2} algorithm.kl.place=loss reference.engine=fsdp", 4),
        ("grpo", f"actor.{DP2} algorithm.kl.place=loss", 3),
        ("grpo", f"actor.{DP2} algorithm.kl.place=loss reference.{DP2}", 2),
    ],
)
def test_a_job_gets_the_ranks_of_all_process_groups(run, words, ranks):
    words += " site.devices.cpu.devices_per_node=4"
    spec = spec_of(plan_of(set=words), run, "train")
    config = Slice("train", spec.config)
    started = {
        (role.engine.backend, role.engine.device, role.engine.layout): role.engine.layout.world_size
        for role in role_specs(config, Path(), 1)
    }
    assert spec.world_size == sum(started.values()) == ranks


def test_ranks_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError) as caught:
        plan_of(set=f"actor.{DP2} algorithm.kl.place=loss")
    told = "actor.engine and critic.engine with reference.engine differ in backend, device or layout, so they share no devices: 3 ranks"
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "path"), [(s.name, p) for s in STAGES.values() for p in s.roles if s.name != "evaluate"]
)
def test_every_engine_draws_from_the_runs_seed(stage, path):
    def seeds(**options):
        words = f"algorithm.kl.place=loss site.devices.cpu.devices_per_node=3 {options.pop('set', '')}"
        spec = spec_of(plan_of(set=words, **options), "ppo", stage)
        config = Slice(stage, spec.config)
        role, _, last = path.rpartition(".")
        return (
            getattr(getattr(config, role) if role else config, last).seed,
            spec.identity,
            spec.learning_identity,
        )

    zero, one, own = seeds(), seeds(seed=1), seeds(seed=1, set=f"{path}.seed=0")
    assert (zero[0], one[0], own[0]) == (0, 1, 0)
    assert one[1] != own[1]
    assert one[2] != own[2]


def test_the_seed_is_no_part_of_a_conversion_that_draws_nothing():
    one, two = (plan_of(campaign="demo-smollm2", seed=seed) for seed in (0, 1))
    assert spec_of(one, "grpo", "convert").identity == spec_of(two, "grpo", "convert").identity
    assert spec_of(one, "grpo", "sft").identity != spec_of(two, "grpo", "sft").identity


def test_controls_are_added_and_continue_the_supervised_stage():
    plan = plan_of(campaign="demo", controls=True)
    sft = plan.stages[plan.runs["sft-continued"].stages["sft"]]
    more = plan.stages[plan.runs["sft-continued"].stages["sft_continued"]]
    assert more.inputs["model"].id == sft.id
    assert more.steps == more.config["sft"]["steps"]
    assert sft.id == plan.runs["grpo"].stages["sft"]
    assert spec_of(plan, "grpo-shuffled", "train").config["reward"]["shuffled"]


@given(steps=st.integers(1, 500), segments=st.integers(1, 50))
def test_cuts_end_at_the_last_step_and_are_even(steps, segments):
    cuts = cut_steps(steps, segments)
    assert cuts[-1] == steps
    assert len(cuts) == min(steps, segments)
    lengths = [end - start for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]
    assert max(lengths) - min(lengths) <= 1


def test_a_frozen_plan_is_read_back_and_refused_when_altered(tmp_path):
    plan = plan_of()
    path = write_plan(plan, tmp_path)
    assert read_plan(path) == plan
    assert write_plan(plan, tmp_path) == path
    path.write_text(path.read_text().replace('"steps":6', '"steps":7'))
    with pytest.raises(PlanError, match="altered since it was frozen"):
        read_plan(path)
    with pytest.raises(PlanError, match="no such plan"):
        read_plan(tmp_path / "plan-0.json")


def test_the_same_command_gives_the_same_plan():
    assert plan_of().digest == plan_of().digest
    assert plan_of().digest != plan_of(seed=1).digest


def test_stages_are_found_by_id_and_by_folder():
    plan = plan_of()
    spec = spec_of(plan, "ppo", "train")
    assert plan.find("train", spec.id) is plan.find("train", spec.name) is spec
    with pytest.raises(PlanError, match="has no sft"):
        plan.find("sft", spec.id)


def test_every_input_of_a_stage_is_published_by_a_stage_of_the_plan():
    plan = plan_of(campaign="demo", controls=True, set="conversion.megatron=true")
    published = {spec.manifest(step) for spec in plan.stages.values() for step in spec.cuts or [None]}
    wanted = {plan.input_manifest(ref) for spec in plan.stages.values() for ref in spec.inputs.values()}
    assert wanted <= published
    assert {spec.stage for spec in plan.stages.values()} == set(STAGES)


def test_a_conversion_is_shared_and_depends_on_no_ranks():
    one, two = (plan_of(set=f"conversion.megatron=true conversion.ranks={ranks}") for ranks in (1, 2))
    ids = [[spec.id for spec in plan.stages.values() if spec.stage == "megatron"] for plan in (one, two)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == len(one.runs)
    assert {spec.threads for spec in two.stages.values() if spec.stage == "megatron"} == {2}
    with pytest.raises(ConfigError, match=r"conversion\.ranks: has no effect, conversion\.megatron=false"):
        plan_of(set="conversion.ranks=2")
    with pytest.raises(ConfigError, match=r"conversion\.megatron=True: .*attention_bias=True"):
        plan_of(set="conversion.megatron=true model.architecture.attention_bias=true")


def test_a_snapshot_has_the_digest_of_its_source_and_is_mended(tmp_path):
    digest = code_digest(ROOT)
    copy = snapshot(ROOT, digest, tmp_path)
    assert code_digest(copy) == digest
    (copy / "workflow" / "manifest.py").write_text("altered")
    assert snapshot(ROOT, digest, tmp_path) == copy
    assert code_digest(copy) == digest


def test_planning_loads_no_framework():
    code = (
        "import sys; from workflow.campaign.head import plan_campaign, read_options; "
        "from workflow.campaign.code import source_root; "
        "plan_campaign(read_options({'campaign': 'demo'}), source_root()); import workflow.cli; "
        "print([m for m in ('torch', 'transformers', 'ray', 'tensordict') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
