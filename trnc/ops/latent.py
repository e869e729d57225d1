"""Paged attention over latents (multi-head latent attention), and their write into the cache.

A latent [W] is all that is cached of a token: its first `rank` values are what keys and values of
every head are made of, the others the rotated key that all heads share. Queries come absorbed: each
head's is multiplied into the space of latents already, so that a latent is the key of every head
and its first `rank` values are the value (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

Shapes are those of `trnc.ops.attention`, but for

- `q` [T, Hq, W]; `latent_new` [T, W] in the dtype of the cache.
- `pages` [P, S, W]; in a cache of int8 a stored latent has W + 4 elements, its scale at the end.

The contract of bits is the one of `trnc.ops.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.attention import dequantize_kv
from trnc.ops.library import declare


def latent_attention(
    q: Tensor,
    latent_new: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    scale: float,
    rank: int,
) -> Tensor:
    """Return softmax(scale * q l^T) l[:, :rank] over own and earlier positions, [T, Hq, rank].

    Rows that no sequence covers give zeros.
    """
    result: Tensor = torch.ops.trnc.latent_attention.default(
        q, latent_new, pages, block_tables, sequences, scale, rank
    )
    return result


def latent_write(
    pages: Tensor, latent_new: Tensor, block_tables: Tensor, sequences: Tensor
) -> None:
    """Write each sequence's rows of `latent_new` into its pages, in place."""
    torch.ops.trnc.latent_write.default(pages, latent_new, block_tables, sequences)


def _latent_attention(
    q: Tensor,
    latent_new: Tensor,
    pages: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    scale: float,
    rank: int,
) -> Tensor:
    out = q.new_zeros(*q.shape[:2], rank)
    size = pages.shape[1]
    for table, (first, count, start) in zip(block_tables, sequences.tolist(), strict=True):
        if count == 0:
            continue
        rows = slice(first, first + count)
        past = pages[table[: -(-start // size)].long()].flatten(0, 1)[:start]
        keys = dequantize_kv(torch.cat([past, latent_new[rows]]), q.dtype)
        scores = torch.einsum("thw,sw->hts", q[rows] * scale, keys)
        position = torch.arange(start, start + count, device=q.device)
        later = torch.arange(len(keys), device=q.device) > position[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hts,sr->thr", weights, keys[:, :rank])
    return out


def _latent_write(
    pages: Tensor, latent_new: Tensor, block_tables: Tensor, sequences: Tensor
) -> None:
    size = pages.shape[1]
    for table, (first, count, start) in zip(block_tables, sequences.tolist(), strict=True):
        position = torch.arange(start, start + count, device=table.device)
        page = table[position // size].long()
        pages[page, position % size] = latent_new[first : first + count]


declare(
    "latent_attention(Tensor q, Tensor latent_new, Tensor pages, Tensor block_tables, "
    "Tensor sequences, float scale, int rank) -> Tensor",
    reference=_latent_attention,
    fake=lambda q, *rest: q.new_empty(q.shape[0], q.shape[1], rest[-1]),
)
declare(
    "latent_write(Tensor(a!) pages, Tensor latent_new, Tensor block_tables, "
    "Tensor sequences) -> ()",
    reference=_latent_write,
    fake=lambda *_: None,
)
