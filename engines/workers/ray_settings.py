"""What every process of a private Ray is started with, on all nodes of a job. Standard library only."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "baton-ray-"
"""Of a node's private folder."""
DEEPEST = "/ray/session_2026-01-31_23-59-59_999999_9999999/sockets/plasma_store"
"""The longest path of a socket below it."""
OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Batches pass through it; weights do not."""
PASSED_BY = {signal.SIGTERM, signal.SIGUSR2}
"""A scheduler signals every process of a job. Ray would leave, and the ranks with it, before they can save their state."""


def environment(token: str) -> dict[str, str]:
    """Variables of Ray's processes, and of the driver."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ranks choose their accelerator by LOCAL_RANK; Ray would hide all of them from actors that reserve none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def accelerators(device: str, count: int) -> tuple[int, dict[str, int]]:
    """GPUs, and other resources, that a node of a job has; told to Ray, which would look for those of the whole node."""
    return (count, {}) if device == "cuda" else (0, {"NPU": count} if device == "npu" else {})


@contextmanager
def signals_held() -> Iterator[None]:
    """What is started meanwhile never hears ``PASSED_BY``: a blocked signal stays blocked in children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_BY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
