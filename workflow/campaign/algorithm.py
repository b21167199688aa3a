"""The typed configuration of the objective: which estimator, which loss, what is penalised, corrected and left out. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from engines.config import AdamWConfig, Config
from workflow.campaign.objectives import NONE, OPTIONAL, STRAIGHT_THROUGH, Objective, find, tables

MAX_KL_ERROR = 0.2
"""Adaptive: how far a step's KL counts as off its target, as a share of it."""


class KLConfig(Config):
    """Divergence from the reference policy (the SFT checkpoint)."""

    place: Literal["none", "reward", "loss"] = "none"
    """Where the penalty goes; none builds no reference model."""
    estimator: str = "k3"
    """k1, k2, k3, abs (Schulman, Approximating KL Divergence), or module:function. With + behind it (only with place=loss) its value has the gradient of k2, which is that of the KL."""
    coefficient: float = Field(0.001, ge=0)
    """Weight of the penalty (the initial one when adaptive)."""
    adaptive: bool = False
    """Ziegler et al., Fine-Tuning Language Models from Human Preferences, section 2.2."""
    target: float = Field(0.1, gt=0)
    """Adaptive: the KL aimed at, per response."""
    horizon: int = Field(10_000, ge=1)
    """Adaptive: samples over which the coefficient adapts; more than a fifth of a step's."""

    @property
    def straight_through(self) -> bool:
        """Whether the estimator's value has the gradient of k2."""
        return self.estimator.endswith(STRAIGHT_THROUGH)

    @property
    def divergence(self) -> Objective:
        """The row of the estimator."""
        return find("kl.estimator", self.estimator)

    @field_validator("estimator")
    @classmethod
    def _known(cls, name: str) -> str:
        find("kl.estimator", name)
        return name

    @model_validator(mode="after")
    def _places(self) -> KLConfig:
        if self.adaptive and self.place == "none":
            raise ValueError("adaptive=true needs place=reward or place=loss")
        if self.adaptive and self.coefficient == 0:
            raise ValueError("coefficient=0: adaptive=true multiplies it, so it stays 0; it must be above 0")
        if self.straight_through and self.place == "reward":
            raise ValueError(
                f"estimator={self.estimator!r}: a reward has no gradient, so + changes nothing with place=reward; "
                f"write {self.estimator.removesuffix(STRAIGHT_THROUGH)}"
            )
        return self


class SapoConfig(Config):
    """The soft gate of policy_loss=sapo (Gao et al., Soft Adaptive Policy Optimization)."""

    temperature_positive: float = Field(1.0, gt=0)
    """Steepness of the gate for advantages above 0."""
    temperature_negative: float = Field(1.05, gt=0)
    """Steepness for the others; the larger, the faster a token far from the old policy loses its gradient."""


class CovarianceConfig(Config):
    """Which tokens policy_loss=clip_cov and kl_cov choose (Cui et al., The Entropy Mechanism of RL for Reasoning LMs)."""

    share: float = Field(0.0002, gt=0, lt=1)
    """Share of a mini-batch's loss tokens that is chosen, at least one."""
    low: float = 1.0
    """clip_cov: only among tokens whose covariance is above this ..."""
    high: float = 5.0
    """... and below this."""
    coefficient: float = Field(1.0, gt=0)
    """kl_cov: weight of the penalty on the chosen tokens."""

    @model_validator(mode="after")
    def _bounds(self) -> CovarianceConfig:
        if self.low >= self.high:
            raise ValueError(f"low={self.low}: must be below high={self.high}")
        return self


