"""Rows of measurements in one file: a line of JSON each, on disk before the next is measured.

Several processes may append.

Invariant: at whatever point a process is killed, all rows before are read again.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, and return when the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        # the last writer was killed within a line
        is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * is_torn + json.dumps(row, default=str) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_rows(path: Path) -> list[Row]:
    """Return all whole rows; what a killed process left of its last line is none."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
