"""Training states on disk: atomic, hashed, reshardable. Reading and verifying them loads no framework.

The tensors themselves are written and read by :mod:`engines.checkpoint.shards`, which imports torch.
"""

from engines.checkpoint.errors import (
    StateDamaged,
    StateDiskFull,
    StateError,
    StateExists,
    StateFormatUnknown,
    StateIncomplete,
    StateKeyMismatch,
    StateShapeMismatch,
)
from engines.checkpoint.index import ShardIndex, ShardRecord, TensorRecord
from engines.checkpoint.store import StateStore
from engines.checkpoint.verify import read_state, verify_state

__all__ = [
    "ShardIndex",
    "ShardRecord",
    "StateDamaged",
    "StateDiskFull",
    "StateError",
    "StateExists",
    "StateFormatUnknown",
    "StateIncomplete",
    "StateKeyMismatch",
    "StateShapeMismatch",
    "StateStore",
    "TensorRecord",
    "read_state",
    "verify_state",
]
