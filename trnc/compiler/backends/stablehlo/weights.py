"""Weights as the device has them: logical matrices in few plain arrays, not the CPU's tiles.

A packed weight of `trnc.ops.packing` becomes, by its format,

- `f32`, `bf16`: `weight` [N, K];
- `i8g32`: `q` u8 [N, K], a weight's integer + 128, and `scale` f16 [N, K / 32];
- `i4g32`: `q` u8 [N, K / 2], where byte j of a group's 16 holds weight j in its low half and 16 + j
  in its high one, `scale` and `offset` f16 [N, K / 32]; `i4g32s` has no offset: q stands for q - 8.

N is padded to 16 as in the packed form. Stacks have one more dimension in front. No value is
rounded anew, so a matrix is the same numbers on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import lax
from torch import Tensor

from trnc.compiler.backends.stablehlo.parallel import (
    WHOLE,
    Split,
    local_rows,
    row_indexes,
)
from trnc.ops.packing import TILE, unpack_groups

GROUP = 32
_RECORD_BYTES = {"i8g32": 544, "i4g32": 320, "i4g32s": 288}

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceWeight:
    """The arrays of one weight; `format` and `split` shape the graph."""

    parts: Mapping[str, jax.Array]
    format: str = field(metadata={"static": True})
    split: Split = field(default=WHOLE, metadata={"static": True})

    @property
    def first(self) -> jax.Array:
        """The array that holds the values."""
        return self.parts["weight" if "weight" in self.parts else "q"]

    def rows(self, ids: jax.Array) -> DeviceWeight:
        """Return rows `ids` [T], which must be in range."""
        taken = {
            name: part.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
            for name, part in self.parts.items()
        }
        return DeviceWeight(taken, self.format, self.split)

    def dense(self) -> jax.Array:
        """Return the values [..., N, K] in f32."""
        if self.format in ("f32", "bf16"):
            return self.parts["weight"].astype(jnp.float32)
        scale = self.parts["scale"].astype(jnp.float32)[..., None]
        q = self.parts["q"]
        groups = q.reshape(*q.shape[:-1], scale.shape[-2], -1)
        if self.format == "i8g32":
            values = (groups.astype(jnp.float32) - 128.0) * scale
        else:
            wide = groups.astype(jnp.int32)
            halves = [wide & 15, lax.shift_right_logical(wide, jnp.int32(4))]
            nibbles = jnp.concatenate(halves, axis=-1).astype(jnp.float32)
            if self.format == "i4g32s":
                values = (nibbles - 8.0) * scale
            else:
                values = nibbles * scale + self.parts["offset"].astype(jnp.float32)[..., None]
        return values.reshape(*q.shape[:-1], -1)


def logical_shape(packed: tuple[int, ...], format: str) -> tuple[int, ...]:
    """Return [..., N, K] of a packed shape [..., tiles, tile bytes]; N is the padded one."""
    *stack, tiles, size = packed
    if format == "f32":
        width = size // (TILE * 4)
    elif format == "bf16":
        width = size // (TILE * 2)
    else:
        width = size // _RECORD_BYTES[format] * GROUP
    return (*stack, tiles * TILE, width)


def abstract_weight(
    packed: tuple[int, ...], format: str, split: Split = WHOLE, ranks: int = 1
) -> DeviceWeight:
    """Return the shapes and dtypes of a weight's arrays on one of `ranks` cores."""
    *stack, n, k = logical_shape(packed, format)
    if split.kind == "rows":
        n = local_rows(split, ranks) if ranks > 1 else n
    elif split.kind == "vocabulary":
        n //= ranks
    elif split.kind == "columns":
        k //= ranks
    elif split.kind == "stack":
        stack[0] //= ranks
    shape = jax.ShapeDtypeStruct
    parts: dict[str, Any]
    if format in ("f32", "bf16"):
        dtype = jnp.float32 if format == "f32" else jnp.bfloat16
        parts = {"weight": shape((*stack, n, k), dtype)}
    else:
        scales = shape((*stack, n, k // GROUP), jnp.float16)
        width = k if format == "i8g32" else k // 2
        parts = {"q": shape((*stack, n, width), jnp.uint8), "scale": scales}
        if format == "i4g32":
            parts["offset"] = scales
    return DeviceWeight(parts, format, split)


def device_arrays(packed: Tensor, format: str) -> dict[str, Array]:
    """Return the arrays of a packed weight, whole."""
    if format == "f32":
        tiles = packed.view(torch.float32).unflatten(-1, (-1, TILE))
        return {"weight": tiles.transpose(-1, -2).flatten(-3, -2).contiguous().numpy()}
    if format == "bf16":
        pairs = packed.view(torch.int16).unflatten(-1, (-1, TILE, 2)).transpose(-3, -2)
        bits = pairs.flatten(-2).flatten(-3, -2).contiguous().numpy()
        return {"weight": bits.view(ml_dtypes.bfloat16)}
    q, constants = unpack_groups(packed, format)
    if format != "i8g32":
        groups = q.unflatten(-1, (-1, 2, GROUP // 2))
        q = (groups[..., 0, :] | groups[..., 1, :] << 4).flatten(-2)
    names = ("scale", "offset")
    parts = {name: c.contiguous().numpy() for name, c in zip(names, constants, strict=False)}
    return {"q": q.contiguous().numpy(), **parts}


def share(array: Array, split: Split, rank: int, ranks: int, *, stacked: bool) -> Array:
    """Return one core's share of one array of a weight (or of a vector [N])."""
    if ranks == 1 or split.kind == "none":
        return array
    axis = 1 if stacked else 0
    if split.kind == "rows":
        return np.take(array, row_indexes(split, rank, ranks), axis=axis)
    axis = {"vocabulary": axis, "columns": array.ndim - 1, "stack": 0}[split.kind]
    return np.split(array, ranks, axis=axis)[rank]
