"""A reward that waits when a test asks for it, so that a job can be met in the middle of a segment, or between its result and its end."""

import atexit
import os
import time
from pathlib import Path

HOLD = Path("hold")
"""While this file is there, training waits as soon as so many steps are done as it says."""
BALLAST = b"1" * (int(os.environ.get("RELAY_MEMORY", "0")) << 20)
"""``RELAY_MEMORY`` in MB: what a job has in memory besides."""


def score(response: str, problem: object) -> float:
    """Depends on the response alone.

    ``RELAY_PAUSE`` is in seconds, for each response that came to its end; ``RELAY_FAIL`` names a file that must not exist.
    """
    wait_while_held()
    time.sleep(float(os.environ.get("RELAY_PAUSE", "0")))
    if os.environ.get("RELAY_FAIL") and Path(os.environ["RELAY_FAIL"]).exists():
        raise ValueError("told to fail")
    return len(set(response)) / (1 + len(response))


def wait_while_held() -> None:
    """Return at once when nothing is held."""
    while HOLD.exists() and steps_done() >= int(HOLD.read_text()):
        time.sleep(0.05)


def steps_done() -> int:
    """Of the run that this folder trains."""
    logs = list(Path("results/store/train").glob("*/metrics.jsonl"))
    return len(logs[0].read_text().splitlines()) if logs else 0


atexit.register(wait_while_held)
