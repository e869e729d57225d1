from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.weights import GROUPED, error_bound, packed_weight, random_rows, random_weight
from trnc.checkpoint.layouts import Int8Groups
from trnc.ops import native
from trnc.ops.library import reference_mode
from trnc.ops.linear import embedding, fused_linear, linear
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import FORMATS, pack

pytestmark = pytest.mark.usefixtures("native_library")

THREADS = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def _restore_threads(native_library: Path) -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


def in_features(format: str) -> st.SearchStrategy[int]:
    if format in GROUPED:
        return st.integers(1, 14).map(lambda groups: groups * 32)
    return st.integers(1, 150)


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, int, int, int]:
    format = draw(st.sampled_from(FORMATS))
    return format, draw(st.integers(1, 100)), draw(in_features(format)), draw(st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 20), st.booleans())
def test_close_to_the_reference(
    problem: tuple[str, int, int, int], t: int, with_bias: bool
) -> None:
    format, n, k, seed = problem
    logical = random_weight(format, n, k, seed)
    weight, x = pack(logical, format), random_rows(t, k, seed)
    bias = random_rows(1, n, seed)[0] if with_bias else None
    out = linear(x, weight, bias, format, n)
    with reference_mode():
        wanted = linear(x.double(), weight, bias, format, n)
    bound = error_bound(x, logical.dequantize(), format) + 1e-6
    assert out.dtype == torch.float32
    assert wanted.dtype == torch.float64
    assert ((out - wanted).abs() <= bound).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(83, 96), (16, 160), (200, 33), (7, 1)])
def test_a_row_s_bits_are_the_same_in_every_batch(format: str, n: int, k: int) -> None:
    """Each row alone, then every number of rows from 1 to 40, cut out at every place."""
    k = -(-k // 32) * 32 if format in GROUPED else k
    weight, x = packed_weight(format, n, k), random_rows(40, k)
    native.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1], weight, None, format, n) for i in range(40)])
    for threads in THREADS:
        native.set_num_threads(threads)
        for t in range(1, 41):
            for first in {0, (7 * t) % (41 - t), 40 - t}:
                out = linear(x[first : first + t], weight, None, format, n)
                assert torch.equal(out, alone[first : first + t]), (format, threads, t, first)


@settings(max_examples=60, deadline=None)
@given(
    problems(),
    st.lists(st.integers(0, 11), min_size=1, max_size=90),
    st.sampled_from(THREADS),
)
def test_any_mix_of_rows_keeps_each_row_s_bits(
    problem: tuple[str, int, int, int], mix: list[int], threads: int
) -> None:
    format, n, k, seed = problem
    weight, rows = packed_weight(format, n, k, seed), random_rows(12, k, seed)
    bias = random_rows(1, n, seed)[0]
    native.set_num_threads(1)
    alone = torch.cat([linear(rows[i : i + 1], weight, bias, format, n) for i in range(12)])
    native.set_num_threads(threads)
    assert torch.equal(linear(rows[mix], weight, bias, format, n), alone[mix])


@pytest.mark.parametrize("format", FORMATS)
def test_many_rows_cross_every_chunk(format: str) -> None:
    """Enough rows for several chunks of quantised rows, at a K that makes chunks small."""
    weight, x = packed_weight(format, 40, 2048), random_rows(150, 2048)
    alone = torch.cat([linear(row[None], weight, None, format, 40) for row in x])
    assert torch.equal(linear(x, weight, None, format, 40), alone)


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_that_are_stored_past_the_caches(format: str) -> None:
    """More than a MiB of outputs, in whole vectors and not."""
    for n in (512, 520, 523):
        weight, x = packed_weight(format, n, 64), random_rows(600, 64)
        bias, residual = random_rows(1, n)[0], random_rows(600, n)
        alone = torch.cat([linear(row[None], weight, bias, format, n) for row in x])
        assert torch.equal(linear(x, weight, bias, format, n), alone)
        fused = fused_linear(x, weight, bias, None, residual, format, n, 0.0, False)
        assert torch.equal(fused, residual + alone)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fused_ops_give_the_bits_of_the_ops_they_stand_for(format: str, rows: int) -> None:
    weight, bias = packed_weight(format, 50, 96), random_rows(1, 50)[0]
    x, norm = random_rows(rows, 96), random_rows(1, 96)[0]
    residual = random_rows(rows, 50, 2)
    normed = fused_linear(x, weight, bias, norm, None, format, 50, 1e-5, False)
    assert torch.equal(normed, linear(rms_norm(x, norm, 1e-5), weight, bias, format, 50))
    added = fused_linear(x, weight, None, None, residual, format, 50, 0.0, False)
    assert torch.equal(added, residual + linear(x, weight, None, format, 50))
    with reference_mode():
        wanted = fused_linear(x.double(), weight, bias, norm, None, format, 50, 1e-5, False)
        rows_before = rms_norm(x.double(), norm, 1e-5)
    bound = error_bound(rows_before, random_weight(format, 50, 96).dequantize(), format)
    assert ((normed - wanted).abs() <= bound * 1.01 + 1e-5).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [96, 50])  # gates that fill their tiles, and not
