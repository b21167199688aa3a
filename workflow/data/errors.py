"""What can be wrong with data."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """Data that cannot be used; the message names the file or the task, and what would be right."""


class RowError(DataError):
    """One row of a file that does not fit the schema."""

    def __init__(self, file: Path, row: int, field: str, reason: str):
        super().__init__(f"{file}, row {row}, field {field!r}: {reason}")
        self.file, self.row, self.field, self.reason = file, row, field, reason