class CorrectionConfig(Config):
    """What is done about a rollout that does not compute quite the policy that is trained: w = p_old / p_rollout."""

    weights: str = NONE
    """none, token, sequence: multiply each token's policy term by w, of the token or the product over its response; or module:function."""
    bound: str = "truncate"
    """truncate: min(w, high) (Yao et al., truncated importance sampling). mask: 0 outside of low to high (IcePop). Or module:function."""
    low: float = Field(0.5, gt=0)
    """mask: smallest w that counts."""
    high: float = Field(2.0, gt=0)
    """Largest w."""
    reject: str = NONE
    """none, mean, product: reject whole responses by the geometric mean or the product of w over their tokens; they leave their group too. Or module:function."""
    reject_low: float = Field(0.99, gt=0)
    """Smallest mean or product that is kept."""
    reject_high: float = Field(1.01, gt=0)
    """Largest mean or product that is kept."""

    @property
    def weighting(self) -> Objective | None:
        """The row of the weights."""
        return None if self.weights == NONE else find("correction.weights", self.weights)

    @property
    def bounding(self) -> Objective:
        """The row of their bound."""
        return find("correction.bound", self.bound)

    @property
    def rejection(self) -> Objective | None:
        """The row of what responses are rejected by."""
        return None if self.reject == NONE else find("correction.reject", self.reject)

    @field_validator("weights", "bound", "reject")
    @classmethod
    def _known(cls, name: str, info: Any) -> str:
        key = f"correction.{info.field_name}"
        if name != NONE or key not in OPTIONAL:
            find(key, name)
        return name

    @model_validator(mode="after")
    def _bounds(self) -> CorrectionConfig:
        for low, high in (("low", "high"), ("reject_low", "reject_high")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)}: must be below {high}={getattr(self, high)}")
        return self


class FilterConfig(Config):
    """Dynamic sampling (Yu et al., DAPO, section 3.2): prompts whose samples are all alike are replaced by others."""

    by: Literal["none", "reward", "accuracy"] = "none"
    """What must differ between the samples of a prompt; none is off."""
    max_rounds: int = Field(8, ge=2)
    """Rounds of sampling in one step; what is still missing then is filled up with prompts that were left out, which have no advantage."""


