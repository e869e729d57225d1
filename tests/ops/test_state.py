"""What becomes of drafts: the first ones that are right count, whatever comes after them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trnc import ops
from trnc.ops.library import reference_mode

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # few values, so that many are right


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=5))
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    rows: list[tuple[list[int], int, int]],
) -> None:
    sampled, drafted, sequences, expected = layout(rows)
    with reference_mode():
        accepted, last = ops.accept_drafts(sampled, drafted, sequences)
    assert accepted.tolist() == expected
    firsts = sequences[:, 0].tolist()
    assert last.tolist() == [first + n for first, n in zip(firsts, expected, strict=True)]


def layout(
    rows: list[tuple[list[int], int, int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Sequences of (drafts after the last token, unused rows behind, start), and what is right."""
    pick = torch.Generator().manual_seed(len(rows))
    drafted: list[int] = []
    sequences = []
    for drafts, gap, start in rows:
        sequences.append((len(drafted), 1 + len(drafts), start))
        drafted += [9, *drafts, *[0] * gap]
    sampled = torch.randint(0, 3, (len(drafted),), generator=pick)
    expected = []
    for first, count, _ in sequences:
        right = [sampled[first + i] == drafted[first + i + 1] for i in range(count - 1)]
        expected.append(next((i for i, ok in enumerate(right) if not ok), count - 1))
    places = torch.tensor(sequences, dtype=torch.int32)
    return sampled, torch.tensor(drafted), places, expected
