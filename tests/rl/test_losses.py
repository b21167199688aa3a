"""Every loss against a slow reference of its formula and its gradient, and what all of them promise."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.training.batch import AGGREGATIONS, PackedBatch, loss_totals, loss_weights
from engines.training.schedule import ModelOutputs, merge_metrics
from workflow.campaign.objectives import KL_ESTIMATORS, POLICY_LOSSES
from workflow.campaign.schema import AlgorithmConfig
from workflow.rl.losses import PolicyLoss, SftLoss, ValueLoss
from workflow.rl.losses.selection import covariances

NAMES = [row.name for row in POLICY_LOSSES]
ESTIMATORS = [row.name for row in KL_ESTIMATORS]
FIELDS = ("old_log_probs", "reference_log_probs", "advantages", "old_values", "returns")
COVARIANCE = {"share": 0.2, "low": 0.1, "high": 0.9, "coefficient": 0.7}


def policy(name="ppo", **values):
    """The loss ``name`` with every setting away from what changes nothing."""
    settings_ = {"clip_low": 0.2, "clip_high": 0.3, "covariance": COVARIANCE, **values}
    return PolicyLoss(AlgorithmConfig(name="grpo", policy_loss=name, **settings_), kl_coefficient=0.1)


EXTRAS = {
    "entropy_coefficient": 0.01,
    "kl": {"place": "loss", "estimator": "k3"},
    "correction": {"weights": "token"},
}
PENALTIES = [*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS)]
LOSSES = [
    *(policy(name) for name in NAMES),
    policy(dual_clip=2.0, **EXTRAS),
    *(policy(kl={"place": "loss", "estimator": estimator}) for estimator in PENALTIES),
    ValueLoss(0.2),
    SftLoss(),
]
every_policy = pytest.mark.parametrize("name", NAMES)
LOSS_NAMES = [*NAMES, "ppo with everything", *PENALTIES, "ValueLoss", "SftLoss"]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_NAMES)


def random_batch(lengths, seed=0):
    """A batch with every field that a loss reads, and a model's outputs for it."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = (torch.rand(total, generator=generator) < 0.7).float()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask[cu_seqlens[:-1]] = 0
    tokens = {name: torch.randn(total, generator=generator) for name in FIELDS}
    tokens |= {name: torch.rand(total, generator=generator) for name in ("noise", "correction")}
    outputs = torch.randn(3, total, generator=generator)
    return PackedBatch({"loss_mask": mask, **tokens}, {}, cu_seqlens), outputs


def evaluate(loss, batch, outputs):
    log_probs, entropy, values = outputs
    return loss(ModelOutputs(log_probs, entropy, values), batch)


def selected(loss, batch, outputs):
    """The batch with what the loss chooses from it as a whole."""
    chooses = isinstance(loss, PolicyLoss) and loss.algorithm.surrogate.selects
    return loss.select(batch, outputs[0]) if chooses else batch


# ---- slow references: of one sequence, the terms of its loss tokens and the gradient of their sum, derived by hand -----


def clipped(ratio, a, config):
    """ppo's term, and its derivative by the log of the ratio."""
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -min(ratio * a, bounded * a), -ratio * a if ratio * a <= bounded * a else 0.0


def slow_ppo(new, old, a, chosen, config):
    pairs = [clipped(math.exp(n - o), x, config) for n, o, x in zip(new, old, a, strict=True)]
    if config.dual_clip is not None:
        pairs = [
            (-config.dual_clip * x, 0.0) if x < 0 and term > -config.dual_clip * x else (term, slope)
            for (term, slope), x in zip(pairs, a, strict=True)
        ]
    return pairs


def slow_gspo(new, old, a, chosen, config):
    ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
    return [clipped(ratio, x, config) for x in a]


def slow_cispo(new, old, a, chosen, config):
    pairs = []
    for n, o, x in zip(new, old, a, strict=True):
        weight = min(max(math.exp(n - o), 1 - config.clip_low), 1 + config.clip_high)
        pairs.append((-weight * x * n, -weight * x))
    return pairs


