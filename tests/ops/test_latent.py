"""Attention over paged latents: close to the reference, and the same bits however it is cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trnc.models.llama import cache_rows
from trnc.ops import native
from trnc.ops.attention import kv_row_size
from trnc.ops.latent import latent_attention, latent_write
from trnc.ops.library import reference_mode

pytestmark = pytest.mark.usefixtures("native_library")

NAN = float("nan")
SCALE = 0.2


@dataclass(frozen=True)
class Shape:
    heads: int
    rank: int
    rope: int
    page_size: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.rank + self.rope


@dataclass(frozen=True)
class Text:
    """Queries [n, Hq, W] and latents [n, W] of every position, in pages that are `pages`."""

    q: Tensor
    latents: Tensor
    pages: list[int]


def random_text(shape: Shape, n: int, seed: int, first_page: int) -> Text:
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(n, shape.heads, shape.width, generator=rng) * 2
    latents = cache_rows(torch.randn(n, 1, shape.width, generator=rng), shape.dtype).squeeze(1)
    blocks = -(-n // shape.page_size)
    return Text(q, latents, list(range(first_page + blocks - 1, first_page - 1, -1)))


def cache(shape: Shape, parts: list[tuple[Text, int, int]]) -> Tensor:
    """Pages that hold what is before each part's start, and NaN everywhere else."""
    count = 1 + max(max(text.pages) for text, *_ in parts)
    row = kv_row_size(shape.width, shape.dtype)
    garbage = -1 if shape.dtype == torch.int8 else NAN  # a scale of four bytes -1 is NaN
    pages = torch.full((count, shape.page_size, row), garbage, dtype=shape.dtype)
    for text, start, _ in parts:
        for i in range(start):
            pages[text.pages[i // shape.page_size], i % shape.page_size] = text.latents[i]
    return pages


def step(parts: list[tuple[Text, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, latent_new, block_tables and sequences of (text, start, count) parts, padding around."""
    width = max(len(text.pages) for text, *_ in parts)
    tables = torch.zeros(len(parts) + 1, width, dtype=torch.int32)
    sequences = torch.zeros(len(parts) + 1, 3, dtype=torch.int32)
    q, latents = [], []
    first = 0
    for row, (text, start, count) in enumerate(parts):
        tables[row, : len(text.pages)] = torch.tensor(text.pages)
        sequences[row] = torch.tensor([first, count, start])
        padding = torch.full_like(text.q[:1], NAN)
        q += [text.q[start : start + count], padding]
        latents += [
            text.latents[start : start + count],
            torch.full_like(text.latents[:1], -1 if text.latents.dtype == torch.int8 else NAN),
        ]
        first += count + 1
    return torch.cat(q), torch.cat(latents), tables, sequences


def attend(shape: Shape, parts: list[tuple[Text, int, int]]) -> list[Tensor]:
    """What each part gets; the padding rows must be zero."""
    q, latents, tables, sequences = step(parts)
    pages = cache(shape, parts)
    out = latent_attention(q, latents, pages, tables, sequences, SCALE, shape.rank)
    results, first = [], 0
    for _, _, count in parts:
        results.append(out[first : first + count])
        assert (out[first + count] == 0).all()
        first += count + 1
    return results


shapes = st.builds(
    Shape,
    heads=st.sampled_from([1, 3, 16, 128]),
    rank=st.sampled_from([5, 16, 40, 64]),
    rope=st.sampled_from([0, 4, 16]),
    page_size=st.sampled_from([16, 32, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
)


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(0, 70), st.integers(1, 20), st.integers(0, 99))
def test_close_to_the_reference(shape: Shape, start: int, count: int, seed: int) -> None:
    text = random_text(shape, start + count, seed, first_page=2)
    parts = [(text, start, count)]
    (out,) = attend(shape, parts)
    q, latents, tables, sequences = step(parts)
    with reference_mode():
        wanted = latent_attention(
            q.double(), latents, cache(shape, parts), tables, sequences, SCALE, shape.rank
        )
    torch.testing.assert_close(out.double(), wanted[:count], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_longer_than_a_segment_and_cut_anywhere(dtype: torch.dtype) -> None:
    shape = Shape(heads=4, rank=24, rope=8, page_size=32, dtype=dtype)
    text = random_text(shape, 600, 1, first_page=1)
    other = random_text(shape, 300, 2, first_page=40)
    (whole,) = attend(shape, [(text, 0, 600)])
    with reference_mode():
        (wanted,) = attend(shape, [(text, 0, 600)])
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=2e-5)
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for start, count in ((0, 1), (255, 1), (256, 1), (100, 300), (511, 89), (599, 1)):
            part = attend(shape, [(other, 299, 1), (text, start, count), (other, 3, 5)])[1]
            assert torch.equal(part, whole[start : start + count])
    native.set_num_threads(native.default_threads())


def test_page_sizes_give_the_same_bits() -> None:
    results = []
    for page_size in (16, 64, 256):
        shape = Shape(heads=6, rank=40, rope=16, page_size=page_size, dtype=torch.float32)
        text = random_text(shape, 330, 5, first_page=1)
        results += attend(shape, [(text, 320, 10)])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_write_puts_rows_where_they_are_read(dtype: torch.dtype) -> None:
    shape = Shape(heads=2, rank=24, rope=8, page_size=16, dtype=dtype)
    texts = [random_text(shape, 50, 1, first_page=1), random_text(shape, 20, 2, first_page=8)]
    parts = [(texts[0], 30, 20), (texts[1], 0, 20)]
    pages = cache(shape, parts)
    _, latents, tables, sequences = step(parts)
    latent_write(pages, latents, tables, sequences)
    wanted = cache(shape, [(texts[0], 50, 0), (texts[1], 20, 0)])
    torch.testing.assert_close(pages, wanted, rtol=0, atol=0, equal_nan=True)
    again = cache(shape, parts)
    with reference_mode():
        latent_write(again, latents, tables, sequences)
    torch.testing.assert_close(again, wanted, rtol=0, atol=0, equal_nan=True)


def test_wrong_arguments_are_named() -> None:
    q, new, pages = torch.zeros(2, 3, 24), torch.zeros(2, 24), torch.zeros(4, 16, 24)
    tables, sequences = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[0, 2, 0]]).int()
    with pytest.raises(RuntimeError, match="rank 25 is not within latents of 24"):
        latent_attention(q, new, pages, tables, sequences, SCALE, 25)
    with pytest.raises(RuntimeError, match="latent_new: expected size 24 in dimension 1, got 23"):
        latent_attention(q, torch.zeros(2, 23), pages, tables, sequences, SCALE, 16)
    with pytest.raises(RuntimeError, match="names page 9 of 4"):
        latent_write(pages, new, tables + 9, sequences)


def test_ops_trace_with_fake_tensors() -> None:
    q, new, pages = torch.zeros(2, 3, 24), torch.zeros(2, 24), torch.zeros(4, 16, 24)
    tables, sequences = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[0, 2, 0]]).int()
    arguments = (q, new, pages, tables, sequences, SCALE, 16)
    torch.library.opcheck(torch.ops.trnc.latent_attention.default, arguments)
    torch.library.opcheck(torch.ops.trnc.latent_write.default, (pages, new, tables, sequences))
