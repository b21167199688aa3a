"""The Megatron engine under the key of Ascend's NPUs: the same code, which MindSpeed has adapted by the time it is imported."""

from __future__ import annotations

from typing import ClassVar

from engines.catalog import MINDSPEED
from engines.limits import MegatronLimits
from engines.registry import EngineRegistry
from engines.training.megatron.engine import MegatronLanguageModel, MegatronValueModel


@EngineRegistry.register(model_type="language_model", backend="megatron", device="npu")
class MindSpeedLanguageModel(MegatronLanguageModel):
    """Log-probs and entropy."""

    limits: ClassVar[MegatronLimits] = MINDSPEED


@EngineRegistry.register(model_type="value_model", backend="megatron", device="npu")
class MindSpeedValueModel(MegatronValueModel):
    """Values."""

    limits: ClassVar[MegatronLimits] = MINDSPEED