def test_a_gated_linear_gives_the_bits_of_silu_mul(format: str, n: int) -> None:
    weight, bias, norm = packed_weight(format, n, 96), random_rows(1, n)[0], random_rows(1, 96)[0]
    for rows in (1, 5, 20, 40, 90):
        x = random_rows(rows, 96)
        wanted = silu_mul(linear(rms_norm(x, norm, 1e-5), weight, bias, format, n))
        assert torch.equal(fused_linear(x, weight, bias, norm, None, format, n, 1e-5, True), wanted)
    with reference_mode():
        reference = fused_linear(x, weight, bias, norm, None, format, n, 1e-5, True)
        plain = silu_mul(linear(rms_norm(x, norm, 1e-5), weight, bias, format, n))
    assert torch.equal(reference, plain)


@pytest.mark.parametrize("format", FORMATS)
def test_gated_outputs_that_are_stored_past_the_caches(format: str) -> None:
    weight, x = packed_weight(format, 1056, 64), random_rows(600, 64)
    wanted = silu_mul(linear(x, weight, None, format, 1056))
    assert torch.equal(fused_linear(x, weight, None, None, None, format, 1056, 0.0, True), wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_a_broken_row_breaks_no_other(format: str) -> None:
    weight, x = packed_weight(format, 50, 64), random_rows(9, 64)
    clean = linear(x, weight, None, format, 50)
    for poison in (float("nan"), float("inf"), float("-inf")):
        dirty = x.clone()
        dirty[4, 33] = poison
        out = linear(dirty, weight, None, format, 50)
        assert not torch.isfinite(out[4]).any()
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30])
def test_tiny_and_huge_activations(format: str, size: float) -> None:
    weight = packed_weight(format, 20, 64)
    x = torch.full((2, 64), size)
    out = linear(x, weight, None, format, 20)
    with reference_mode():
        wanted = linear(x.double(), weight, None, format, 20)
    assert ((out - wanted).abs() <= 1e-27 + wanted.abs().max() * 1e-5).all()


def test_integer_sums_hold_at_their_largest() -> None:
    """127 * 255 * 32 in one group: a 16-bit step anywhere would saturate."""
    q = torch.full((16, 32), 127, dtype=torch.int8)
    q[1] = -127
    logical = Int8Groups(q, torch.ones(16, 1).half())
    x = torch.full((1, 32), 127.0)
    x[0, 5] = -127.0
    out = linear(x, pack(logical, "i8g32"), None, "i8g32", 16)
    assert torch.equal(out, x @ q.float().T)


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows(format: str) -> None:
    weight = packed_weight(format, 20, 64)
    assert linear(torch.empty(0, 64), weight, None, format, 20).shape == (0, 20)


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.integers(-2, 99), max_size=40))
def test_embedding_rows_are_the_weight_s(
    problem: tuple[str, int, int, int], wanted: list[int]
) -> None:
    format, n, k, seed = problem
    logical = random_weight(format, n, k, seed)
    ids = torch.tensor([min(i, n - 1) for i in wanted], dtype=torch.int64)
    out = embedding(ids, pack(logical, format), format, k)
    dense = logical.dequantize()[ids.clamp(min=0)]
    assert torch.equal(out, torch.where(ids[:, None] < 0, 0.0, dense))
    with reference_mode():
        assert torch.equal(out, embedding(ids, pack(logical, format), format, k))


def test_wrong_arguments_are_named() -> None:
    weight, x = packed_weight("i4g32", 20, 64), random_rows(2, 64)
    with pytest.raises(RuntimeError, match=r"linear: x: expected .* Float, got .* Double"):
        linear(x.double(), weight, None, "i4g32", 20)
    with pytest.raises(RuntimeError, match=r"linear: x: expected a contiguous"):
        linear(random_rows(64, 2).T, weight, None, "i4g32", 20)
    with pytest.raises(RuntimeError, match=r"weight format i5 is unknown"):
        linear(x, weight, None, "i5", 20)
    with pytest.raises(RuntimeError, match=r"linear: weight has 2 tiles of 640 bytes"):
        linear(x, weight, None, "i8g32", 20)
    with pytest.raises(RuntimeError, match=r"linear: weight has 2 tiles"):
        linear(x, weight, None, "i4g32", 33)
    with pytest.raises(RuntimeError, match=r"linear: bias has 19 elements, not 20"):
        linear(x, weight, torch.zeros(19), "i4g32", 20)
    with pytest.raises(RuntimeError, match=r"linear: residual has 1 elements, not 2"):
        fused_linear(x, weight, None, None, torch.zeros(1, 20), "i4g32", 20, 0.0, False)
    with pytest.raises(RuntimeError, match=r"linear: norm has 63 elements, not 64"):
        fused_linear(x, weight, None, torch.zeros(63), None, "i4g32", 20, 0.0, False)
    with pytest.raises(RuntimeError, match=r"gated features are even and have no residual"):
        fused_linear(x, weight, None, None, torch.zeros(2, 20), "i4g32", 20, 0.0, True)
    with pytest.raises(RuntimeError, match=r"gated features are even and have no residual"):
        fused_linear(x, weight, None, None, None, "i4g32", 19, 0.0, True)
    with pytest.raises(RuntimeError, match=r"embedding: id 32 is not below 32"):
        embedding(torch.tensor([0, 32]), weight, "i4g32", 64)


@pytest.mark.parametrize("format", FORMATS)
def test_ops_trace_with_fake_tensors(format: str) -> None:
    weight, ids = packed_weight(format, 20, 64), torch.tensor([1, 2, -1])
    torch.library.opcheck(
        torch.ops.trnc.linear.default, (random_rows(3, 64), weight, torch.zeros(20), format, 20)
    )
    torch.library.opcheck(torch.ops.trnc.embedding.default, (ids, weight, format, 64))
