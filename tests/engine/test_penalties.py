"""Counts of tokens: against counting the text anew, with drafts and without."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trnc.core import SamplingParams
from trnc.engine.penalties import token_counts

texts = st.lists(st.integers(0, 9), max_size=12)


def unpacked(counts: bytes) -> dict[int, int]:
    ids, numbers = np.frombuffer(counts, np.int32).reshape(2, -1).tolist()
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, numbers, strict=True))


@given(texts, texts, texts, st.booleans(), st.booleans(), st.integers(0, 12))
def test_what_is_counted(prompt, output, drafts, repeats, of_prompt, resumed):
    sampling = SamplingParams(
        repetition_penalty=1.5 if repeats else 1.0,
        presence_penalty=0.5,
        penalize_prompt=of_prompt,
    )
    counts = token_counts(sampling, prompt, output[:resumed])
    assert counts is not None
    for token in output[resumed:]:
        counts.packed(drafts)  # leaves no trace
        counts.add(token)
    rows = counts.packed(drafts)
    assert len(rows) == len(drafts) + 1
    scope = set(prompt) if repeats and of_prompt else set()
    for i, row in enumerate(rows):
        seen = Counter([*output, *drafts[:i]])
        assert unpacked(row) == {t: seen[t] for t in scope | set(seen)}
    assert counts.packed() == rows[:1]


def test_neutral_penalties_count_nothing():
    assert token_counts(SamplingParams(), [1, 2], [3]) is None
