from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.pages import (
    NAN,
    Cache,
    Heads,
    Step,
    Text,
    garbage,
    key_place,
    make_step,
    random_text,
    value_place,
)
from trnc.ops import native
from trnc.ops.attention import kv_write, paged_attention, quantize_kv
from trnc.ops.library import reference_mode

pytestmark = pytest.mark.usefixtures("native_library")

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
SMALL = Heads(kv=2, group=3, dim=16, page_size=16, dtype=torch.float16)


@pytest.fixture(autouse=True)
def _restore_threads(native_library: Path) -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


heads = st.builds(
    Heads,
    kv=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 32, 64, 80, 1, 7, 24, 50]),
    page_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(DTYPES),
).filter(lambda heads: heads.dtype != torch.int8 or heads.dim % 4 == 0)


def attend(cache: Cache, step: Step) -> Tensor:
    scale = cache.heads.dim**-0.5
    return paged_attention(
        step.q, step.k_new, step.v_new, cache.k, cache.v, step.tables, step.sequences, scale
    )


def write(cache: Cache, step: Step) -> None:
    kv_write(cache.k, cache.v, step.k_new, step.v_new, step.tables, step.sequences)


def whole(heads: Heads, text: Text) -> Tensor:
    """Every row of a text, computed in one step."""
    cache = Cache(heads, [text])
    return attend(cache, make_step(cache, [(0, text, 0, len(text.q))]))


@settings(max_examples=60, deadline=None)
@given(
    heads,
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_close_to_the_reference(heads: Heads, lengths: list[tuple[int, int]], gap: int) -> None:
    texts = [random_text(heads, start + count, i) for i, (start, count) in enumerate(lengths)]
    cache = Cache(heads, texts)
    parts = []
    for i, (start, count) in enumerate(lengths):
        cache.write(i, texts[i], start)
        parts.append((i, texts[i], start, count))
    step = make_step(cache, parts, gap=gap)
    out = attend(cache, step)
    with reference_mode():
        wanted = attend(cache, replace(step, q=step.q.double()))
    assert wanted.dtype == torch.float64
    # With an int8 cache, queries are rounded to 16 bits and weights to 15; keys were to 8.
    bound = 1e-3 if heads.dtype == torch.int8 else 5e-6
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=bound)
    covered = torch.zeros(len(step.q), dtype=torch.bool)
    for first, count, _ in step.sequences.tolist():
        covered[first : first + count] = True
    assert not out[~covered].any()


def test_long_context_is_close_to_the_reference() -> None:
    heads = Heads(kv=1, group=2, dim=64, page_size=64, dtype=torch.float32)
    text = random_text(heads, 3000, 0)
    cache = Cache(heads, [text])
    cache.write(0, text, 2900)
    step = make_step(cache, [(0, text, 2900, 100)])
    out = attend(cache, step)
    with reference_mode():
        wanted = attend(cache, replace(step, q=step.q.double()))
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5e-6)


@settings(max_examples=40, deadline=None)
@given(
    heads,
    st.lists(st.integers(1, 130), min_size=1, max_size=6),
    st.lists(st.integers(1, 130), min_size=1, max_size=6),
    st.integers(0, 2),
    st.sampled_from([1, 2, 3, 5]),
)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    heads: Heads, cuts: list[int], strangers: list[int], gap: int, threads: int
) -> None:
    """A prompt in steps, beside a stranger that is cut elsewhere, gives the bits of one step."""
    texts = [random_text(heads, sum(cuts), 1), random_text(heads, sum(strangers), 2)]
    native.set_num_threads(1)
    wanted = [whole(heads, text) for text in texts]
    native.set_num_threads(threads)
    cache = Cache(heads, texts)
    at = [0, 0]
    for i in range(max(len(cuts), len(strangers))):
        counts = [lengths[i] if i < len(lengths) else 0 for lengths in (cuts, strangers)]
        parts = [(n, texts[n], at[n], counts[n]) for n in (i % 2, 1 - i % 2)]
        step = make_step(cache, parts, gap=gap, readable=True)
        out = attend(cache, step)
        for (n, _, start, count), (first, *_) in zip(parts, step.sequences.tolist(), strict=True):
            assert torch.equal(out[first : first + count], wanted[n][start : start + count])
        write(cache, step)
        at = [a + b for a, b in zip(at, counts, strict=True)]


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [*((size, torch.float16) for size in (16, 32, 64, 128, 256)), (32, torch.int8)],
)
def test_decoding_gives_the_bits_of_prefill(page_size: int, dtype: torch.dtype) -> None:
    """Every position decoded alone, over the first segments' edges."""
    heads = Heads(kv=1, group=3, dim=32, page_size=page_size, dtype=dtype)
    text = random_text(heads, 530, 3)
    wanted = whole(heads, text)
    cache = Cache(heads, [text])
    for position in range(530):
        step = make_step(cache, [(0, text, position, 1)], readable=True)
        assert torch.equal(attend(cache, step)[0], wanted[position]), position
        write(cache, step)


