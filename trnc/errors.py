"""The errors that trnc raises on purpose.

A message names the field, flag, key or file that is wrong and says what to do about it. Anything
else that escapes is a bug.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TrncError(Exception):
    """Base of every error that a person is meant to read."""


class ConfigError(TrncError):
    """A preset, flag or environment variable is wrong; raised at start, never while serving."""


class CheckpointError(TrncError):
    """A model, its files or its tokenizer cannot be found, read or supported."""


class CompileError(TrncError):
    """A stage could not be traced or compiled, or the toolchain is missing."""


class StoreError(TrncError):
    """An artifact is missing or damaged and may not be rebuilt, or the store cannot be written."""


class RequestError(TrncError):
    """A request is invalid; the server answers 400 with `param` naming the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(TrncError):
    """The engine process is gone or failed a request; the server answers 503 or 500."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest known word, or an empty string."""
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
