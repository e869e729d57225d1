from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.weights import random_rows
from trnc.ops import native
from trnc.ops.library import reference_mode
from trnc.ops.norm import rms_norm, silu_mul

pytestmark = pytest.mark.usefixtures("native_library")


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 3000), st.integers(0, 99))
def test_rms_norm_is_close_to_the_reference(t: int, k: int, seed: int) -> None:
    x, weight = random_rows(t, k, seed), random_rows(1, k, seed + 1)[0]
    out = rms_norm(x, weight, 1e-5)
    with reference_mode():
        wanted = rms_norm(x.double(), weight, 1e-5)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=1e-7)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.integers(0, 99))
def test_silu_mul_is_close_to_the_reference(t: int, width: int, seed: int) -> None:
    x = random_rows(t, 2 * width, seed)
    out = silu_mul(x)
    with reference_mode():
        wanted = silu_mul(x.double())
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=1e-7)


def test_silu_mul_saturates_like_silu() -> None:
    gate = torch.tensor([-200.0, -90.0, -0.0, 0.0, 90.0, 200.0, float("nan"), float("inf")])
    out = silu_mul(torch.cat([gate, torch.full((8,), 2.0)])[None])[0]
    wanted = torch.nn.functional.silu(gate.double()).float() * 2
    torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 576, 1000])
def test_a_row_s_bits_are_the_same_in_every_batch(width: int, native_library: Path) -> None:
    x, weight = random_rows(40, 2 * width), random_rows(1, 2 * width)[0]
    native.set_num_threads(1)
    norms = torch.cat([rms_norm(row[None], weight, 1e-5) for row in x])
    products = torch.cat([silu_mul(row[None]) for row in x])
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for t in range(1, 41):
            first = (7 * t) % (41 - t)
            rows = slice(first, first + t)
            assert torch.equal(rms_norm(x[rows], weight, 1e-5), norms[rows])
            assert torch.equal(silu_mul(x[rows]), products[rows])
    native.set_num_threads(native.default_threads())


def test_many_rows_run_on_every_thread() -> None:
    x, weight = random_rows(700, 96), random_rows(1, 96)[0]
    assert torch.equal(rms_norm(x, weight, 1e-5)[650:651], rms_norm(x[650:651], weight, 1e-5))
    assert torch.equal(silu_mul(x)[650:651], silu_mul(x[650:651]))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="rms_norm: weight has 3 elements, x 4"):
        rms_norm(torch.zeros(2, 4), torch.zeros(3), 1e-5)
    with pytest.raises(RuntimeError, match="silu_mul: gate_up must have an even width"):
        silu_mul(torch.zeros(2, 5))


def test_ops_trace_with_fake_tensors() -> None:
    x = random_rows(3, 64)
    torch.library.opcheck(torch.ops.trnc.rms_norm.default, (x, torch.ones(64), 1e-5))
    torch.library.opcheck(torch.ops.trnc.silu_mul.default, (x,))