def test_long_rows_are_cut_among_threads_without_a_trace() -> None:
    """One long sequence alone (its segments run apart) and beside many (they do not)."""
    heads = Heads(kv=3, group=3, dim=64, page_size=32, dtype=torch.float16)
    long, short = random_text(heads, 2000, 4), random_text(heads, 300, 5)
    texts = [long] + [short] * 3
    cache = Cache(heads, texts)
    for i, text in enumerate(texts):
        cache.write(i, text, len(text.q) - 40)
    results = []
    for threads in (1, 2, 7):
        native.set_num_threads(threads)
        for count in (1, 2, 40):
            part = (0, long, 1960, count)
            alone = attend(cache, make_step(cache, [part]))
            many = [part] * 12 + [(i, short, 260, 40) for i in (1, 2, 3)]
            crowd = attend(cache, make_step(cache, many))
            for i in range(12):
                assert torch.equal(crowd[i * count : (i + 1) * count], alone)
            results.append(alone[0])
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf")])
def test_later_keys_and_other_sequences_reach_no_row(poison: float) -> None:
    texts = [random_text(SMALL, 90, 6), random_text(SMALL, 40, 7)]
    cache = Cache(SMALL, texts)
    parts = [(0, texts[0], 0, 90), (1, texts[1], 0, 40)]
    clean = attend(cache, make_step(cache, parts))
    for at in (0, 1, 15, 16, 50, 89):
        step = make_step(cache, parts)
        step.k_new[at] = poison
        step.v_new[at] = poison
        out = attend(cache, step)
        assert torch.equal(out[:at], clean[:at])
        assert torch.equal(out[90:], clean[90:])
        assert not torch.isfinite(out[at:90]).any()


def test_one_key_returns_its_value() -> None:
    text = random_text(SMALL, 1, 8)
    out = whole(SMALL, text)
    assert torch.equal(out, text.v.float().repeat_interleave(3, dim=1))


def test_keys_are_rounded_to_int8_as_the_reference_rounds_them() -> None:
    for dim in (1, 16, 50, 64):
        x = torch.randn(30, 3, dim, generator=torch.Generator().manual_seed(dim)) * 5
        x[3], x[4] = 0.0, 1e-35
        rows = quantize_kv(x)
        with reference_mode():
            assert torch.equal(rows, quantize_kv(x))
        scale = rows[..., -4:].contiguous().view(torch.float32)
        assert ((rows[..., :-4] * scale - x).abs() <= scale * 0.501 + 1e-30).all()
        assert torch.equal(scale[..., 0], x.abs().amax(dim=-1) / 127)


def test_a_row_that_is_not_finite_shows_in_its_scale() -> None:
    x = torch.ones(2, 1, 16)
    x[0, 0, 5], x[1, 0, 7] = NAN, float("inf")
    scale = quantize_kv(x)[..., -4:].contiguous().view(torch.float32)
    assert not torch.isfinite(scale).any()


def test_no_rows_and_no_sequences() -> None:
    cache = Cache(SMALL, [random_text(SMALL, 20, 0)])
    assert attend(cache, make_step(cache, [])).shape == (0, 6, 16)
    assert not attend(cache, make_step(cache, [], gap=3)).any()


def test_large_scores_do_not_overflow() -> None:
    heads = Heads(kv=1, group=1, dim=16, page_size=16, dtype=torch.float32)
    text = random_text(heads, 40, 9)
    out = whole(heads, Text(text.q * 1000, text.k, text.v))
    cache = Cache(heads, [text])
    step = make_step(cache, [(0, text, 0, 40)])
    with reference_mode():
        wanted = attend(cache, replace(step, q=step.q.double() * 1000)).float()
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-2)


