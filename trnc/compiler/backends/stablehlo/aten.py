"""The table's rows for the ATen ops that stages use: torch's meaning in jax's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trnc.compiler.backends.stablehlo.site import Row, Site

Number = int | float | bool
Operand = jax.Array | Number


def _add(_: Site, x: Operand, y: Operand, alpha: Number = 1) -> jax.Array:
    return jnp.add(x, y if alpha == 1 else jnp.multiply(y, alpha))


def _sub(_: Site, x: Operand, y: Operand, alpha: Number = 1) -> jax.Array:
    return jnp.subtract(x, y if alpha == 1 else jnp.multiply(y, alpha))


def _clamp(
    _: Site, x: jax.Array, min: Number | None = None, max: Number | None = None
) -> jax.Array:
    return jnp.clip(x, min, max)


def _index(_: Site, x: jax.Array, indexes: Sequence[jax.Array | None]) -> jax.Array:
    """Rows by number. Indexes are in range and not negative: a stage clamps what may not be."""
    if any(i is not None and i.dtype == jnp.bool_ for i in indexes):
        raise NotImplementedError("an index by a mask has a shape that depends on data")
    where = tuple(slice(None) if i is None else i for i in indexes)
    return x.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _gather(_: Site, x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index, axis=dim, mode="promise_in_bounds")


def _split(_: Site, x: jax.Array, sizes: Sequence[int], dim: int = 0) -> list[jax.Array]:
    dim %= x.ndim
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pairs = zip(starts, sizes, strict=True)
    return [lax.slice_in_dim(x, start, start + size, axis=dim) for start, size in pairs]


def _slice(
    _: Site,
    x: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    where = [slice(None)] * x.ndim
    where[dim] = slice(start, end, step)
    return x[tuple(where)]


def _select(_: Site, x: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, axis=dim % x.ndim, keepdims=False)


def _expand(_: Site, x: jax.Array, sizes: Sequence[int], **__: Any) -> jax.Array:
    missing = len(sizes) - x.ndim
    wanted = [x.shape[i - missing] if size == -1 else size for i, size in enumerate(sizes)]
    return jnp.broadcast_to(x, wanted)


def _squeeze(_: Site, x: jax.Array, dim: int) -> jax.Array:
    return jnp.squeeze(x, dim) if x.shape[dim] == 1 else x


def _to_copy(_: Site, x: jax.Array, dtype: Any = None, **__: Any) -> jax.Array:
    return x if dtype is None else x.astype(dtype)


def _index_copy(_: Site, x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    where = (*([slice(None)] * (dim % x.ndim)), index)
    return x.at[where].set(source, mode="promise_in_bounds", wrap_negative_indices=False)


def _clone(_: Site, x: jax.Array, **__: Any) -> jax.Array:
    return x


def _masked_fill(_: Site, x: jax.Array, mask: jax.Array, value: Number) -> jax.Array:
    return jnp.where(mask, jnp.array(value, x.dtype), x)


def _full(_: Site, sizes: Sequence[int], value: Number, dtype: Any = None, **__: Any) -> jax.Array:
    return jnp.full(tuple(sizes), value, dtype)


def _full_like(_: Site, x: jax.Array, value: Number, dtype: Any = None, **__: Any) -> jax.Array:
    return jnp.full(x.shape, value, dtype or x.dtype)


def _new_full(
    _: Site, x: jax.Array, sizes: Sequence[int], value: Number, dtype: Any = None, **__: Any
) -> jax.Array:
    return jnp.full(tuple(sizes), value, dtype or x.dtype)


def _arange(_: Site, start: int, end: int | None = None, step: int = 1, **__: Any) -> jax.Array:
    first, last = (0, start) if end is None else (start, end)
    return jnp.arange(first, last, step, dtype=jnp.int32)


def _sum(
    _: Site, x: jax.Array, dim: Sequence[int] | None = None, keepdim: bool = False, **__: Any
) -> jax.Array:
    return jnp.sum(x, axis=None if dim is None else tuple(dim), keepdims=keepdim)


def _amax(_: Site, x: jax.Array, dim: Sequence[int] = (), keepdim: bool = False) -> jax.Array:
    return jnp.max(x, axis=tuple(dim) or None, keepdims=keepdim)


def _elementwise(function: Any) -> Row:
    def row(_: Site, *arguments: Operand) -> jax.Array:
        result: jax.Array = function(*arguments)
        return result

    return row


def _reshape(_: Site, x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return jnp.reshape(x, tuple(sizes))


_COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}

ATEN: Mapping[str, Row] = {
    "aten.add.Tensor": _add,
    "aten.add.Scalar": _add,
    "aten.sub.Tensor": _sub,
    "aten.sub.Scalar": _sub,
    "aten.rsub.Scalar": lambda site, x, y: _sub(site, y, x),
    "aten.mul.Tensor": _elementwise(jnp.multiply),
    "aten.mul.Scalar": _elementwise(jnp.multiply),
    "aten.div.Tensor": _elementwise(jnp.divide),
    "aten.neg.default": _elementwise(jnp.negative),
    "aten.exp.default": _elementwise(jnp.exp),
    "aten.sigmoid.default": _elementwise(jax.nn.sigmoid),
    "aten.maximum.default": _elementwise(jnp.maximum),
    "aten.minimum.default": _elementwise(jnp.minimum),
    **{
        f"aten.{n}.{k}": _elementwise(f)
        for n, f in _COMPARISONS.items()
        for k in ("Tensor", "Scalar")
    },
    "aten.logical_and.default": _elementwise(jnp.logical_and),
    "aten.logical_or.default": _elementwise(jnp.logical_or),
    "aten.logical_not.default": _elementwise(jnp.logical_not),
    "aten.bitwise_and.Tensor": _elementwise(jnp.bitwise_and),
    "aten.bitwise_or.Tensor": _elementwise(jnp.bitwise_or),
    "aten.bitwise_not.default": _elementwise(jnp.bitwise_not),
    "aten.where.self": _elementwise(jnp.where),
    "aten.where.ScalarOther": _elementwise(jnp.where),
    "aten.where.ScalarSelf": _elementwise(jnp.where),
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.clamp.default": _clamp,
    "aten.index.Tensor": _index,
    "aten.gather.default": _gather,
    "aten.split_with_sizes.default": _split,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.unsqueeze.default": lambda _, x, dim: jnp.expand_dims(x, dim),
    "aten.squeeze.dim": _squeeze,
    "aten.expand.default": _expand,
    "aten.permute.default": lambda _, x, dims: jnp.transpose(x, dims),
    "aten.stack.default": lambda _, xs, dim=0: jnp.stack(xs, axis=dim),
    "aten.index_copy.default": _index_copy,
    "aten.cat.default": lambda _, xs, dim=0: jnp.concatenate(xs, axis=dim),
    "aten.clone.default": _clone,
    "aten._to_copy.default": _to_copy,
    "aten.full.default": _full,
    "aten.full_like.default": _full_like,
    "aten.new_full.default": _new_full,
    "aten.arange.default": _arange,
    "aten.arange.start_step": _arange,
    "aten.sum.dim_IntList": _sum,
    "aten.amax.default": _amax,
}
