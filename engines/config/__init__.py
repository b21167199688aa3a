"""Typed configurations of engines, optimizers, rollout and checkpoints. Importing them loads no framework."""

from engines.config.base import Config, ConfigError, nearest, parse
from engines.config.engine import (
    AdamWConfig,
    CheckpointConfig,
    EngineConfig,
    LayoutConfig,
    OffloadConfig,
    OptimizerConfig,
    RolloutConfig,
    SchedulerConfig,
)

__all__ = [
    "AdamWConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "EngineConfig",
    "LayoutConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "RolloutConfig",
    "SchedulerConfig",
    "nearest",
    "parse",
]
