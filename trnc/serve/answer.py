"""An answer as clients see it: text, reasoning and tool calls, in the order of their making.

A model writes all three as one text. What tells them apart is the model's own markup, known to an
`AnswerParser`; the APIs only see `Part`s and put them into their own shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trnc.serve.text import ShownToken


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of the text that is meant for the reader, and the tokens that start in it."""

    text: str
    tokens: tuple[ShownToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """More of a tool call: `arguments` is a piece of a JSON object. Calls come one by one.

    `name` is there in the first part of each call, and only there.
    """

    name: str | None
    arguments: str


Part = TextPart | ReasoningPart | ToolCallPart


class AnswerParser(Protocol):
    """Takes an answer's text as it comes; of one request."""

    def push(self, text: str, tokens: Sequence[ShownToken]) -> Sequence[Part]:
        """Return the parts that are certain after this piece of text."""

    def finish(self) -> Sequence[Part]:
        """Return what was held back, when no more text comes."""


class PlainAnswer:
    """The parser of a model without markup: everything is text."""

    def push(self, text: str, tokens: Sequence[ShownToken]) -> Sequence[Part]:
        """Return the text as it is."""
        return [TextPart(text, tuple(tokens))] if text or tokens else []

    def finish(self) -> Sequence[Part]:
        """Return nothing: nothing was held back."""
        return []


@dataclass(frozen=True, slots=True)
class Parsers:
    """Makes parsers: `make(tools)` says whether tool calls are to be looked for.

    `tools` and `reasoning` say what the model's markup lets it tell apart.
    """

    make: Callable[[bool], AnswerParser] = lambda _tools: PlainAnswer()
    tools: bool = False
    reasoning: bool = False
