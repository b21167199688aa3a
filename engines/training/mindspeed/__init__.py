"""Megatron-core on Ascend's NPUs through MindSpeed, which changes Megatron while that is imported and so has to come first.

Importing this package enters MindSpeed; no module of Megatron can be reached through it before. Never run on an NPU.
"""

from __future__ import annotations

from engines.training.mindspeed.adaptor import adapt

adapt()
