"""Dotted paths into nested values: looking up, and replacing without touching the original. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ABSENT = object()


def lookup(values: Mapping[str, Any], path: str) -> Any:
    """The value at ``path``, or ABSENT."""
    found: Any = values
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return ABSENT
        found = found[name]
    return found


def replaced(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``values`` with ``value`` at ``path``; only the dictionaries along the path are copied.

    Raises:
        KeyError: something along the path has no keys below it; its name is the argument.
    """
    name, _, rest = path.partition(".")
    result = dict(values)
    if rest:
        below = result.get(name, {})
        if not isinstance(below, Mapping):
            raise KeyError(name)
        value = replaced(below, rest, value)
    result[name] = value
    return result


def without(values: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """A copy of ``values`` without what stands at ``paths``; those that are absent are passed over."""
    result = dict(values)
    for path in paths:
        name, _, rest = path.partition(".")
        if name in result and rest:
            result[name] = without(result[name], [rest])
        else:
            result.pop(name, None)
    return result


def cut(values: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The parts of ``values`` at ``paths``, in nested form; paths that are absent are left out."""
    result: dict[str, Any] = {}
    for path in paths:
        found = lookup(values, path)
        if found is not ABSENT:
            result = replaced(result, path, found)
    return result
