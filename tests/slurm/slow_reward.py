"""A reward that takes its time when a test asks for it, so that a job can be met in the middle of a segment."""

import os
import time
from pathlib import Path


def score(response: str, problem: object) -> float:
    """Depends on the response alone.

    ``RELAY_PAUSE`` is in seconds, for each response that came to its end; ``RELAY_FAIL`` names a file that must not exist.
    """
    time.sleep(float(os.environ.get("RELAY_PAUSE", "0")))
    if os.environ.get("RELAY_FAIL") and Path(os.environ["RELAY_FAIL"]).exists():
        raise ValueError("told to fail")
    return len(set(response)) / (1 + len(response))