def slow_gmpo(new, old, a, chosen, config):
    product, inside = 1.0, []
    for n, o, x in zip(new, old, a, strict=True):
        ratio, sign = math.exp(n - o), -1 if x < 0 else 1
        bounded = min(max(ratio, math.exp(-config.clip_low)), math.exp(config.clip_high))
        worse = sign * min(sign * ratio, sign * bounded)
        inside.append(worse == ratio)
        product *= worse
    mean = product ** (1 / len(new))
    return [(-x * mean, -sum(a) * mean / len(new) if i else 0.0) for x, i in zip(a, inside, strict=True)]


def slow_sapo(new, old, a, chosen, config):
    pairs = []
    for n, o, x in zip(new, old, a, strict=True):
        tau = config.sapo.temperature_positive if x > 0 else config.sapo.temperature_negative
        ratio = math.exp(n - o)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        pairs.append((-x * gate * 4 / tau, -x * 4 * gate * (1 - gate) * ratio))
    return pairs


def slow_clip_cov(new, old, a, chosen, config):
    pairs = slow_ppo(new, old, a, chosen, config)
    return [(0.0, 0.0) if c else pair for pair, c in zip(pairs, chosen, strict=True)]


def slow_kl_cov(new, old, a, chosen, config):
    pairs = []
    for n, o, x, c in zip(new, old, a, chosen, strict=True):
        penalty = config.covariance.coefficient * c
        pairs.append(
            (
                -math.exp(n - o) * x + penalty * abs(n - o),
                -math.exp(n - o) * x + penalty * math.copysign(1, n - o),
            )
        )
    return pairs


def slow_reinforce(new, old, a, chosen, config):
    return [(-x * n, -x) for n, x in zip(new, a, strict=True)]


SLOW = {
    "ppo": slow_ppo,
    "gspo": slow_gspo,
    "cispo": slow_cispo,
    "gmpo": slow_gmpo,
    "sapo": slow_sapo,
    "clip_cov": slow_clip_cov,
    "kl_cov": slow_kl_cov,
    "reinforce": slow_reinforce,
}


def test_every_policy_loss_has_a_reference():
    assert set(SLOW) == set(NAMES)


