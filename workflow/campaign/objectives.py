"""The tables of what an objective is made of: what each function is called, where it is, and what it needs. No torch.

Third parties add rows by the entry points in ``ENTRY_POINTS``, or are named in the configuration as module:function.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engines.config import nearest


class DuplicateObjectiveError(ValueError):
    """Two functions under one name."""


@dataclass(frozen=True)
class Objective:
    """One row: a function that a configuration can choose."""

    name: str
    function: str
    """module:function."""
    reads: tuple[str, ...] | None = ()
    """The keys of ``algorithm`` that not all rows of its table read; None where that is not known (a third party's)."""
    critic: bool = False
    """Estimates with the values of a critic."""
    greedy: bool = False
    """Wants the score of a greedy response to each prompt."""
    compares: bool = False
    """Compares the samples of a prompt, so it needs two of them."""
    selects: str | None = None
    """module:function that chooses tokens once per mini-batch."""

    def load(self) -> Callable[..., Any]:
        """The function; imports its module."""
        return load_function(self.function)


def load_function(path: str) -> Callable[..., Any]:
    """What module:function names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_GAE_KEYS = ("gamma", "gae_lambda", "normalize_by_std", "value_clip", "critic_warmup_steps", "critic_lr", "critic_optimizer")  # fmt: skip
_GROUPS, _RETURNS = "workflow.rl.advantages.groups", "workflow.rl.advantages.returns"
_SURROGATES, _SELECTION = "workflow.rl.losses.surrogates", "workflow.rl.losses.selection"
_WEIGHTS, _CORRECTION = "engines.training.batch.weights", "workflow.rl.correction"
_CLIP = ("clip_low", "clip_high")

ADVANTAGES = (
    Objective("gae", f"{_RETURNS}:gae", _GAE_KEYS, critic=True),
    Objective("grpo", f"{_GROUPS}:grpo", ("normalize_by_std",), compares=True),
    Objective("rloo", f"{_GROUPS}:rloo", compares=True),
    Objective("opo", f"{_GROUPS}:opo", compares=True),
    Objective("gpg", f"{_GROUPS}:gpg", compares=True),
    Objective("pass_at_k", f"{_GROUPS}:pass_at_k", ("normalize_by_std", "pass_k"), compares=True),
    Objective("reinforce_plus_plus", f"{_RETURNS}:reinforce_plus_plus", ("gamma",)),
    Objective("reinforce_plus_plus_baseline", f"{_GROUPS}:reinforce_plus_plus_baseline", compares=True),
    Objective("remax", f"{_RETURNS}:remax", greedy=True),
)
POLICY_LOSSES = (
    Objective("ppo", f"{_SURROGATES}:ppo", (*_CLIP, "dual_clip")),
    Objective("gspo", f"{_SURROGATES}:gspo", _CLIP),
    Objective("cispo", f"{_SURROGATES}:cispo", _CLIP),
    Objective("gmpo", f"{_SURROGATES}:gmpo", _CLIP),
    Objective("sapo", f"{_SURROGATES}:sapo", ("sapo",)),
    Objective(
        "clip_cov",
        f"{_SURROGATES}:clip_cov",
        (*_CLIP, "covariance.share", "covariance.low", "covariance.high"),
        selects=f"{_SELECTION}:within_bounds",
    ),
    Objective(
        "kl_cov",
        f"{_SURROGATES}:kl_cov",
        ("covariance.share", "covariance.coefficient"),
        selects=f"{_SELECTION}:largest",
    ),
    Objective("reinforce", f"{_SURROGATES}:reinforce"),
)
AGGREGATIONS = tuple(
    Objective(name, f"{_WEIGHTS}:{name.replace('-', '_')}")
    for name in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
)  # fmt: skip
KL_ESTIMATORS = (
    Objective("k1", "workflow.rl.kl:k1"),
    Objective("k2", "workflow.rl.kl:k2"),
    Objective("k3", "workflow.rl.kl:k3"),
    Objective("abs", "workflow.rl.kl:absolute"),
)
CORRECTION_WEIGHTS = (Objective("token", f"{_CORRECTION}:token"), Objective("sequence", f"{_CORRECTION}:sequence"))  # fmt: skip
CORRECTION_BOUNDS = (
    Objective("truncate", f"{_CORRECTION}:truncate"),
    Objective("mask", f"{_CORRECTION}:mask", ("correction.low",)),
)
REJECTIONS = (Objective("mean", f"{_CORRECTION}:mean"), Objective("product", f"{_CORRECTION}:product"))
TABLES = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl.estimator": KL_ESTIMATORS,
    "correction.weights": CORRECTION_WEIGHTS,
    "correction.bound": CORRECTION_BOUNDS,
    "correction.reject": REJECTIONS,
}
"""By the key of ``algorithm`` that chooses from it."""
ENTRY_POINTS = {
    "advantage": "baton.advantages",
    "policy_loss": "baton.policy_losses",
    "aggregation": "baton.aggregations",
    "kl.estimator": "baton.kl_estimators",
    "correction.weights": "baton.correction_weights",
    "correction.bound": "baton.correction_bounds",
    "correction.reject": "baton.rejections",
}
STRAIGHT_THROUGH = "+"
"""Behind the name of a KL estimator: its value with another gradient."""
NONE = "none"
OPTIONAL = ("correction.weights", "correction.reject")
"""The keys that are ``NONE`` where nothing is chosen."""


def find(key: str, name: str) -> Objective:
    """The row that ``algorithm.<key>=name`` chooses; module:function is a row of its own.

    Raises:
        ValueError: there is no such row; with the nearest name.
        DuplicateObjectiveError: see :func:`tables`; never for a row of Baton's own, which needs no look at what is installed.
    """
    if key == "kl.estimator":
        name = name.removesuffix(STRAIGHT_THROUGH)
    if ":" in name:
        return Objective(name, name, reads=None)
    for row in TABLES[key]:
        if row.name == name:
            return row
    rows = tables()[key]
    if name not in rows:
        known = [*rows, *([NONE] if key in OPTIONAL else [])]
        raise ValueError(f"unknown; {nearest(name, known)} (or module:function)")
    return rows[name]


@cache
def tables() -> Mapping[str, Mapping[str, Objective]]:
    """All rows by key and name, third parties' included.

    Raises:
        DuplicateObjectiveError: two of them have one name, or a third party's name means something else.
    """
    points = importlib.metadata.entry_points()
    return {
        key: _by_name(
            key,
            [*TABLES[key], *(Objective(p.name, p.value, reads=None) for p in points.select(group=ENTRY_POINTS[key]))],
        )
        for key in TABLES
    }  # fmt: skip


def _by_name(key: str, rows: Iterable[Objective]) -> dict[str, Objective]:
    found: dict[str, Objective] = {}
    for row in rows:
        if row.name == NONE or row.name.endswith(STRAIGHT_THROUGH) or ":" in row.name:
            raise DuplicateObjectiveError(
                f"the entry point {row.name!r} in {ENTRY_POINTS[key]} has a name that means something else in "
                f"algorithm.{key}: rename it"
            )
        other = found.setdefault(row.name, row)
        if other.function != row.function:
            raise DuplicateObjectiveError(
                f"algorithm.{key}={row.name!r} is {other.function}; {row.function} cannot be it too: "
                f"rename the entry point in {ENTRY_POINTS[key]}"
            )
    return found