class AlgorithmConfig(Config):
    """The objective and the size of an iteration."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """For folders and reports. sft: no RL, the supervised stage goes on for so many steps (a control experiment)."""
    steps: int = Field(60, ge=1)
    """Iterations of the whole run."""
    prompts_per_step: int = Field(64, ge=1)
    """Prompts per iteration."""
    samples_per_prompt: int = Field(8, ge=1)
    """Responses per prompt."""
    mini_batch_size: int = Field(512, ge=1)
    """Sequences per optimizer step; must divide prompts_per_step x samples_per_prompt."""
    epochs: int = Field(1, ge=1)
    """Passes over an iteration's samples."""
    shuffle: bool = False
    """Shuffle samples before mini-batches are cut, anew in each epoch."""
    aggregation: str = "token-mean"
    """How token terms become one loss: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm, or module:function."""
    advantage: str | None = None
    """Advantage estimator: a name of the table in docs/objectives.md, or module:function. Not set: grpo or gae, as name is grpo or ppo."""
    policy_loss: str = "ppo"
    """Policy loss: a name of the table in docs/objectives.md, or module:function."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower clip of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clip of the probability ratio: 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """ppo loss: where the advantage is negative, the term is at most -dual_clip x advantage; off when not set."""
    sapo: SapoConfig = SapoConfig()
    """Settings of the loss sapo."""
    covariance: CovarianceConfig = CovarianceConfig()
    """Settings of the losses clip_cov and kl_cov."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Entropy bonus."""
    normalize_by_std: bool = True
    """grpo, pass_at_k: divide a group's advantages by its standard deviation. gae: whiten advantages over the batch."""
    pass_k: int = Field(2, ge=2)
    """pass_at_k: how many samples of a prompt are judged by their best one; at most samples_per_prompt."""
    gamma: float = Field(1.0, ge=0, le=1)
    """gae, reinforce_plus_plus: discount."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """gae: lambda (Schulman et al., High-Dimensional Continuous Control Using GAE, equation 16)."""
    value_clip: float = Field(0.2, gt=0)
    """gae: clip range of the value loss."""
    critic_warmup_steps: int = Field(0, ge=0)
    """gae: first iterations in which only the critic learns."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """Where the ratio's denominator comes from: a pass of the training engine, or what the rollout recorded."""
    correction: CorrectionConfig = CorrectionConfig()
    """Rollout correction."""
    filter: FilterConfig = FilterConfig()
    """Dynamic sampling."""
    options: dict[str, Any] = {}
    """Settings of a third party's estimator or loss, which is given this whole section."""
    kl: KLConfig = KLConfig()
    """Penalty against the reference."""
    lr: float = Field(1e-4, gt=0, le=1)
    """The actor's peak learning rate."""
    optimizer: AdamWConfig = AdamWConfig()
    """The actor's other AdamW settings; its engine is given optimizer.at(lr)."""
    critic_lr: float = Field(5e-4, gt=0, le=1)
    """gae: the critic's peak learning rate."""
    critic_optimizer: AdamWConfig = AdamWConfig()
    """gae: the critic's other AdamW settings."""

    @property
    def samples_per_step(self) -> int:
        """Sequences of one iteration."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def estimator(self) -> Objective:
        """The row of the advantage estimator."""
        return find("advantage", self.advantage or _ESTIMATOR_OF[self.name])

    @property
    def surrogate(self) -> Objective:
        """The row of the policy loss."""
        return find("policy_loss", self.policy_loss)

    @property
    def aggregator(self) -> Objective:
        """The row of the aggregation."""
        return find("aggregation", self.aggregation)

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.name != "sft" and self.estimator.critic

    @field_validator("advantage", "policy_loss", "aggregation")
    @classmethod
    def _known(cls, name: str | None, info: Any) -> str | None:
        if name is not None:
            find(info.field_name, name)
        return name

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmConfig:
        tables()  # refuses what third parties may not add
        if self.advantage is None and self.name not in _ESTIMATOR_OF:
            raise ValueError(
                f"name={self.name!r}: only {', '.join(map(repr, _ESTIMATOR_OF))} say which advantage estimator is meant; "
                "set algorithm.advantage"
            )
        if self.samples_per_step % self.mini_batch_size:
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} does not divide prompts_per_step x samples_per_prompt = {self.samples_per_step}"
            )
        if self.name != "sft":
            _check_samples(self)
        if self.kl.adaptive:
            _check_adaptive(self.kl, self.samples_per_step)
        if self.correction != CorrectionConfig() and self.old_log_probs == "rollout":
            raise ValueError(
                "old_log_probs='rollout': takes the rollout's log-probs for those of the trained policy, so correction "
                "has nothing to correct; recompute them"
            )
        return self


_ESTIMATOR_OF = {"grpo": "grpo", "ppo": "gae", "sft": "grpo"}


def _check_samples(algorithm: AlgorithmConfig) -> None:
    """Refuse fewer samples of a prompt than the objective needs."""
    size, name = algorithm.samples_per_prompt, algorithm.estimator.name
    needs = []
    if algorithm.estimator.compares:
        needs.append((2, f"advantage={name!r} compares the samples of a prompt"))
    if name == "pass_at_k":
        needs.append((algorithm.pass_k, f"the best of pass_k={algorithm.pass_k} samples is judged"))
    if algorithm.filter.by != "none":
        needs.append((2, f"filter.by={algorithm.filter.by!r} looks for differences between the samples of a prompt"))  # fmt: skip
    for least, why in needs:
        if size < least:
            raise ValueError(f"samples_per_prompt={size}: {why}, so at least {least} are needed")


def _check_adaptive(kl: KLConfig, samples: int) -> None:
    """Refuse a coefficient that one step of ``samples`` could take to 0 or below, where it rewards divergence."""
    if kl.horizon <= MAX_KL_ERROR * samples:
        raise ValueError(
            f"kl.horizon={kl.horizon}: with kl.adaptive=true and {samples} samples per step (prompts_per_step x "
            "samples_per_prompt) one step could take the coefficient to 0 or below; "
            f"at least {int(MAX_KL_ERROR * samples) + 1} is needed"
        )
