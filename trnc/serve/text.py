"""From tokens to text that may be shown.

`StopMatcher` holds text back while it may still become a stop string or a match of a stop pattern,
so a client never sees any part of one. What ends the text is the one that is completed first, the
longest of those that end at the same character: a definition over characters, so how the text was
cut into tokens or chunks does not change the result.

`TextAssembler` joins it with an incremental detokenizer and keeps, for each token, where its text
starts, so that log-probabilities can be given for exactly the tokens that are shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trnc.core import TokenLogprobs
from trnc.serve.stop_regex import RegexNeedle, StopRegex


class Detokenizer(Protocol):
    """Turns ids into text as they come; holds incomplete UTF-8 back."""

    def push(self, ids: Sequence[int], /) -> str:
        """Return the text that these ids complete."""

    def flush(self) -> str:
        """Return the text of what is still held."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text is shown. `offset` is where it starts, in characters of the answer."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now, and the tokens that start in it."""

    text: str
    tokens: tuple[ShownToken, ...]


class _Stop(Protocol):
    """Something that may end a text. `matched` characters at its end may be the beginning of it."""

    text: str
    matched: int

    def feed(self, char: str) -> int:
        """Take one character; return the length of what it completes, or 0."""


class _Needle:
    """One stop string and how much of it the text so far ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        for i in range(1, len(text)):
            self._fallback[i] = self._advance(self._fallback[i - 1], text[i])

    def feed(self, char: str) -> int:
        """Take one character; return the length of the stop string if it completes it, or 0."""
        self.matched = self._advance(self.matched, char)
        return self.matched if self.matched == len(self.text) else 0

    def _advance(self, matched: int, char: str) -> int:
        while matched and char != self.text[matched]:
            matched = self._fallback[matched - 1]
        return matched + 1 if char == self.text[matched] else 0


class StopMatcher:
    """Passes text on up to the first stop; see the module for what is first.

    With `keep` the stop itself is passed on, too, and nothing is held back for it. `matched` is the
    stop string, or the pattern, that ended the text.
    """

    def __init__(
        self, stops: Sequence[str], regexes: Sequence[StopRegex] = (), *, keep: bool = False
    ) -> None:
        self._needles: list[_Stop] = [*map(_Needle, stops), *map(RegexNeedle, regexes)]
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can no longer be part of a stop.

        Once `matched` is set the text is over: nothing more is returned.
        """
        if self.matched is not None:
            return ""
        if not self._needles:
            return text
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            length, stop = max(((n.feed(char), n.text) for n in self._needles), key=_length)
            if length:
                self.matched = stop
                self._held = ""
                return held[: end if self._keep else end - length]
        if self._keep:
            return held
        holding = max(needle.matched for needle in self._needles)
        self._held = held[len(held) - holding :]
        return held[: len(held) - holding]

    def flush(self) -> str:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _length(match: tuple[int, str]) -> int:
    return match[0]


class TextAssembler:
    """Turns a request's tokens into `Piece`s.

    `count` is how many tokens were taken: up to the one that completed a stop string, whatever
    number came in one delta, so that usage does not depend on how the engine grouped them. Stops
    are looked for in the text after the first `unstoppable` tokens.
    """

    def __init__(
        self, *, detokenizer: Detokenizer, matcher: StopMatcher, unstoppable: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._unstoppable = unstoppable
        self._waiting: deque[ShownToken] = deque()
        self._decoded = 0
        self._shown = 0
        self.count = 0

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that ended the text, if one did."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Piece:
        """Take tokens in order; stops taking them at a stop string."""
        text = ""
        for index, token_id in enumerate(token_ids):
            if self.matched is not None:
                break
            entry = logprobs[index] if logprobs else None
            self._waiting.append(ShownToken(token_id, self._decoded, entry))
            self.count += 1
            decoded = self._detokenizer.push([token_id])
            self._decoded += len(decoded)
            free = self.count <= self._unstoppable
            text += decoded if free else self._matcher.push(decoded)
        return self._piece(text)

    def finish(self) -> Piece:
        """Return what is left when the request is over."""
        text = "" if self.matched is not None else self._matcher.push(self._detokenizer.flush())
        text += self._matcher.flush()
        piece = self._piece(text)
        if self.matched is None:  # tokens without text at the end, such as special ones
            return Piece(piece.text, piece.tokens + tuple(self._waiting))
        return piece

    def _piece(self, text: str) -> Piece:
        self._shown += len(text)
        tokens = []
        while self._waiting and self._waiting[0].offset < self._shown:
            tokens.append(self._waiting.popleft())
        return Piece(text, tuple(tokens))
