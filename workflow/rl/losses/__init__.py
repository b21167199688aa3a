"""The losses, as terms per token. Their aggregation is fixed by weights before any split (docs: exact loss).

Each is a frozen dataclass, so it travels to worker processes, and follows ``engines.training.base.LossFunction``: called
with a micro-batch's outputs and the micro-batch, it returns terms (tokens,) aligned with the weights, and metrics as
(sum, count) over loss tokens.
"""

from workflow.rl.losses.policy import PolicyLoss
from workflow.rl.losses.ratios import Ratios
from workflow.rl.losses.supervised import SftLoss, ValueLoss

__all__ = ["PolicyLoss", "Ratios", "SftLoss", "ValueLoss"]
