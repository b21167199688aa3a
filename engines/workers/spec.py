"""What a role is, in plain data: it travels to worker processes and loads no framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.config import EngineConfig, LayoutConfig, OptimizerConfig


@dataclass(frozen=True)
class RoleSpec:
    """One role (actor, critic, reference, reward) and the engine it runs on."""

    name: str
    model_type: str
    """"language_model" or "value_model"."""
    engine: EngineConfig
    """With ``backend`` and ``device`` resolved (not "auto"): planning decides, workers obey."""
    model_path: Path
    """Hugging Face folder that the weights start from."""
    optimizer: OptimizerConfig | None = None
    """None for a role that is never updated (``engine.forward_only``)."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    temperature: float = 1.0
    """Logits are divided by it, as the rollout does."""

    @property
    def placement(self) -> tuple[str, str, LayoutConfig]:
        """Roles with equal placement share worker processes; all others have processes of their own.

        Megatron's parallel state is process-wide, so two of its layouts, or Megatron beside another backend,
        must never meet in one process; that no two placements share one holds for every backend alike.
        """
        return self.engine.backend, self.engine.device, self.engine.layout
