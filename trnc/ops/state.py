"""The device state that is not KV: what a slot holds of its sequence, and how drafts end up."""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare


def store_tokens(last_tokens: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Set `last_tokens[slots[r]] = tokens[r]`.

    `last_tokens` is int64 [slots]; `slots` and `tokens` are int64 [R]. Rows that sampled nothing
    name the spare slot at the end, which nothing reads, so that the write needs no mask.
    """
    torch.ops.trnc.store_tokens(last_tokens, slots, tokens)


def store_states(states: Tensor, slots: Tensor, hidden: Tensor, rows: Tensor) -> None:
    """Set `states[slots[r]] = hidden[rows[r]]`: f32 [slots, H] and [T, H], int64 [R] and [R]."""
    torch.ops.trnc.store_states(states, slots, hidden, rows)


def accept_drafts(sampled: Tensor, drafted: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Say how many drafts of each sequence are what the target sampled itself.

    `sampled` and `drafted` are int64 [T]: what was picked after each token row, and the token that
    the row itself had. `sequences` is int32 [R, 3] as in `trnc.ops.attention`: a sequence's first
    row is its last known token, the others are its drafts.

    Returns:
        int64 [R] the number of drafts accepted, and int64 [R] the row of the last one (the first
        row if there is none), whose pick is the token after them.
    """
    result: tuple[Tensor, Tensor] = torch.ops.trnc.accept_drafts.default(
        sampled, drafted, sequences
    )
    return result


def _store_tokens(last_tokens: Tensor, slots: Tensor, tokens: Tensor) -> None:
    last_tokens[slots] = tokens


def _store_states(states: Tensor, slots: Tensor, hidden: Tensor, rows: Tensor) -> None:
    states[slots] = hidden[rows]


def _accept_drafts(sampled: Tensor, drafted: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    accepted, last = [], []
    for first, count, _ in sequences.tolist():
        rows = range(first, first + count - 1)
        right = [bool(sampled[row] == drafted[row + 1]) for row in rows]
        accepted.append((*right, False).index(False))
        last.append(first + accepted[-1])
    return sequences.new_tensor(accepted, dtype=torch.int64), sequences.new_tensor(
        last, dtype=torch.int64
    )


declare(
    "store_tokens(Tensor(a!) last_tokens, Tensor slots, Tensor tokens) -> ()",
    reference=_store_tokens,
    fake=lambda *_: None,
)
declare(
    "store_states(Tensor(a!) states, Tensor slots, Tensor hidden, Tensor rows) -> ()",
    reference=_store_states,
    fake=lambda *_: None,
)
declare(
    "accept_drafts(Tensor sampled, Tensor drafted, Tensor sequences) -> (Tensor, Tensor)",
    reference=_accept_drafts,
    fake=lambda sampled, _, sequences: (
        sampled.new_empty(sequences.shape[0]),
        sampled.new_empty(sequences.shape[0]),
    ),
)
