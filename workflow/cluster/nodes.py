"""SLURM's short spelling of node names, ``cuda[1-2,5]``, and back to the names. No torch."""

from __future__ import annotations

import re

_NAME = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[([^\]]*)\]")


def expand_nodes(text: str) -> list[str]:
    """The names in a SLURM node list, in its order.

    >>> expand_nodes("login,cuda[1-2],rack[1-2]n[08-10]")[:4]
    ['login', 'cuda1', 'cuda2', 'rack1n08']
    """
    return [name for part in _NAME.findall(text.strip()) for name in _expand(part)]


def _expand(name: str) -> list[str]:
    match = _RANGES.search(name)
    if match is None:
        return [name]
    head, tail = name[: match.start()], _expand(name[match.end() :])
    return [f"{head}{number}{rest}" for number in expand_numbers(match.group(1)) for rest in tail]


def expand_counts(text: str) -> list[int]:
    """A number for each node, out of SLURM's short spelling ``8(x2),4``.

    >>> expand_counts("8(x2),4")
    [8, 8, 4]
    """
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts


def expand_numbers(text: str) -> list[str]:
    """The numbers of ``1-3,08``, with their leading zeros.

    >>> expand_numbers("1-3,08")
    ['1', '2', '3', '08']
    """
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash:
            numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        else:
            numbers.append(first)
    return numbers
