"""The right side of a canonical text's line as data: the op, its operands and its constants."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from trnc.errors import TrncError


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by its name, or one of its several results."""

    name: str
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """What is no constant of Python: a dtype, a memory format, or a symbolic size."""

    text: str


Argument: TypeAlias = "Ref | Word | str | int | float | bool | tuple[Argument, ...] | None"


@dataclass(frozen=True, slots=True)
class Call:
    """`op(arguments, name=keyword)`."""

    op: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()

    def keyword(self, name: str, default: Argument = None) -> Argument:
        """Return a keyword's value, or `default` where the text leaves it out."""
        return dict(self.keywords).get(name, default)


@dataclass(frozen=True, slots=True)
class Type:
    """The type of one tensor: `f32`, its sizes as texts, and whether it is contiguous."""

    dtype: str
    shape: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]|[^()\[\]{},"]+')
_REF = re.compile(r"([$%]\d+)")
_TENSOR = re.compile(r"(\w+)\[([^\]]*)\](?:\{[^}]*\})?(?:@\w+)?")
_CONSTANTS = {"None": None, "True": True, "False": False, "inf": math.inf, "-inf": -math.inf}


@lru_cache(maxsize=4096)
def parse_call(text: str) -> Call:
    """Parse the text right of `=`.

    Raises:
        TrncError: it is no call.
    """
    op, bracket, rest = text.partition("(")
    if not bracket or not rest.endswith(")"):
        raise TrncError(f"not the call of an op: '{text[:80]}'")
    if op == "constant":
        return Call(op, (rest[:-1],))
    positional: list[Argument] = []
    keywords: list[tuple[str, Argument]] = []
    for part in _split(rest[:-1]):
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            keywords.append((name, parse_argument(value)))
        else:
            positional.append(parse_argument(part))
    return Call(op, tuple(positional), tuple(keywords))


def parse_argument(text: str) -> Argument:
    """Parse one argument, or an output."""
    text = text.strip()
    if text.startswith("["):
        return tuple(parse_argument(part) for part in _split(text[1:-1]))
    if text.startswith('"'):
        return str(json.loads(text))
    if match := _REF.match(text):
        item = text[match.end() :]
        return Ref(match[1], int(item[1:-1]) if item else None)
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return Word(text)


@lru_cache(maxsize=4096)
def parse_types(text: str) -> tuple[Type, ...]:
    """Return the tensors of a value's type: one, or one for each of its results."""
    parts = _split(text[1:-1]) if text.startswith("(") else [text]
    types = []
    for part in parts:
        match = _TENSOR.fullmatch(part.strip())
        if match is None:
            raise TrncError(f"not the type of a tensor: '{part}'")
        sizes = tuple(size.strip() for size in match[2].split(",")) if match[2] else ()
        types.append(Type(match[1], sizes))
    return tuple(types)


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes."""
    return [part for part in _parts(text) if part]


def _parts(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for match in _TOKEN.finditer(text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif match[0] == "," and depth == 0:
            yield text[start : match.start()].strip()
            start = match.end()
    yield text[start:].strip()
