"""The transformers rollout against plain Hugging Face."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.config import RolloutConfig
from engines.hf_checkpoint import on_disk_parameters
from engines.rollout.base import Request, RolloutError, SamplingParams
from engines.rollout.transformers import TransformersRollout
from engines.streams import stream_key
from tests.support.models import VOCAB_SIZE, save_tiny_model

EOS = 7
PROMPTS = [[3, 5, 9], [3, 5, 9], [11], [4] * 6, [20, 21, 22, 23, 24], [3, 5, 9], [40, 2]]
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # A large init makes tiny models repeat themselves; 0.1 ends some samples early and leaves others running.
    return save_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1, eos_token_id=EOS)


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rollout(folder, **config):
    return TransformersRollout(folder, RolloutConfig(**config))


def requests(prompts=PROMPTS, repeats=4):
    return [Request(p, stream_key("t", i, j)) for i, p in enumerate(prompts) for j in range(repeats)]


def reference_log_probs(model, prompt, response, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_log_probs_are_the_models_own(folder, reference):
    asked = requests()
    responses = rollout(folder, compact_every=5).generate(asked, PARAMS)
    for request, response in zip(asked, responses, strict=True):
        expected = reference_log_probs(reference, request.prompt_ids, response.token_ids, 0.8)
        assert torch.allclose(torch.tensor(response.log_probs), expected, atol=1e-5)


def test_finished_means_eos_and_nothing_after_it(folder):
    responses = rollout(folder, compact_every=5).generate(requests(repeats=20), PARAMS)
    assert {response.finished for response in responses} == {True, False}
    for response in responses:
        assert len(response.log_probs) == len(response.token_ids)
        assert EOS not in response.token_ids[:-1]
        if response.finished:
            assert response.token_ids[-1] == EOS
        else:
            assert len(response.token_ids) == PARAMS.max_new_tokens


def test_greedy_equals_generate(folder, reference):
    params = SamplingParams(greedy=True, max_new_tokens=12)
    for request, response in zip(
        requests(), rollout(folder, compact_every=5).generate(requests(), params), strict=True
    ):
        prompt = torch.tensor([request.prompt_ids])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert response.token_ids == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "config", [{"compact_every": 1}, {"compact_every": 100}, {"batch_size": 1}, {"batch_size": 3}]
)
def test_batches_and_compaction_change_no_sample(folder, config):
    expected = rollout(folder, compact_every=5).generate(requests(), PARAMS)
    got = rollout(folder, **config).generate(requests(), PARAMS)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert [r.finished for r in got] == [r.finished for r in expected]


def test_order_of_requests_changes_no_sample(folder):
    replica = rollout(folder)
    expected = replica.generate(requests(), PARAMS)
    assert [r.token_ids for r in replica.generate(requests()[::-1], PARAMS)[::-1]] == [
        r.token_ids for r in expected
    ]


def test_no_requests_give_no_responses(folder):
    assert rollout(folder).generate([], PARAMS) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 110, "110 tokens"), ([VOCAB_SIZE], "vocabulary"), ([-1], "vocabulary")],
)
def test_bad_prompts_are_named(folder, prompt, message):
    with pytest.raises(RolloutError, match=message):
        rollout(folder).generate([Request(prompt, 0)], PARAMS)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen3-moe", "llama", "qwen2"])
def test_new_weights_sample_as_the_model_they_came_from(tmp_path, family):
    replica = rollout(save_tiny_model(tmp_path / "old", family, seed=1))
    new = save_tiny_model(tmp_path / "new", family, seed=2)
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    replica.update_weights(on_disk_parameters(model).items())
    assert replica.generate(requests(), PARAMS) == rollout(new).generate(requests(), PARAMS)


def test_weights_that_do_not_fit_are_refused_and_nothing_is_sampled_from_them(folder, reference):
    replica = rollout(folder)
    weights = dict(on_disk_parameters(reference))
    name = next(iter(weights))
    without = [item for item in weights.items() if item[0] != name]
    for wrong, message in (
        (without, "did not come"),
        ([*weights.items(), (name, weights[name])], "twice"),
        ([*without, (name, weights[name][1:])], "is \\("),
        ([*without, (name, weights[name].double())], "float64"),
        ([*weights.items(), ("model.extra", weights[name])], "model.extra"),
    ):
        with pytest.raises(RolloutError, match=message):
            replica.update_weights(iter(wrong))
        with pytest.raises(RolloutError, match="half-way"):
            replica.generate(requests(), PARAMS)
    replica.update_weights(weights.items())
    assert replica.generate(requests(), PARAMS) == rollout(folder).generate(requests(), PARAMS)
