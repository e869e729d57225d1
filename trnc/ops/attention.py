"""Paged attention and the write of new keys and values, with their plain-torch references.

A step attends to the keys of its cached pages plus its own new ones, and writes the new ones into
their pages once, at its end: so a step can be abandoned, and a rejected draft needs no undoing.
New keys and values arrive already rounded to the cache's dtype, which makes a key the same number
whether it is read from a page or from the step that computed it.

Shapes, shared by every function here: T token rows, R sequences, Hq query heads that share Hkv
key-value heads in equal groups, D head_dim, S page_size, P pages, MP the width of a block table.

- `q` [T, Hq, D]; `k_new`, `v_new` [T, Hkv, D] in the dtype of the cache.
- `k_pages` [P, Hkv, D, S], keys transposed so that a vector holds one coordinate of S keys;
  `v_pages` [P, Hkv, S, D].
- In a cache of int8 a row of `k_new` and `v_new` has `kv_row_size` D + 4 elements: D integers and
  then their scale, an f32 (`quantize_kv`). Pages have room for as much, but hold bytes in the order
  that instructions for dot products of four bytes take: [D / 4, S, 4] of keys, [S / 4, D, 4] of
  values, then S scales in both. D is a multiple of 4.
- `block_tables` [R, MP] int32: page `block_tables[r, i]` holds positions `i*S .. i*S + S - 1`.
- `sequences` [R, 3] int32: (first token row, token count, start position). Sequence r's tokens are
  rows `first .. first + count - 1`, at positions `start .. start + count - 1`. A count of 0 marks
  an unused entry, whose block table is never read.

The native kernels keep the contract of bits: a row's output depends on its own query and the keys
at its own and earlier positions, not on how its prompt was cut into steps, which keys came from
pages, nor on any other sequence. With a cache of int8 they round queries to 16 bits and weights to
15. The references compute in the dtype of `q`, for any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare


def paged_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    scale: float,
) -> Tensor:
    """Return softmax(scale * q k^T) v over each row's own and earlier positions, [T, Hq, D].

    Keys before a sequence's start come from its pages, the others from `k_new` (causally). Query
    head h uses key-value head `h // (Hq // Hkv)`. Rows that no sequence covers give zeros.
    """
    result: Tensor = torch.ops.trnc.paged_attention.default(
        q, k_new, v_new, k_pages, v_pages, block_tables, sequences, scale
    )
    return result


def kv_write(
    k_pages: Tensor,
    v_pages: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
) -> None:
    """Write each sequence's rows of `k_new` and `v_new` into its pages, in place."""
    torch.ops.trnc.kv_write.default(k_pages, v_pages, k_new, v_new, block_tables, sequences)


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of `dtype` a cached key or value takes."""
    return head_dim + 4 if dtype == torch.int8 else head_dim


def quantize_kv(x: Tensor) -> Tensor:
    """Round keys or values [T, h, D] f32 to rows of an int8 cache, [T, h, D + 4] int8.

    Each is q * scale with scale = largest magnitude / 127, rounded to nearest, ties to even.
    """
    result: Tensor = torch.ops.trnc.quantize_kv.default(x)
    return result


def _quantize_kv(x: Tensor) -> Tensor:
    largest = x.abs().amax(dim=-1, keepdim=True)
    usable = (largest > 1e-30) & (largest < 1e38)
    q = torch.where(usable, (x * (127.0 / largest)).round(), 0.0).to(torch.int8)
    scales = (largest / 127.0).float().reshape(-1).view(torch.int8)
    return torch.cat([q, scales.reshape(*x.shape[:-1], 4)], dim=-1)


def dequantize_kv(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn stored rows [..., kv_row_size] into keys or values [..., D] of `dtype`."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    scale = rows[..., -4:].contiguous().view(torch.float32)
    return rows[..., :-4].to(dtype) * scale.to(dtype)


def _paged_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    scale: float,
) -> Tensor:
    out = torch.zeros_like(q)
    for table, (first, count, start) in zip(block_tables, sequences.tolist(), strict=True):
        if count == 0:
            continue
        rows = slice(first, first + count)
        past_k, past_v = _cached(k_pages, v_pages, table, start)
        k = dequantize_kv(torch.cat([past_k, k_new[rows]]), q.dtype)
        v = dequantize_kv(torch.cat([past_v, v_new[rows]]), q.dtype)
        out[rows] = _attend(q[rows], k, v, start=start, scale=scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, *, start: int, scale: float) -> Tensor:
    """Attend from q [count, Hq, D] at positions `start..` to k, v [start + count, Hkv, D]."""
    count, heads, width = q.shape
    grouped = q.view(count, k.shape[1], -1, width)
    scores = torch.einsum("tkgd,skd->kgts", grouped * scale, k)
    position = torch.arange(start, start + count, device=q.device)
    later = torch.arange(k.shape[0], device=q.device) > position[:, None]
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgts,skd->tkgd", weights, v).reshape(count, heads, width)


def _cached(k_pages: Tensor, v_pages: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Gather the first `length` stored keys and values of one block table, [length, Hkv, row]."""
    page_size = v_pages.shape[2]
    pages = table[: -(-length // page_size)].long()
    if k_pages.dtype != torch.int8:
        k, v = k_pages[pages].permute(0, 3, 1, 2), v_pages[pages].permute(0, 2, 1, 3)
    else:
        keys, key_scales = _key_views(k_pages[pages])
        values, value_scales = _value_views(v_pages[pages])
        k = torch.cat([keys.flatten(3), key_scales], dim=-1)
        v = torch.cat([values.flatten(1, 2), value_scales], dim=-1)
    return k.flatten(0, 1)[:length], v.flatten(0, 1)[:length]


def _key_views(pages: Tensor) -> tuple[Tensor, Tensor]:
    """View int8 pages [n, Hkv, D + 4, S]: keys [n, S, Hkv, D / 4, 4], scales [n, S, Hkv, 4]."""
    n, heads, row, size = pages.shape
    quads = pages.view(n, heads, row // 4, size, 4).permute(0, 3, 1, 2, 4)
    return quads[:, :, :, :-1], quads[:, :, :, -1]


def _value_views(pages: Tensor) -> tuple[Tensor, Tensor]:
    """View int8 pages [n, Hkv, S, D + 4]: values [n, S / 4, 4, Hkv, D], scales [n, S, Hkv, 4]."""
    n, heads, size, row = pages.shape
    values, scales = pages.view(n, heads, size * row).split([size * (row - 4), size * 4], dim=-1)
    quads = values.view(n, heads, size // 4, row - 4, 4)
    return quads.permute(0, 2, 4, 1, 3), scales.view(n, heads, size, 4).transpose(1, 2)


def _kv_write(
    k_pages: Tensor,
    v_pages: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
) -> None:
    page_size = v_pages.shape[2]
    for table, (first, count, start) in zip(block_tables, sequences.tolist(), strict=True):
        rows = slice(first, first + count)
        position = torch.arange(start, start + count, device=table.device)
        page, slot = table[position // page_size].long(), position % page_size
        k, v = k_new[rows], v_new[rows]
        if k_pages.dtype != torch.int8:
            k_pages[page, :, :, slot] = k
            v_pages[page, :, slot] = v
            continue
        keys, key_scales = _key_views(k_pages)
        values, value_scales = _value_views(v_pages)
        keys[page, slot] = k[..., :-4].unflatten(-1, (-1, 4))
        key_scales[page, slot] = k[..., -4:]
        values[page, slot // 4, slot % 4] = v[..., :-4]
        value_scales[page, slot] = v[..., -4:]


declare(
    "paged_attention(Tensor q, Tensor k_new, Tensor v_new, Tensor k_pages, Tensor v_pages, "
    "Tensor block_tables, Tensor sequences, float scale) -> Tensor",
    reference=_paged_attention,
    fake=lambda q, *_: torch.empty_like(q),
)
declare(
    "quantize_kv(Tensor x) -> Tensor",
    reference=_quantize_kv,
    fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] + 4), dtype=torch.int8),
)
declare(
    "kv_write(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k_new, Tensor v_new, "
    "Tensor block_tables, Tensor sequences) -> ()",
    reference=_kv_write,
    fake=lambda *_: None,
)
