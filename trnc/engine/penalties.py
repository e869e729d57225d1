"""How often which tokens occurred in a request: what its penalties are computed from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from trnc.core import SamplingParams


class TokenCounts:
    """The distinct tokens of a request in order of appearance, and how often each was output.

    The prompt's tokens count 0 times: only repetition looks at them.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        distinct = dict.fromkeys(prompt)
        self._index = {token: index for index, token in enumerate(distinct)}
        self._ids = array("i", distinct)
        self._counts = array("i", bytes(self._ids.itemsize * len(distinct)))
        self._prompt = len(distinct)

    def add(self, token: int) -> None:
        """Count one output token."""
        index = self._index.setdefault(token, len(self._ids))
        if index == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[index] += 1

    def packed(self, drafts: Sequence[int] = ()) -> tuple[bytes, ...]:
        """Return `SequencePlan.counts`: as things stand, then after each more of the drafts."""
        rows = [self._packed()]
        for draft in drafts:
            self.add(draft)
            rows.append(self._packed())
        for draft in reversed(drafts):
            self._remove(draft)
        return tuple(rows)

    def _packed(self) -> bytes:
        return self._ids.tobytes() + self._counts.tobytes()

    def _remove(self, token: int) -> None:
        """Undo the latest `add` that has not been undone, which was of this token."""
        index = self._index[token]
        self._counts[index] -= 1
        if not self._counts[index] and index >= self._prompt:
            self._ids.pop()
            self._counts.pop()
            del self._index[token]


def token_counts(
    sampling: SamplingParams, prompt: Sequence[int], output: Iterable[int]
) -> TokenCounts | None:
    """Return the counts of a request, or None where its parameters penalise nothing.

    Repetition counts the prompt where `penalize_prompt` says so; frequency and presence never do.
    """
    repeats = sampling.repetition_penalty != 1.0
    if not (repeats or sampling.frequency_penalty or sampling.presence_penalty):
        return None
    counts = TokenCounts(prompt if repeats and sampling.penalize_prompt else ())
    for token in output:
        counts.add(token)
    return counts
