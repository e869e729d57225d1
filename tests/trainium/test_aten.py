"""Every row for an ATen op computes what torch does, on arguments that tell its axes apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from trnc.compiler.backends.stablehlo.aten import ATEN
from trnc.compiler.backends.stablehlo.site import Site

X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)
Y = X.flip(0, 2) * 0.5 + 0.1
ROWS = X[:, :, 0]
COLUMN = X[:, :1]
INTS = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4) % 7
BOOLS, OTHER_BOOLS = X > 0.2, Y > 0.4
PICKED = torch.tensor([1, 0, 1])
JAX_TYPES = {torch.bfloat16: jnp.bfloat16, torch.int32: jnp.int32, torch.float32: jnp.float32}

CASES: dict[str, list[tuple[Any, ...]]] = {
    "add.Tensor": [(X, Y), (X, 2.5), (X, COLUMN), (X, Y, {"alpha": 3})],
    "add.Scalar": [(INTS, 2)],
    "sub.Tensor": [(X, Y), (INTS, 3), (X, Y, {"alpha": 2})],
    "sub.Scalar": [(X, 1.5)],
    "rsub.Scalar": [(X, 1.5)],
    "mul.Tensor": [(X, Y), (X, 2.0), (INTS, INTS)],
    "mul.Scalar": [(X, 3)],
    "div.Tensor": [(X, Y), (X, 4.0)],
    "neg.default": [(X,)],
    "exp.default": [(X,)],
    "sigmoid.default": [(X,)],
    "maximum.default": [(X, Y)],
    "minimum.default": [(X, Y)],
    **{
        f"{name}.{kind}": [(INTS, INTS.flip(2) if kind == "Tensor" else 3)]
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Tensor", "Scalar")
    },
    "logical_and.default": [(BOOLS, OTHER_BOOLS)],
    "logical_or.default": [(BOOLS, OTHER_BOOLS)],
    "logical_not.default": [(BOOLS,)],
    "bitwise_and.Tensor": [(BOOLS, OTHER_BOOLS), (INTS, INTS.flip(2))],
    "bitwise_or.Tensor": [(BOOLS, OTHER_BOOLS)],
    "bitwise_not.default": [(BOOLS,)],
    "where.self": [(BOOLS, X, Y), (BOOLS, X, COLUMN)],
    "where.ScalarOther": [(BOOLS, X, 7.0)],
    "where.ScalarSelf": [(BOOLS, 7.0, X)],
    "masked_fill.Scalar": [(X, BOOLS, -1.0), (X, BOOLS[:, :1], -1.0)],
    "clamp.default": [(X, -1.0, 1.0), (X, 0.5), (INTS, {"max": 4})],
    "index.Tensor": [(X, [PICKED]), (X, [None, PICKED]), (X, [PICKED[:2], torch.tensor([2, 1])])],
    "gather.default": [(X, 2, INTS.long() % 4), (X, 1, INTS[:, :2].long() % 3)],
    "split_with_sizes.default": [(X, [1, 2, 1], 2), (X, [1, 2], -2), (X, [1, 1])],
    "slice.Tensor": [(X, 2, 1, 3), (X, 1, 0, 2**63 - 1), (X, 2, 0, 4, 2), (X, 1, -2)],
    "select.int": [(X, 1, 2), (X, -1, 0)],
    "view.default": [(X, [6, 4]), (X, [2, -1])],
    "_unsafe_view.default": [(X, [6, 4])],
    "reshape.default": [(X, [4, 6])],
    "unsqueeze.default": [(X, 1), (X, -1)],
    "squeeze.dim": [(COLUMN, 1), (X, 1)],
    "expand.default": [(COLUMN, [2, 5, 4]), (COLUMN, [-1, 3, -1]), (ROWS, [4, 2, 3])],
    "permute.default": [(X, [2, 0, 1])],
    "stack.default": [([X, Y],), ([X, Y], 1)],
    "index_copy.default": [(X, 1, PICKED[:2], Y[:, :2]), (X, -1, PICKED[:2], Y[..., :2])],
    "cat.default": [([X, Y],), ([X, Y], -1)],
    "clone.default": [(X,)],
    "_to_copy.default": [(X, {"dtype": torch.bfloat16}), (INTS, {"dtype": torch.float32}), (X,)],
    "full.default": [([2, 3], 1.5), ([4], 2, {"dtype": torch.int32})],
    "full_like.default": [(X, 2.0), (X, 2, {"dtype": torch.int32})],
    "new_full.default": [(X, [3, 2], 1.5), (X, [2], 3, {"dtype": torch.int32})],
    "arange.default": [(5,)],
    "arange.start_step": [(2, 11), (2, 11, 3)],
    "sum.dim_IntList": [(X, [1]), (X, [-1], True), (INTS, [0, 2])],
    "amax.default": [(X, [1]), (X, [0, 2], True)],
}


def test_every_row_has_cases():
    assert {f"aten.{name}" for name in CASES} == set(ATEN)


@pytest.fixture(scope="module")
def computed() -> dict[str, list[Any]]:
    """What the rows give for all cases, compiled at once."""

    def run() -> dict[str, list[Any]]:
        return {name: [call_row(name, case) for case in cases] for name, cases in CASES.items()}

    found: dict[str, list[Any]] = jax.jit(run)()
    return found


def call_row(name: str, case: tuple[Any, ...]) -> Any:
    positional, named = arguments(case)
    named = {key: JAX_TYPES.get(value, value) for key, value in named.items()}
    return ATEN[f"aten.{name}"](Site(1), *map(on_device, positional), **named)


def arguments(case: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments, and those by name: the dict at the end of a case."""
    *positional, last = case
    return (positional, last) if isinstance(last, dict) else ([*case], {})


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_torchs_op(name, computed):
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    for case, got in zip(CASES[name], computed[name], strict=True):
        positional, named = arguments(case)
        wanted = op(*positional, **named)
        pairs = zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]
        for have, want in pairs:
            assert have.shape == tuple(want.shape)
            assert have.dtype == on_device(want).dtype
            np.testing.assert_allclose(
                np.asarray(have, np.float64), want.double().numpy(), rtol=1e-6, atol=1e-6
            )


def on_device(value: Any) -> Any:
    """A tensor as the device has it: 64 bits are 32."""
    if isinstance(value, list):
        return [on_device(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return jnp.asarray(value.float().numpy(), jnp.bfloat16)
    return jnp.asarray((value.int() if value.dtype == torch.int64 else value).numpy())
