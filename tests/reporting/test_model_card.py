"""The model card says what the manifests say, in the header that model hubs read."""

from pathlib import Path

import pytest
import yaml

from tests.support.fake_campaign import fake_campaign
from workflow.campaign.plan import read_plan
from workflow.campaign.slice import Slice
from workflow.manifest import Manifest, read_manifest
from workflow.reporting.model_card import model_card


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Slice, dict[str, Manifest]]:
    """The slice and the inputs of the GRPO run's export."""
    folder = tmp_path_factory.mktemp("campaign")
    plan = read_plan(fake_campaign(folder))
    spec = plan.stages[plan.runs["grpo"].stages["export"]]
    inputs = {
        name: read_manifest(Path(folder, plan.input_manifest(ref))) for name, ref in spec.inputs.items()
    }
    return Slice("export", spec.config), inputs


def test_header_is_what_hubs_read(exported) -> None:
    _, header, text = model_card(*exported).split("---\n", 2)
    values = yaml.safe_load(header)
    assert values["license"] == "apache-2.0"
    assert values["library_name"] == "transformers"
    assert "grpo" in values["tags"]
    assert text.lstrip().startswith("# ")


def test_metrics_come_with_their_interval(exported) -> None:
    card = model_card(*exported)
    after = exported[1]["after"].metrics
    low, high = after["accuracy_ci95"]
    assert (
        f"| this model | {100 * after['accuracy']:.1f} % (95 % interval {100 * low:.1f} % to {100 * high:.1f} %) |"
        in card
    )
    assert "| after supervised fine-tuning | 66.4 %" in card
    assert "1,024 held-out problems" in card


def test_provenance_is_complete(exported) -> None:
    card = model_card(*exported)
    for manifest in exported[1].values():
        assert manifest.digest in card
    state = exported[1]["model"]
    for value in (state.git_commit, state.code, state.environment, state.packages["torch"]):
        assert value in card
    assert f"| steps | {state.step} |" in card


def test_license_is_left_out_when_nobody_knows_it(exported) -> None:
    config, inputs = exported
    origin = inputs["origin"].model_copy(
        update={"metrics": {"source": {"kind": "path", "model_type": "llama"}}}
    )
    card = model_card(config, inputs | {"origin": origin})
    assert "license:" not in card.split("---")[1]
    assert "| license of the base model | not stated |" in card
