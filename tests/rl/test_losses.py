import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.training.batch import AGGREGATIONS, PackedBatch, loss_totals, loss_weights
from engines.training.schedule import ModelOutputs, merge_metrics
from workflow.rl.losses import PolicyLoss, SftLoss, ValueLoss

POLICY = PolicyLoss(0.2, 0.3, entropy_coefficient=0.01, kl_coefficient=0.1, kl_estimator="k3")
LOSSES = [POLICY, PolicyLoss(0.2, 0.2), ValueLoss(0.2), SftLoss()]
FIELDS = ("old_log_probs", "reference_log_probs", "advantages", "old_values", "returns")


def random_batch(lengths, seed=0):
    """A batch with every field that a loss reads, and a model's outputs for it."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = (torch.rand(total, generator=generator) < 0.7).float()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask[cu_seqlens[:-1]] = 0
    tokens = {name: torch.randn(total, generator=generator) for name in FIELDS}
    outputs = torch.randn(3, total, generator=generator)
    return PackedBatch({"loss_mask": mask, **tokens}, {}, cu_seqlens), outputs


def evaluate(loss, batch, outputs):
    log_probs, entropy, values = outputs
    return loss(ModelOutputs(log_probs, entropy, values), batch)


def slow_policy_term(new, old, reference, advantage, entropy):
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 0.8), 1.3)
    kl = math.exp(reference - new) - 1 - (reference - new)
    return -min(ratio * advantage, clipped * advantage) - 0.01 * entropy + 0.1 * kl


def test_policy_terms_are_their_formula():
    batch, outputs = random_batch([9, 5, 12])
    terms, metrics = evaluate(POLICY, batch, outputs)
    columns = [batch.tokens[name].tolist() for name in ("old_log_probs", "reference_log_probs", "advantages")]
    expected = [slow_policy_term(n, o, r, a, e) for n, o, r, a, e in zip(outputs[0].tolist(), *columns, outputs[1].tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(terms, torch.tensor(expected), atol=1e-4, rtol=1e-5)
    mask = batch.tokens["loss_mask"]
    ratio = (outputs[0] - batch.tokens["old_log_probs"]).exp()
    advantages = batch.tokens["advantages"]
    chosen = {
        "ratio": ratio,
        "entropy": outputs[1],
        "clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).float(),
        "clip_fraction_high": ((ratio > 1.3) & (advantages > 0)).float(),
        "ratio_deviation": (ratio - 1).abs(),
    }
    for name, field in chosen.items():
        assert metrics[name] == pytest.approx(((field * mask).sum().item(), mask.sum().item()), rel=1e-5)


@pytest.mark.parametrize(
    ("new", "advantage", "moves"),
    [(0.0, 1.0, True), (0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)],
)
def test_clipping_stops_only_the_gradient_that_goes_further_away(new, advantage, moves):
    batch = PackedBatch(
        {
            "loss_mask": torch.ones(1),
            "old_log_probs": torch.zeros(1),
            "advantages": torch.tensor([advantage]),
        },
        {},
        torch.tensor([0, 1]),
    )
    log_probs = torch.tensor([new], requires_grad=True)
    terms, _ = PolicyLoss(0.2, 0.2)(ModelOutputs(log_probs, torch.zeros(1), None), batch)
    terms.sum().backward()
    assert bool(log_probs.grad.abs() > 0) is moves


def test_value_terms_are_their_formula():
    batch, outputs = random_batch([9, 5])
    terms, metrics = evaluate(ValueLoss(0.2), batch, outputs)
    expected = []
    for value, old, target in zip(
        outputs[2].tolist(), *(batch.tokens[n].tolist() for n in ("old_values", "returns")), strict=True
    ):
        clipped = min(max(value, old - 0.2), old + 0.2)
        expected.append(max((value - target) ** 2, (clipped - target) ** 2) / 2)
    torch.testing.assert_close(terms, torch.tensor(expected))
    mask = batch.tokens["loss_mask"]
    error = ((outputs[2] - batch.tokens["returns"]).square() * mask).sum().item()
    assert metrics["value_error"] == pytest.approx((error, mask.sum().item()))


def test_sft_terms_are_negative_log_likelihoods():
    batch, outputs = random_batch([4])
    terms, metrics = evaluate(SftLoss(), batch, outputs)
    assert torch.equal(terms, -outputs[0])
    assert metrics["nll"][1] == batch.tokens["loss_mask"].sum().item()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_losses_travel_to_workers(loss):
    assert pickle.loads(pickle.dumps(loss)) == loss


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=7),
    st.sampled_from(LOSSES),
    st.sampled_from(AGGREGATIONS),
    st.randoms(use_true_random=False),
)
def test_any_split_gives_the_same_loss_gradient_and_metrics(lengths, loss, aggregation, random):
    """Over ranks and micro-batches alike: a split is a partition of the sequences, in any order."""
    batch, outputs = random_batch(lengths, seed=sum(lengths))
    batch = batch.with_tokens(where=torch.arange(batch.num_tokens))
    weight = loss_weights(batch, aggregation, loss_totals(batch), max_length=16)
    batch = batch.with_tokens(weight=weight)

    def run(parts):
        leaf = outputs.clone().requires_grad_()
        total, metrics = 0.0, {}
        for indices in parts:
            piece = batch.select(indices)
            terms, found = evaluate(loss, piece, leaf[:, piece.tokens["where"]])
            total = total + (terms * piece.tokens["weight"]).sum()
            merge_metrics(metrics, found)
        total.backward()
        return total.detach(), leaf.grad, metrics

    order = list(range(len(lengths)))
    whole = run([order])
    random.shuffle(order)
    cuts = sorted(random.sample(range(1, len(order)), random.randrange(0, len(order))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    split = run(parts)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-5, atol=1e-6)
    for name, (total, count) in whole[2].items():
        assert split[2][name] == pytest.approx((total, count), rel=1e-5, abs=1e-6)


def test_prompt_tokens_earn_no_gradient():
    batch, outputs = random_batch([6, 6])
    weight = loss_weights(batch, "token-mean", loss_totals(batch))
    leaf = outputs.clone().requires_grad_()
    terms, _ = evaluate(POLICY, batch, leaf)
    (terms * weight).sum().backward()
    assert bool((leaf.grad[:, batch.tokens["loss_mask"] == 0] == 0).all())
