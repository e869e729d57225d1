"""Linear layers, embeddings, norms, and experts, on weights in the device's form."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from trnc.compiler.backends.stablehlo.parallel import (
    Partial,
    all_gather,
    all_reduce,
    rank_offset,
)
from trnc.compiler.backends.stablehlo.site import Row, Site
from trnc.compiler.backends.stablehlo.weights import DeviceWeight


def _matmul(site: Site, sums: str, x: jax.Array, weight: DeviceWeight) -> jax.Array:
    """Return the einsum of f32 `x` and a weight, added up in f32."""
    if site.matmul == "bfloat16" and weight.format == "bf16":
        narrow = x.astype(jnp.bfloat16)
        return jnp.einsum(sums, narrow, weight.first, preferred_element_type=jnp.float32)
    return jnp.einsum(sums, x, weight.dense(), preferred_element_type=jnp.float32)


def _linear(
    site: Site,
    x: jax.Array,
    weight: DeviceWeight,
    bias: jax.Array | None,
    format: str,
    out_features: int,
) -> jax.Array | Partial:
    del format
    out = _matmul(site, "tk,nk->tn", _pad_columns(x, weight), weight)
    if weight.split.kind == "vocabulary":
        out = all_gather(site, out)
    out = out[:, :out_features]
    if weight.split.kind == "columns" and site.ranks > 1:
        # The bias is whole on every core: it is added once, to the sum.
        return Partial(out) if bias is None else all_reduce(site, out) + bias
    return out if bias is None else out + bias


def _pad_columns(x: jax.Array, weight: DeviceWeight) -> jax.Array:
    """A bf16 matrix has an even number of columns; an odd x gets a zero at its end."""
    missing = weight.first.shape[-1] - x.shape[-1] if weight.format == "bf16" else 0
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


def _embedding(
    site: Site, ids: jax.Array, weight: DeviceWeight, format: str, width: int
) -> jax.Array | Partial:
    del format
    rows = weight.first.shape[0]
    local = ids - rank_offset(site, rows)
    known = (ids >= 0) & (local >= 0) & (local < rows)
    values = weight.rows(jnp.where(known, local, 0)).dense()[:, :width]
    found = jnp.where(known[:, None], values, 0.0)
    return Partial(found) if site.ranks > 1 and weight.split.kind == "vocabulary" else found


def _head_linear(
    site: Site, x: jax.Array, weight: DeviceWeight, format: str, out_features: int
) -> jax.Array:
    del format
    out = _matmul(site, "thk,hnk->thn", _pad_columns(x, weight), weight)
    return out[..., :out_features]


def _rms_norm(_: Site, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * weight


def _silu_mul(_: Site, gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.sigmoid(gate) * gate * up


def best(x: jax.Array, count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the indexes and the values [T] of each row's largest, largest first, one array a rank.

    Lower indexes win ties. It is max, compare and min in turn: neither a sort nor a reduction of
    two operands, which Neuron does not take.
    """
    place = jnp.arange(x.shape[-1], dtype=jnp.int32)
    left = jnp.ones(x.shape, jnp.bool_)
    indexes, values = [], []
    for _ in range(count):
        top = jnp.max(jnp.where(left, x, -jnp.inf), axis=-1)
        is_top = left & (x == top[..., None])
        index = jnp.min(jnp.where(is_top, place, x.shape[-1] - 1), axis=-1)
        indexes.append(index)
        values.append(top)
        left = left & (place != index[..., None])
    return indexes, values


def _route(
    _: Site,
    logits: jax.Array,
    correction: jax.Array,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    scores = jax.nn.sigmoid(logits)
    choice = (scores + correction).reshape(len(logits), groups, -1)
    if top_groups < groups:
        first, second = best(choice, 2)[1]
        numbers = jnp.arange(groups, dtype=jnp.int32)
        picked = best(first + second, top_groups)[0]
        chosen = sum(((numbers == group[:, None]) for group in picked), start=jnp.bool_(False))
        choice = jnp.where(chosen[..., None], choice, -jnp.inf)
    ids = jnp.stack(best(choice.reshape(scores.shape), top_k)[0], axis=1)
    experts = jnp.arange(scores.shape[1], dtype=jnp.int32)
    weights = jnp.sum(jnp.where(ids[..., None] == experts, scores[:, None], 0.0), axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scale


def _experts(
    site: Site,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: DeviceWeight,
    down: DeviceWeight,
    gate_up_format: str,
    down_format: str,
    inner: int,
) -> jax.Array | Partial:
    """Every core runs its own experts on all rows, and a row takes from them what it chose."""
    del gate_up_format, down_format
    count = gate_up.first.shape[0]
    own = rank_offset(site, count) + jnp.arange(count, dtype=jnp.int32)
    chosen = ids[..., None] == own
    share = jnp.sum(jnp.where(chosen, weights[..., None], 0.0), axis=1)
    wide = _matmul(site, "tk,enk->ten", _pad_columns(x, gate_up), gate_up)
    gated = _silu_mul(site, wide[..., : 2 * inner])
    # A row's garbage from an expert that it did not choose must not reach it as 0 * inf.
    scaled = jnp.where(jnp.any(chosen, axis=1)[..., None], gated * share[..., None], 0.0)
    out = _matmul(site, "tek,enk->tn", _pad_columns(scaled, down), down)[:, : x.shape[1]]
    return Partial(out) if site.ranks > 1 else out


LINEAR: Mapping[str, Row] = {
    "trnc.linear.default": _linear,
    "trnc.embedding.default": _embedding,
    "trnc.head_linear.default": _head_linear,
    "trnc.rms_norm.default": _rms_norm,
    "trnc.silu_mul.default": _silu_mul,
    "trnc.route.default": _route,
    "trnc.experts.default": _experts,
}
