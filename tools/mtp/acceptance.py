"""What a block is worth: how many of its drafts are the target's own next tokens.

Measured on greedy answers. Draft j of a row counts if it and all before it are right; then every
draft was made from true tokens, which is how `unroll` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mtp.block import MtpBlock, unroll
from mtp.states import Example
from mtp.training import Batch


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of `rows` places where a draft may begin. `positions[j]`: how often draft j + 1 is right, of
    those whose drafts before it are. `lengths[d - 1]`: the mean tokens that one verify gives at
    depth d, the target's own included, when drafts begin where the last one ended.
    """

    rows: int
    positions: tuple[float, ...]
    lengths: tuple[float, ...]


@torch.inference_mode()
def right_drafts(
    block: MtpBlock, embed: Tensor, head: Tensor, ids: Tensor | None, example: Example, depth: int
) -> Tensor:
    """Return for each row of an answer whether each of `depth` drafts is right: bool [rows, depth].

    `head` [n, H] has the rows of the tokens `ids`, or of all. Row r drafts the tokens r + 1, ... of
    the answer.
    """
    batch = Batch.of([example])
    drafts = unroll(block, embed[batch.tokens], batch.states, depth)
    truth = example.tokens[2:]
    columns = []
    first, rows = example.prompt - 1, len(example.answer.output_ids) - 1
    for round, states in enumerate(drafts):
        picked = (states[0] @ head.T).argmax(-1)
        picked = picked if ids is None else ids[picked]
        right = torch.zeros(len(truth) + depth, dtype=torch.bool)
        right[: len(truth)] = picked == truth
        columns.append(right[first + round : first + round + rows])
    return torch.stack(columns, dim=1)


def measure(rights: Sequence[Tensor]) -> Acceptance:
    """Sum up what `right_drafts` says of several answers."""
    depth = rights[0].shape[1]
    prefix = torch.cat([right.long().cumprod(1) for right in rights])
    reached = [len(prefix), *prefix.sum(0).tolist()]
    return Acceptance(
        rows=len(prefix),
        positions=tuple(b / max(1, a) for a, b in pairwise(reached)),
        lengths=tuple(_mean_length(rights, d) for d in range(1, depth + 1)),
    )


def _mean_length(rights: Sequence[Tensor], depth: int) -> float:
    """Walk through the answers as an engine does: accept, take the target's token, draft again."""
    tokens = verifies = 0
    for right in rights:
        accepted = right[:, :depth].long().cumprod(1).sum(1).tolist()
        row = 0
        while row < len(accepted):
            row += accepted[row] + 1
            verifies += 1
        tokens += row
    return tokens / max(1, verifies)
