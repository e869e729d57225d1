"""Writes to the device state that are not KV: the last token sampled in every slot."""

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


def _reference(last_tokens: Tensor, slots: Tensor, tokens: Tensor) -> None:
    last_tokens[slots] = tokens


declare(
    "store_tokens(Tensor(a!) last_tokens, Tensor slots, Tensor tokens) -> ()",
    reference=_reference,
    fake=lambda last_tokens, slots, tokens: None,  # noqa: ARG005
)
