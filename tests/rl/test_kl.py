import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config import ConfigError, parse
from workflow.campaign.algorithm import AlgorithmConfig, KLConfig
from workflow.campaign.objectives import KL_ESTIMATORS
from workflow.rl.kl import KLController, kl_estimate

ESTIMATORS = [row.name for row in KL_ESTIMATORS]


def estimate(policy, reference, estimator):
    """The estimate with nothing else configured."""
    return kl_estimate(policy, reference, KLConfig(place="loss", estimator=estimator))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_formulas(estimator):
    policy, reference = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([-1.0, -1.5, -0.25])
    slow = {
        "k1": lambda p, q: p - q,
        "k2": lambda p, q: (q - p) ** 2 / 2,
        "k3": lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p),
        "abs": lambda p, q: abs(p - q),
    }[estimator]
    expected = [slow(p, q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True)]
    assert estimate(policy, reference, estimator).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_exact_mean(estimator):
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.1]).double(), 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, 0.5, -0.3]).double(), 0)
    exact = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * estimate(policy, reference, estimator)).sum()
    torch.testing.assert_close(mean, exact)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_straight_through_has_the_estimators_value_and_the_gradient_of_the_kl(estimator):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1]).double().requires_grad_()
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, 0.5, -0.3]).double(), 0)
    found = estimate(policy, reference, f"{estimator}+")
    torch.testing.assert_close(found, estimate(policy, reference, estimator))
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (mean,) = torch.autograd.grad((policy.exp().detach() * found).sum(), logits)
    torch.testing.assert_close(mean, exact)


def test_gradients_without_straight_through():
    """Over samples of the policy: nothing for k1, the reverse KL's for k3."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1]).double().requires_grad_()
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, 0.5, -0.3]).double(), 0)
    sampled = policy.exp().detach()
    (of_k1,) = torch.autograd.grad((sampled * estimate(policy, reference, "k1")).sum(), logits, retain_graph=True)  # fmt: skip
    torch.testing.assert_close(of_k1, torch.zeros(4).double())
    (of_k3,) = torch.autograd.grad((sampled * estimate(policy, reference, "k3")).sum(), logits, retain_graph=True)  # fmt: skip
    (reverse,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
    torch.testing.assert_close(of_k3, reverse)


def test_far_apart_policies_stay_finite():
    far = torch.tensor([-1000.0]), torch.tensor([0.0])
    assert all(torch.isfinite(estimate(*far, estimator)).all() for estimator in ESTIMATORS)


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_k3_is_not_bounded_where_the_policy_has_left_the_reference(estimator):
    """At log r = -25 the value is its definition, and the gradient is k3's, 1 - r (or k2's, -log r)."""
    policy = torch.tensor([-0.1], dtype=torch.float64, requires_grad=True)
    found = estimate(policy, policy.detach() - 25, estimator)
    assert found.item() == pytest.approx(math.exp(-25) - 1 + 25)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert gradient.item() == pytest.approx({"k3": 1 - math.exp(-25), "k3+": 25}[estimator])


@pytest.mark.parametrize("apart", [1e-7, -1e-7, 0.0, 1e-6])
def test_rounding_decides_no_gradient_of_the_absolute_value(apart):
    """Equal policies that were computed in two splits: the sign of what is between them says nothing."""
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = estimate(policy, policy.detach() + apart, "abs")
    assert found.item() == pytest.approx(abs(apart))
    assert torch.autograd.grad(found.sum(), policy)[0].item() == 0
    found = estimate(policy, policy.detach() + 1e-4, "abs")
    assert torch.autograd.grad(found.sum(), policy)[0].item() == -1


def test_k3_leads_nowhere_where_it_would_overflow():
    policy = torch.tensor([-25.0, -1000.0], requires_grad=True)
    found = estimate(policy, torch.zeros(2), "k3")
    torch.testing.assert_close(found.detach(), torch.full((2,), math.expm1(20) - 20))
    assert torch.autograd.grad(found.sum(), policy)[0].tolist() == [0, 0]


def adaptive(**values) -> KLConfig:
    values = {
        "place": "reward",
        "adaptive": True,
        "coefficient": 0.1,
        "target": 2.0,
        "horizon": 1000,
        **values,
    }
    return parse(KLConfig, values)


@pytest.mark.parametrize(
    ("divergence", "factor"),
    [(2.0, 1.0), (2.2, 1 + 0.1 * 50 / 1000), (100.0, 1 + 0.2 * 50 / 1000), (0.0, 1 - 0.2 * 50 / 1000)],
)
def test_adaptive_coefficient(divergence, factor):
    controller = KLController.start(adaptive())
    controller.update(divergence, samples=50)
    assert controller.coefficient == pytest.approx(0.1 * factor)
    restored = KLController.start(adaptive())
    restored.load_state(controller.state())
    assert restored == controller


def test_adaptive_coefficient_finds_its_target():
    """A policy whose KL is inversely proportional to the coefficient settles where KL = target."""
    controller = KLController.start(adaptive())
    for _ in range(2000):
        controller.update(0.02 / controller.coefficient, samples=50)
    assert 0.02 / controller.coefficient == pytest.approx(2.0, rel=1e-3)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 300),
    st.sampled_from([0.0, 1e-3, 0.5]),
    st.lists(st.floats(0, 4), min_size=1, max_size=20),
)
def test_adaptive_coefficient_stays_above_zero_wherever_it_is_accepted(
    prompts, samples, horizon, coefficient, seen
):
    kl = {"place": "loss", "adaptive": True, "horizon": horizon, "coefficient": coefficient}
    sizes = {"prompts_per_step": prompts, "samples_per_prompt": samples + 1, "mini_batch_size": 1}
    config = {"name": "grpo", **sizes, "kl": kl}
    taken_off = Fraction(1, 5) * prompts * (samples + 1) / horizon
    if coefficient == 0 or taken_off >= 1:
        with pytest.raises(ConfigError, match=r"algorithm\.kl\.(horizon|coefficient)="):
            parse(AlgorithmConfig, config, "algorithm")
        return
    algorithm = parse(AlgorithmConfig, config, "algorithm")
    controller = KLController.start(algorithm.kl)
    for divergence in seen:
        controller.update(divergence, algorithm.samples_per_step)
        assert controller.coefficient > 0


def test_fixed_coefficient_stays():
    controller = KLController.start(parse(KLConfig, {"place": "loss", "coefficient": 0.1}))
    controller.update(100.0, samples=50)
    assert controller.coefficient == 0.1
    assert adaptive(place="loss").adaptive
    with pytest.raises(ConfigError, match="adaptive=true needs place=reward or place=loss"):
        adaptive(place="none")
    with pytest.raises(ConfigError, match=r"a reward has no gradient.*write k3"):
        adaptive(estimator="k3+")
