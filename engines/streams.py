"""Random streams that depend on names only, so that no cut, layout or restart can shift them. Loads no framework."""

from __future__ import annotations

import hashlib


def stream_key(*parts: str | int) -> int:
    """A 63-bit key for the stream that ``parts`` name, e.g. ``stream_key(run, "rollout", step, prompt, sample)``.

    Equal parts give equal keys on every machine; parts are separated, so ("ab", "c") differs from ("a", "bc").
    63 bits, so that the key fits a signed 64-bit tensor.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
