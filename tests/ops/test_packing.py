from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.weights import GROUPED, random_weight
from trnc.checkpoint.layouts import Dense, Int4Groups, Int8Groups, concatenate
from trnc.errors import CheckpointError, ConfigError
from trnc.ops.packing import FORMATS, natural_format, pack, packed_shape, unpack


@given(st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 5), st.integers(0, 31))
def test_unpack_returns_what_was_packed(format: str, n: int, groups: int, extra: int) -> None:
    k = groups * 32 + (0 if format in GROUPED else extra)
    logical = random_weight(format, n, k)
    packed = pack(logical, format)
    assert packed.dtype == torch.uint8
    assert tuple(packed.shape) == packed_shape(format, n, k)
    assert torch.equal(unpack(packed, format, n, k), logical.dequantize())


@pytest.mark.parametrize("format", FORMATS)
def test_natural_format_is_the_form_s_own(format: str) -> None:
    assert natural_format(random_weight(format, 3, 32)) == format


@pytest.mark.parametrize("format", GROUPED)
def test_grouped_forms_pack_as_floats_too(format: str) -> None:
    logical = random_weight(format, 20, 64)
    assert torch.equal(unpack(pack(logical, "f32"), "f32", 20, 64), logical.dequantize())
    rounded = logical.dequantize().bfloat16().float()
    assert torch.equal(unpack(pack(logical, "bf16"), "bf16", 20, 64), rounded)


def test_extreme_values_survive() -> None:
    q = torch.tensor([-128, -127, -1, 0, 1, 127] + [5] * 26, dtype=torch.int8).repeat(2, 1)
    logical = Int8Groups(q, torch.tensor([[6e-8], [65504.0]]).half())
    assert torch.equal(unpack(pack(logical, "i8g32"), "i8g32", 2, 32), logical.dequantize())


def test_bad_formats_and_pairings_are_named() -> None:
    dense = Dense(torch.zeros(4, 40))
    with pytest.raises(ConfigError, match=r"Did you mean 'i4g32"):
        pack(dense, "i4g_32")
    with pytest.raises(ConfigError, match=r"multiples of 32, got 40"):
        pack(dense, "i8g32")
    with pytest.raises(CheckpointError, match=r"Dense cannot be packed as i8g32"):
        pack(Dense(torch.zeros(4, 32)), "i8g32")
    with pytest.raises(CheckpointError, match=r"cannot be packed as i4g32s"):
        pack(random_weight("i4g32", 4, 32), "i4g32s")
    with pytest.raises(CheckpointError, match=r"does not fit f16"):
        pack(Int8Groups(torch.zeros(1, 32, dtype=torch.int8), torch.tensor([[1e6]])), "i8g32")


@pytest.mark.parametrize("format", FORMATS)
def test_rows_can_be_cut_and_joined(format: str) -> None:
    whole = random_weight(format, 12, 64)
    joined = concatenate([whole.rows(0, 5), whole.rows(5, 12)])
    assert joined.shape == (12, 64)
    assert torch.equal(joined.dequantize(), whole.dequantize())
    order = torch.tensor([3, 1, 11])
    assert torch.equal(whole.permute_rows(order).dequantize(), whole.dequantize()[order])


def test_joining_different_forms_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"different forms.*Int4Groups symmetric"):
        concatenate([random_weight("i4g32", 2, 32), random_weight("i4g32s", 2, 32)])
    with pytest.raises(CheckpointError, match=r"bfloat16"):
        concatenate([random_weight("f32", 2, 32), random_weight("bf16", 2, 32)])


def test_forms_check_their_parts() -> None:
    with pytest.raises(CheckpointError, match=r"scale must be \[N, K/32\]"):
        Int8Groups(torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 3).half())
    with pytest.raises(CheckpointError, match=r"q must be a matrix of torch.uint8"):
        Int4Groups(torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 2).half(), None)