@pytest.mark.parametrize(
    "loss", [*LOSSES[: len(NAMES)], policy(dual_clip=1.5)], ids=[*NAMES, "ppo, dual clip"]
)
@settings(deadline=None, max_examples=20)
@given(lengths=st.lists(st.integers(2, 8), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_a_policy_loss_is_its_formula_and_gradient(loss, lengths, seed):
    batch, outputs = random_batch(lengths, seed)
    batch = selected(loss, batch, outputs)
    leaf = outputs[0].clone().requires_grad_()
    terms, _ = evaluate(loss, batch, (leaf, *outputs[1:]))
    (terms * batch.tokens["loss_mask"]).sum().backward()
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        rows = [t for t in range(start, end) if batch.tokens["loss_mask"][t]]
        if not rows:
            continue
        chosen = batch.tokens.get("selected", torch.zeros(batch.num_tokens))
        columns = (outputs[0], batch.tokens["old_log_probs"], batch.tokens["advantages"], chosen)
        expected = SLOW[loss.algorithm.policy_loss](*([c[t].item() for t in rows] for c in columns), loss.algorithm)  # fmt: skip
        assert terms[rows].tolist() == pytest.approx([term for term, _ in expected], rel=1e-4, abs=1e-5)
        assert leaf.grad[rows].tolist() == pytest.approx([slope for _, slope in expected], rel=1e-4, abs=1e-5)
    assert bool((leaf.grad[batch.tokens["loss_mask"] == 0] == 0).all())


@every_policy
def test_everything_else_is_added(name):
    """Correction multiplies the policy's term alone; entropy and KL penalty come on top."""
    batch, outputs = random_batch([9, 5, 12])
    plain, everything = policy(name), policy(name, **EXTRAS)
    batch = selected(plain, batch, outputs)
    surrogate, _ = evaluate(plain, batch, outputs)
    terms, metrics = evaluate(everything, batch, outputs)
    log_ratio = batch.tokens["reference_log_probs"] - outputs[0]
    penalty = log_ratio.exp() - 1 - log_ratio
    expected = surrogate * batch.tokens["correction"] - 0.01 * outputs[1] + 0.1 * penalty
    torch.testing.assert_close(terms, expected, atol=1e-4, rtol=1e-5)
    mask = batch.tokens["loss_mask"]
    assert metrics["kl"] == pytest.approx(((penalty * mask).sum().item(), mask.sum().item()), rel=1e-4)


def test_metrics_are_sums_over_loss_tokens():
    batch, outputs = random_batch([9, 5, 12])
    _, metrics = evaluate(policy(dual_clip=1.5), batch, outputs)
    mask, advantages = batch.tokens["loss_mask"], batch.tokens["advantages"]
    ratio = (outputs[0] - batch.tokens["old_log_probs"]).exp()
    chosen = {
        "ratio": ratio,
        "entropy": outputs[1],
        "clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).float(),
        "clip_fraction_high": ((ratio > 1.3) & (advantages > 0)).float(),
        "clip_fraction_dual": ((ratio > 1.5) & (advantages < 0)).float(),
        "ratio_deviation": (ratio - 1).abs(),
    }
    for name, field in chosen.items():
        assert metrics[name] == pytest.approx(((field * mask).sum().item(), mask.sum().item()), rel=1e-5)


@every_policy
def test_every_metric_is_its_definition(name):
    """Sums over loss tokens; what is counted as clipped has lost its gradient to the clip."""
    loss = policy(name)
    batch, outputs = random_batch([9, 5, 12, 7, 3])
    batch = selected(loss, batch, outputs)
    _, metrics = evaluate(loss, batch, outputs)
    expected = dict.fromkeys(metrics, 0.0)
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        rows = [t for t in range(start, end) if batch.tokens["loss_mask"][t]]
        chosen = batch.tokens.get("selected", torch.zeros(batch.num_tokens))
        columns = (outputs[0], batch.tokens["old_log_probs"], batch.tokens["advantages"], chosen)
        values = [[column[t].item() for t in rows] for column in columns]
        pairs = SLOW[name](*values, loss.algorithm) if rows else []
        for t, new, old, a, c, (term, slope) in zip(rows, *values, pairs, strict=True):
            ratio = math.exp(new - old)
            clipped_ = slope == 0 and not c if name != "cispo" else not 0.8 <= ratio <= 1.3
            low, high = (ratio < 0.8, ratio > 1.3) if name == "cispo" else (a < 0, a > 0)
            of_token = {
                "policy_loss": term,
                "entropy": outputs[1, t].item(),
                "ratio": ratio,
                "ratio_deviation": abs(ratio - 1),
                "approx_kl": ratio - 1 - (new - old),
                "clip_fraction_low": clipped_ and low,
                "clip_fraction_high": clipped_ and high,
                "selected": c,
                "gate": -term / a,
            }
            for key in expected:
                expected[key] += of_token[key]
    count = batch.tokens["loss_mask"].sum().item()
    for key, total in expected.items():
        assert metrics[key] == pytest.approx((total, count), rel=1e-4), key
    assert all(expected[key] > 0 for key in expected if "clip" in key)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    shuffle=st.randoms(use_true_random=False),
)
def test_selection_is_its_definition_in_any_order(name, lengths, seed, shuffle):
    loss = policy(name)
    batch, outputs = random_batch(lengths, seed)
    mask, old, a, noise = (
        batch.tokens[n].tolist() for n in ("loss_mask", "old_log_probs", "advantages", "noise")
    )
    new = outputs[0].tolist()
    tokens = [t for t, m in enumerate(mask) if m]
    means = [sum(f[t] for t in tokens) / max(len(tokens), 1) for f in (new, a)]
    covariance = {t: (new[t] - means[0]) * (a[t] - means[1]) for t in tokens}
    rounded = {t: torch.tensor(c, dtype=torch.float32).item() for t, c in covariance.items()}
    if name == "kl_cov":
        able, order = tokens, {t: (-rounded[t], noise[t]) for t in tokens}
    else:
        ratio = {t: math.exp(new[t] - old[t]) for t in tokens}
        clipped_ = {t for t in tokens if (ratio[t] < 0.8 and a[t] < 0) or (ratio[t] > 1.3 and a[t] > 0)}
        able = [t for t in tokens if 0.1 < covariance[t] < 0.9 and t not in clipped_]
        order = {t: (noise[t], rounded[t]) for t in tokens}
    expected = set(sorted(able, key=lambda t: order[t])[: max(int(0.2 * len(tokens)), 1)])
    found = loss.select(batch, outputs[0]).tokens["selected"]
    assert set(found.nonzero().flatten().tolist()) == expected
    indices = list(range(len(lengths)))
    shuffle.shuffle(indices)
    rows = batch.token_rows(indices)
    reordered = loss.select(batch.select(indices), outputs[0][rows]).tokens["selected"]
    assert torch.equal(reordered, found[rows])


def test_equal_noise_is_told_apart_in_any_order():
    loss = policy("clip_cov", covariance={"share": 0.1, "low": -9.0, "high": 9.0})
    batch, outputs = random_batch([6] * 4)
    batch.tokens["noise"][:] = 0.5
    found = loss.select(batch, outputs[0]).tokens["selected"]
    assert found.any()
    rows = batch.token_rows([2, 0, 3, 1])
    reordered = loss.select(batch.select([2, 0, 3, 1]), outputs[0][rows]).tokens["selected"]
    assert torch.equal(reordered, found[rows])


def test_equal_covariances_are_told_apart_in_any_order():
    """Two loss tokens alone have one covariance, whatever their values; and so have equal tokens of equal responses."""
    loss = policy("kl_cov")
    for lengths, seed in (([2, 2], 2), ([2, 2], 5), ([2] * 10, 0)):
        batch, outputs = random_batch(lengths, seed)
        batch.tokens["loss_mask"][1::2] = 1.0
        if len(lengths) > 2:
            batch.tokens["advantages"][:] = torch.tensor([1.0, 0.0]).repeat_interleave(10)
            outputs[0] = torch.tensor([-1.0, 0.0]).repeat_interleave(10)
        found = loss.select(batch, outputs[0]).tokens["selected"]
        assert found.sum() == max(int(0.2 * len(lengths)), 1)
        for indices in (range(len(lengths) - 1, -1, -1), [*range(1, len(lengths)), 0]):
            rows = batch.token_rows(list(indices))
            reordered = loss.select(batch.select(list(indices)), outputs[0][rows]).tokens["selected"]
            assert torch.equal(reordered, found[rows])


def test_covariances_over_a_batch_without_loss_tokens_are_finite():
    batch, outputs = random_batch([1, 1])
    assert torch.isfinite(covariances(batch, outputs[0])).all()
    assert not policy("kl_cov").select(batch, outputs[0]).tokens["selected"].any()


@every_policy
def test_policies_far_apart_stay_finite(name):
    batch, outputs = random_batch([6, 6])
    outputs[0] = torch.tensor([-1000.0, 0.0]).repeat(6)
    loss = policy(name)
    batch = selected(loss, batch, outputs)
    leaf = outputs.clone().requires_grad_()
    terms, _ = evaluate(loss, batch, leaf)
    terms.sum().backward()
    assert torch.isfinite(terms).all()
    assert torch.isfinite(leaf.grad[0]).all()


def test_value_terms_are_their_formula():
    batch, outputs = random_batch([9, 5])
    terms, metrics = evaluate(ValueLoss(0.2), batch, outputs)
    expected, clips = [], []
    for value, old, target in zip(
        outputs[2].tolist(), *(batch.tokens[n].tolist() for n in ("old_values", "returns")), strict=True
    ):
        clipped_value = min(max(value, old - 0.2), old + 0.2)
        expected.append(max((value - target) ** 2, (clipped_value - target) ** 2) / 2)
        clips.append((clipped_value - target) ** 2 > (value - target) ** 2)
    torch.testing.assert_close(terms, torch.tensor(expected))
    mask = batch.tokens["loss_mask"]
    error = ((outputs[2] - batch.tokens["returns"]).square() * mask).sum().item()
    assert metrics["value_error"] == pytest.approx((error, mask.sum().item()))
    assert metrics["value"] == pytest.approx(((outputs[2] * mask).sum().item(), mask.sum().item()))
    clipped_tokens = (torch.tensor(clips) * mask).sum().item()
    assert metrics["value_clip_fraction"] == (clipped_tokens, mask.sum().item())
    assert clipped_tokens > 0


def test_values_inside_the_range_do_not_count_as_clipped():
    batch, outputs = random_batch([30, 30])
    for field in (batch.tokens["old_values"], batch.tokens["returns"], outputs[2]):
        field *= 0.02
    assert evaluate(ValueLoss(0.2), batch, outputs)[1]["value_clip_fraction"][0] == 0


def test_sft_terms_are_negative_log_likelihoods():
    batch, outputs = random_batch([4])
    terms, metrics = evaluate(SftLoss(), batch, outputs)
    assert torch.equal(terms, -outputs[0])
    assert metrics["nll"][1] == batch.tokens["loss_mask"].sum().item()


@every_loss
def test_losses_travel_to_workers(loss):
    assert pickle.loads(pickle.dumps(loss)) == loss


def run(loss, aggregation, batch, outputs, parts):
    """Loss, gradient and metrics of a mini-batch that is computed in ``parts`` (lists of sequences)."""
    weight = loss_weights(batch, aggregation, loss_totals(batch), max_length=16)
    batch = batch.with_tokens(weight=weight, where=torch.arange(batch.num_tokens))
    leaf = outputs.clone().requires_grad_()
    total, metrics = 0.0, {}
    for indices in parts:
        piece = batch.select(indices)
        terms, found = evaluate(loss, piece, leaf[:, piece.tokens["where"]])
        total = total + (terms * piece.tokens["weight"]).sum()
        merge_metrics(metrics, found)
    total.backward()
    return total.detach(), leaf.grad, metrics


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    for name, (total, count) in expected[2].items():
        assert found[2][name] == pytest.approx((total, count), rel=1e-5, abs=1e-5)


@every_loss
@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=7),
    st.sampled_from([*AGGREGATIONS]),
    st.randoms(use_true_random=False),
)
def test_any_split_and_order_gives_the_same_loss_gradient_and_metrics(loss, lengths, aggregation, random):
    """Over ranks and micro-batches alike: a split is a partition of the sequences, in any order."""
    batch, outputs = random_batch(lengths, seed=sum(lengths))
    batch = selected(loss, batch, outputs)
    order = list(range(len(lengths)))
    whole = run(loss, aggregation, batch, outputs, [order])
    random.shuffle(order)
    cuts = sorted(random.sample(range(1, len(order)), random.randrange(0, len(order))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    assert_same(run(loss, aggregation, batch, outputs, parts), whole)


@every_loss
@settings(deadline=None, max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    paddings=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    aggregation=st.sampled_from([*AGGREGATIONS]),
)
def test_padding_and_masked_rows_change_nothing(loss, lengths, paddings, aggregation):
    """Tokens of mask 0 behind each sequence, and a whole sequence of them, whatever stands there."""
    batch, outputs = random_batch(lengths, seed=sum(lengths))
    expected = run(loss, aggregation, selected(loss, batch, outputs), outputs, [list(range(len(lengths)))])
    longer = [length + padding for length, padding in zip(lengths, paddings, strict=False)] + [4]
    padded, padded_outputs = random_batch(longer, seed=99)
    rows = torch.cat(
        [torch.arange(n) + s for n, s in zip(lengths, padded.cu_seqlens[:-1].tolist(), strict=False)]
    )
    padded.tokens["loss_mask"].zero_()
    for name, field in padded.tokens.items():
        field[rows] = batch.tokens[name]
    padded_outputs[:, rows] = outputs
    padded = selected(loss, padded, padded_outputs)
    total, gradient, metrics = run(loss, aggregation, padded, padded_outputs, [list(range(len(longer)))])
    assert_same((total, gradient[:, rows], metrics), expected)
    gradient[:, rows] = 0
    assert not gradient.any()
