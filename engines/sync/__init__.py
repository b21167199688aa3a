"""Weight sync: checkpoint engines carry weights from training ranks to rollout replicas."""

from engines.sync.base import CheckpointEngine
from engines.sync.naive import NaiveCheckpointEngine

__all__ = ["CheckpointEngine", "NaiveCheckpointEngine"]
