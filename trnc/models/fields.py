"""Reading one number of a config; an error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trnc.errors import CheckpointError


def integer(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer; raises CheckpointError where it is missing or something else."""
    value = table.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"'{key}' is missing")
    if type(value) is not int or value < 1:
        raise CheckpointError(f"'{key}' must be a positive integer, got {value!r}")
    return value


def number(table: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number; raises CheckpointError where it is missing or something else."""
    value = table.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"'{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"'{key}' must be a positive number, got {value!r}")
    return float(value)
