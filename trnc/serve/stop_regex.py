r"""Stop patterns: regular expressions that end a text, on RE2, whose time is linear in the text.

What ends the text is defined over characters: after each character the pattern is tried on the text
so far, as if the text ended there (so `$` and `\b` hold at its end). The first character after
which a match ends, ends the text; of the matches that end there, the one that starts first counts.
A match is at least one character long and starts at most `REACH` characters before its end.

RE2 cannot say whether a text is the beginning of a match. It can give the first and the last
string, in the order of their bytes, that a match can be (`possiblematchrange`), and Python's parser
knows how long one can be. A place is held back as the possible start of a match while what follows
it fits between those two and is shorter than that.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from trnc.errors import RequestError

REACH = 1024  # characters
MAX_PATTERNS = 32
MAX_PATTERN_BYTES = 256
_RANGE_BYTES = 8  # how much of the beginning of a match the two bounds tell
_MAX_MEMORY = 2**20  # bytes for one pattern; RE2 goes on without its cache when it is used up


@dataclass(frozen=True, slots=True)
class StopRegex:
    """A compiled pattern. `ending` matches where the text ends.

    A match is in `first` .. `last` and has at most `longest` characters.
    """

    pattern: str
    ending: Any
    first: bytes
    last: bytes
    longest: int


def stop_regexes(patterns: str | Sequence[str] | None) -> tuple[StopRegex, ...]:
    """Return the compiled stop patterns of a request.

    Raises:
        RequestError: too many, too long, not a pattern that RE2 runs, or one that ends every text.
    """
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns or ())
    if len(given) > MAX_PATTERNS:
        raise _refused(f"must be at most {MAX_PATTERNS} patterns, got {len(given)} of them.")
    for pattern in given:
        if (size := len(pattern.encode(errors="replace"))) > MAX_PATTERN_BYTES:
            raise _refused(
                f"must be made of patterns of at most {MAX_PATTERN_BYTES} bytes, got {size}."
            )
    return tuple(_compiled(pattern) for pattern in given)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> StopRegex:
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY
    try:
        alone = re2.compile(pattern, options)
        ending = re2.compile(rf"(?:{pattern})\z", options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else error
        raise _refused(
            f"must be a pattern that RE2 can run (no backreferences, no look-around):"
            f" {pattern[:80]!r}: {reason}."
        ) from None
    if alone.search("") is not None:
        raise _refused(f"must not match the empty text, as {pattern[:80]!r} does.")
    try:
        first, last = alone.possiblematchrange(_RANGE_BYTES)
    except re2.error:  # nothing is known of its beginning
        first, last = b"", b"\xff"
    return StopRegex(pattern, ending, first, last, _longest(pattern))


def _longest(pattern: str) -> int:
    """Return the most characters that a match may have."""
    if "{," in pattern:  # a repetition for Python, three characters for RE2
        return REACH
    try:
        return min(int(_parser.parse(pattern).getwidth()[1]), REACH)
    except (re.error, OverflowError):  # the two syntaxes differ a little: assume nothing
        return REACH


def _refused(rule: str) -> RequestError:
    return RequestError(f"'stop_regex' {rule}", param="stop_regex")


class RegexNeedle:
    """One stop pattern on its way through a text.

    `matched` is how many characters at the end of the text may be the beginning of a match.
    """

    __slots__ = ("_position", "_recent", "_regex", "_starts", "matched", "text")

    def __init__(self, regex: StopRegex) -> None:
        self.text = regex.pattern
        self.matched = 0
        self._regex = regex
        self._recent = ""  # the last REACH characters, and one before them for `^` and `\b`
        self._position = 0
        self._starts: deque[int] = deque()  # where a match may have begun

    def feed(self, char: str) -> int:
        """Take one character; return the length of the match that ends with it, or 0."""
        self._recent = (self._recent + char)[-REACH - 1 :]
        self._position += 1
        self._note_starts()
        found = self._regex.ending.search(self._recent, int(len(self._recent) > REACH))
        return 0 if found is None else len(self._recent) - int(found.start())

    def _note_starts(self) -> None:
        """Bring `matched` up to date; only starts that are near can turn out to be none."""
        starts = self._starts
        starts.append(self._position - 1)
        near = []
        while starts and starts[-1] >= self._position - _RANGE_BYTES:
            near.append(starts.pop())
        starts.extend(start for start in reversed(near) if self._may_begin(start))
        while starts and starts[0] <= self._position - self._regex.longest:
            starts.popleft()
        self.matched = self._position - starts[0] if starts else 0

    def _may_begin(self, start: int) -> bool:
        head = self._recent[start - self._position :].encode()[:_RANGE_BYTES]
        return self._regex.first[: len(head)] <= head <= self._regex.last
