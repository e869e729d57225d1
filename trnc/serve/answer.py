"""An answer as clients see it: text, reasoning and tool calls, in the order of their making.

A model writes all three as one text. What tells them apart is the model's own markup, known to an
`AnswerParser`; the APIs only see `Part`s and put them into their own shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's chat shape


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


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of a kind put together: those of an answer as a whole."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        match part, last:
            case TextPart(), TextPart():
                whole[-1] = TextPart(last.text + part.text, last.tokens + part.tokens)
            case ReasoningPart(), ReasoningPart():
                whole[-1] = ReasoningPart(last.text + part.text)
            case ToolCallPart(name=None), ToolCallPart():
                whole[-1] = ToolCallPart(last.name, last.arguments + part.arguments)
            case _:
                whole.append(part)
    return whole
