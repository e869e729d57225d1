"""Text that comes in pieces: finding tags in it, and where a JSON value in it ends."""

from __future__ import annotations


class Held:
    """Text that was taken in and not yet passed on."""

    def __init__(self) -> None:
        self.text = ""

    def until(self, tag: str) -> tuple[str, bool]:
        """Take what comes before `tag` (and the tag itself), if it is there.

        Otherwise take what cannot be a part of it. Return it, and whether the tag was found.
        """
        at = self.text.find(tag)
        if at >= 0:
            before, self.text = self.text[:at], self.text[at + len(tag) :]
            return before, True
        keep = overlap(self.text, tag)
        before, self.text = self.text[: len(self.text) - keep], self.text[len(self.text) - keep :]
        return before, False


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


class JsonEnd:
    """Finds the end of one JSON object, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = False
        self.ended = False

    def push(self, text: str) -> int:
        """Return how many characters of the text belong to the object."""
        for index, char in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return index + 1
        return len(text)
