"""Sequences laid out in pages for the attention ops, with garbage wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trnc.ops.attention import kv_row_size, quantize_kv
from trnc.ops.library import reference_mode

NAN = float("nan")
NO_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention and the dtype of its cache."""

    kv: int
    group: int
    dim: int
    page_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of every position of one sequence: [n, heads, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_text(heads: Heads, n: int, seed: int) -> Text:
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(n, heads.kv * heads.group, heads.dim, generator=rng) * 2
    k, v = torch.randn(2, n, heads.kv, heads.dim, generator=rng)
    return Text(q, stored(k, heads.dtype), stored(v, heads.dtype))


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as rows of a cache of `dtype`."""
    if dtype != torch.int8:
        return x.to(dtype)
    with reference_mode():
        return quantize_kv(x)


def garbage(dtype: torch.dtype) -> float:
    """What nothing may read, to fill a cache with; an int8 row's scale is so NaN, too."""
    return -1 if dtype == torch.int8 else NAN


def key_place(heads: Heads, slot: int) -> list[int]:
    """Where the elements of one key lie in its head's page, in the order of a row."""
    dim, size = heads.dim, heads.page_size
    if heads.dtype != torch.int8:
        return [i * size + slot for i in range(dim)]
    values = [(i // 4 * size + slot) * 4 + i % 4 for i in range(dim)]
    return values + [dim * size + slot * 4 + i for i in range(4)]


def value_place(heads: Heads, slot: int) -> list[int]:
    """The same for one value."""
    dim, size = heads.dim, heads.page_size
    if heads.dtype != torch.int8:
        return [slot * dim + i for i in range(dim)]
    values = [(slot // 4 * dim + i) * 4 + slot % 4 for i in range(dim)]
    return values + [dim * size + slot * 4 + i for i in range(4)]


class Cache:
    """Pages of NaN; `pages[i]` are those of text i, scattered among the others."""

    def __init__(self, heads: Heads, texts: list[Text], *, spare: int = 2) -> None:
        size = heads.page_size
        blocks = [-(-len(text.q) // size) for text in texts]
        pages = sum(blocks) + spare
        self.heads = heads
        row, junk = kv_row_size(heads.dim, heads.dtype), garbage(heads.dtype)
        self.k = torch.full((pages, heads.kv, row, size), junk, dtype=heads.dtype)
        self.v = torch.full((pages, heads.kv, size, row), junk, dtype=heads.dtype)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(pages)).int()
        starts = [sum(blocks[:i]) for i in range(len(blocks))]
        self.pages = [order[a : a + b] for a, b in zip(starts, blocks, strict=True)]

    def write(self, index: int, text: Text, end: int) -> None:
        """Put the first `end` keys of text `index` into its pages."""
        for position in range(end):
            page = self.pages[index][position // self.heads.page_size]
            slot = position % self.heads.page_size
            self.k[page].flatten(1)[:, key_place(self.heads, slot)] = text.k[position]
            self.v[page].flatten(1)[:, value_place(self.heads, slot)] = text.v[position]


@dataclass(frozen=True)
class Step:
    """The arguments of the ops for one step, padding rows included."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    tables: Tensor
    sequences: Tensor


def make_step(
    cache: Cache, parts: list[tuple[int, Text, int, int]], *, gap: int = 0, readable: bool = False
) -> Step:
    """Lay out (index, text, start, count) parts with `gap` padding rows of NaN around each.

    Table entries of pages that the step must not read name no page, unless `readable`.
    """
    heads, size = cache.heads, cache.heads.page_size
    width = max([len(cache.pages[i]) for i, *_ in parts], default=0) + 1
    tables = torch.full((len(parts), width), NO_PAGE, dtype=torch.int32)
    sequences = torch.zeros(len(parts), 3, dtype=torch.int32)
    tokens = gap + sum(count + gap for *_, count in parts)
    q = torch.full((tokens, heads.kv * heads.group, heads.dim), NAN)
    shape = (2, tokens, heads.kv, kv_row_size(heads.dim, heads.dtype))
    k, v = torch.full(shape, garbage(heads.dtype), dtype=heads.dtype)
    first = gap
    for row, (index, text, start, count) in enumerate(parts):
        end = start + count if readable else start
        blocks = -(-end // size) if count else 0
        tables[row, :blocks] = cache.pages[index][:blocks]
        sequences[row] = torch.tensor([first, count, start])
        rows, positions = slice(first, first + count), slice(start, start + count)
        q[rows], k[rows], v[rows] = text.q[positions], text.k[positions], text.v[positions]
        first += count + gap
    return Step(q, k, v, tables, sequences)