@settings(max_examples=40, deadline=None)
@given(heads, st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=4))
def test_kv_write_writes_its_rows_and_nothing_else(
    heads: Heads, lengths: list[tuple[int, int]]
) -> None:
    texts = [random_text(heads, start + count, i) for i, (start, count) in enumerate(lengths)]
    got, wanted = Cache(heads, texts), Cache(heads, texts)
    parts = [(i, texts[i], *lengths[i]) for i in range(len(texts))]
    write(got, make_step(got, parts, gap=1, readable=True))
    with reference_mode():
        write(wanted, make_step(wanted, parts, gap=1, readable=True))
    for text, (start, _), pages in zip(texts, lengths, wanted.pages, strict=True):
        text.k[:start] = text.v[:start] = garbage(heads.dtype)
        for position in range(start, len(text.q)):
            page, slot = pages[position // heads.page_size], position % heads.page_size
            key = wanted.k[page].flatten(1)[:, key_place(heads, slot)]
            value = wanted.v[page].flatten(1)[:, value_place(heads, slot)]
            assert torch.equal(key, text.k[position])
            assert torch.equal(value, text.v[position])
    assert torch.equal(got.k.nan_to_num(nan=99), wanted.k.nan_to_num(nan=99))
    assert torch.equal(got.v.nan_to_num(nan=99), wanted.v.nan_to_num(nan=99))
    if heads.dtype != torch.int8:  # where garbage could be a key
        kept = wanted.k.isnan().logical_not().sum()
        assert kept == sum(c for _, c in lengths) * heads.kv * heads.dim


def test_wrong_arguments_are_named() -> None:
    text = random_text(SMALL, 20, 0)
    cache = Cache(SMALL, [text])
    step = make_step(cache, [(0, text, 17, 3)])
    args = [step.q, step.k_new, step.v_new, cache.k, cache.v, step.tables, step.sequences]

    def refused(index: int, value: Tensor, match: str) -> None:
        changed = [*args[:index], value, *args[index + 1 :]]
        with pytest.raises(RuntimeError, match=match):
            paged_attention(*changed, 1.0)

    refused(0, step.q.double(), "q: expected .* Float, got .* Double")
    refused(0, step.q[:, :5].contiguous(), "q: 5 heads do not divide into groups of 2")
    refused(1, step.k_new.float(), "k_new: expected .* Half, got .* Float")
    refused(2, step.v_new[:2], "v_new: expected size 3 in dimension 0, got 2")
    refused(3, cache.k.double(), "k_pages: expected f32, f16, bf16 or i8, got Double")
    refused(4, cache.v[:1], "v_pages: expected size 4 in dimension 0, got 1")
    refused(5, step.tables[:, :1].contiguous(), "sequence 0 needs 2 pages, the table has 1")
    refused(5, step.tables * 0 - 1, "sequence 0 names page -1 of 4")
    refused(6, step.sequences.long(), "sequences: expected .* Int, got .* Long")
    refused(6, step.sequences + torch.tensor([1, 0, 0]).int(), "not within 3 token rows")
    with pytest.raises(RuntimeError, match="sequence 0 names page 2147483647 of 4"):
        kv_write(cache.k, cache.v, step.k_new, step.v_new, step.tables * 0 + 2**31 - 1, args[6])
    odd = torch.zeros(2, 2, 16, 24).half()
    with pytest.raises(RuntimeError, match="page size must be 16, 32, 64, 128 or 256, got 24"):
        paged_attention(*args[:3], odd, odd.transpose(2, 3).contiguous(), *args[5:], 1.0)


def test_ops_trace_with_fake_tensors() -> None:
    text = random_text(SMALL, 20, 0)
    cache = Cache(SMALL, [text])
    cache.k.zero_(), cache.v.zero_()
    step = make_step(cache, [(0, text, 17, 3)], readable=True)
    new = (step.k_new, step.v_new)
    pages = (cache.k, cache.v)
    layout = (step.tables, step.sequences)
    op = torch.ops.trnc
    torch.library.opcheck(op.paged_attention.default, (step.q, *new, *pages, *layout, 0.25))
    torch.library.opcheck(op.kv_write.default, (*pages, *new, *layout))


def test_no_heads_are_quantised_to_nothing():
    with reference_mode():
        for shape in ((0, 2, 8), (3, 0, 8), (2, 1, 8)):
            assert quantize_kv(torch.zeros(shape)).shape == (*shape[:2], 12)
