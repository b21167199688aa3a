"""Rows of JSONL and parquet files, checked one by one against the schema of a problem.

Fields: ``question`` and ``answer`` (text, not empty), ``task`` (optional: reasoning-gym's name of the task whose verifier
judges responses) and ``metadata`` (optional: an object; in parquet a struct, or text that holds a JSON object).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workflow.data.errors import DataError, RowError

FIELDS = ("question", "answer", "task", "metadata")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row's number (from 1) and its checked fields; ``task`` and ``metadata`` are always there.

    Raises:
        DataError: no such file, no rows, or not a readable JSONL or parquet file.
        RowError: a row that does not fit the schema.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; known: {', '.join(readers)}")
    number = 0
    for number, row in readers[path.suffix](path):
        yield number, _checked(path, number, row)
    if not number:
        raise DataError(f"{path}: the file has no rows")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    hint = "" if line.endswith("\n") else "; the last line has no end: is the file truncated?"
                    raise RowError(path, number, "row", f"not JSON ({error}){hint}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs the package pyarrow ({error})") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a complete parquet file ({error})") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        row = {name: value for name, value in row.items() if not (value is None and name in FIELDS[2:])}
        if isinstance(row.get("metadata"), str):
            try:
                row["metadata"] = json.loads(row["metadata"])
            except json.JSONDecodeError as error:
                raise RowError(path, number, "metadata", f"not JSON ({error})") from None
        yield number, row


def _checked(path: Path, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RowError(path, number, "row", f"an object is expected, not {type(row).__name__}")
    unknown = sorted(set(row) - set(FIELDS))
    if unknown:
        raise RowError(path, number, unknown[0], f"unknown field; known: {', '.join(FIELDS)}")
    for name in ("question", "answer"):
        if name not in row:
            raise RowError(path, number, name, "missing")
        if not isinstance(row[name], str) or not row[name]:
            raise RowError(path, number, name, f"text that is not empty is expected, not {row[name]!r}")
    task, metadata = row.get("task"), row.get("metadata") or {}
    if task is not None and not isinstance(task, str):
        raise RowError(path, number, "task", f"text is expected, not {task!r}")
    if not isinstance(metadata, dict):
        raise RowError(path, number, "metadata", f"an object is expected, not {type(metadata).__name__}")
    return {"question": row["question"], "answer": row["answer"], "task": task, "metadata": metadata}
