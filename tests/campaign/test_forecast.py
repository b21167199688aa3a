"""Forecasts of bytes are not below what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.checkpoint import StateStore
from workflow.campaign.build import make_plan
from workflow.campaign.code import source_root
from workflow.campaign.forecast import kept_states, weights_bytes
from workflow.campaign.schema import CampaignOptions
from workflow.campaign.segments import cut_steps


@pytest.mark.parametrize("retain", ["all", "last", "every:4", "every:7"])
@pytest.mark.parametrize("segments", [1, 2, 6])
def test_as_many_states_as_a_training_leaves_on_disk(retain: str, segments: int, tmp_path: Path) -> None:
    """Saved after every step; a cut is read, and its retention applied, one cut later."""
    store, cuts, most = StateStore(tmp_path), cut_steps(24, segments), 0
    for step in range(1, 25):
        (store.begin(step) / "actor").mkdir()
        store.commit(step, {}, {})
        most = max(most, len(list(tmp_path.glob("*/state.json"))))
        store.retain("last", keep=cuts)
        if step in cuts:
            store.retain(retain, keep=[step])
    assert most == kept_states(cuts, retain)


def test_what_engines_export_is_float32_whatever_the_base_model_is() -> None:
    plan, runs = make_plan(CampaignOptions(campaign="drill", set="model.dtype=bfloat16"), source_root())
    forecasts = {spec.stage: spec.forecast_bytes for spec in plan.stages.values()}
    parameters = runs[0].model.parameters
    assert forecasts["convert"] == weights_bytes(parameters, "bfloat16")
    assert forecasts["sft"] == forecasts["export"] == weights_bytes(parameters, "float32")
