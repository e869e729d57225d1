"""Where a round of speculation stands, and what it accepts, as stages shared by every model.

The device keeps of each slot: the last token, the drafts after it, the length (how many positions
the target has computed, so the position of the last token), and the target's state at the position
before. So a draft can be planned before the host has read how far the last verify came.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc import ops
from trnc.models.stage import Stage, StageSpec, TensorSpec


def accept_stage(spec: StageSpec) -> Stage:
    """Compare the drafts with what the target picked, [T], and say where each sequence [R] ends.

    `token_ids`, `token_slots` and `last_tokens` are as in `embed`. The outputs are how many drafts
    are right, the row of the last of them, the token picked after it, and the new length.
    """

    def accept(
        tokens: Tensor,
        token_ids: Tensor,
        token_slots: Tensor,
        last_tokens: Tensor,
        sequences: Tensor,
    ) -> tuple[Tensor, ...]:
        drafted = torch.where(token_slots >= 0, last_tokens[token_slots.clamp(min=0)], token_ids)
        accepted, last_rows = ops.accept_drafts(tokens, drafted, sequences)
        lengths = sequences[:, 2].to(torch.int64) + accepted + 1
        return accepted, last_rows, tokens[last_rows], lengths

    per_row = TensorSpec((spec.tokens,), "int64")
    inputs = {
        "tokens": per_row,
        "token_ids": per_row,
        "token_slots": per_row,
        "last_tokens": TensorSpec(("slots",), "int64"),
        "sequences": TensorSpec((spec.rows, 3), "int32"),
    }
    outputs = ("accepted", "last_rows", "next_tokens", "lengths")
    return Stage(function=accept, inputs=inputs, outputs=outputs)


def draft_begin_stage(spec: StageSpec) -> Stage:
    """From slots [R] to the first round of a draft: its states, places and output indices.

    The first round stands one position before the last token: there is the state that came before
    it. `active` is 1 for a sequence and 0 for padding; `output_offset` is a request's output index
    less position, the same for all of its tokens.
    """

    def draft_begin(
        slots: Tensor, active: Tensor, output_offset: Tensor, lengths: Tensor, mtp_states: Tensor
    ) -> tuple[Tensor, ...]:
        length = lengths[slots]
        positions = (length - 1).clamp(min=0)
        first = torch.arange(slots.shape[0], dtype=torch.int32)
        sequences = torch.stack((first, active, positions.to(torch.int32)), dim=1)
        return mtp_states[slots], positions, sequences, length + output_offset

    row = TensorSpec((spec.rows,), "int64")
    inputs = {
        "slots": row,
        "active": TensorSpec((spec.rows,), "int32"),
        "output_offset": row,
        "lengths": TensorSpec(("slots",), "int64"),
        "mtp_states": TensorSpec(("slots", spec.model.hidden_size)),
    }
    outputs = ("states", "positions", "sequences", "output_index")
    return Stage(function=draft_begin, inputs=inputs, outputs=outputs)


def draft_next_stage(spec: StageSpec) -> Stage:
    """Move every sequence one position on."""

    def draft_next(
        positions: Tensor, sequences: Tensor, output_index: Tensor
    ) -> tuple[Tensor, ...]:
        step = torch.tensor([0, 0, 1], dtype=torch.int32)
        return positions + 1, sequences + step, output_index + 1

    row = TensorSpec((spec.rows,), "int64")
    inputs = {
        "positions": row,
        "sequences": TensorSpec((spec.rows, 3), "int32"),
        "output_index": row,
    }
    outputs = ("positions", "sequences", "output_index")
    return Stage(function=draft_next, inputs=inputs, outputs=outputs)
