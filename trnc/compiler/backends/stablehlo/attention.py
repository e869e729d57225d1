"""Paged and latent attention, drafts, and the writes to the device state, in plain ops.

The context is a static bucket: the width of the block tables. Every sequence is given the same
number of query rows, `Site.max_rows`, and what is past its own length is masked. Shapes are those
of `trnc.ops.attention`, with Q = max_rows and C = MP * S; the names of the sums say them:
r sequence, q query row, j new key, h KV head, g query head of its group, m page, s slot, d width.

An int8 cache is in an order of its own, not in the one that the CPU's instructions like: pages are
`k_pages` [P, Hkv, D + 4, S], the last 4 rows being the bytes of S scales, and `v_pages` [P, Hkv, S,
D + 4]. Nothing but this module reads them.

Masked values are replaced and not multiplied by zero, since a page may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trnc.compiler.backends.stablehlo.site import Row, Site

_INT8_BIAS = 128.0
_SCALE_BYTES = 4
_NEVER = -jnp.inf


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which token row is which query of which sequence.

    `of_sequence` [R, Q] are token rows; `sequence` and `place` [T] lead back, and `covered` [T]
    says whether a token row is any sequence's.
    """

    of_sequence: jax.Array
    sequence: jax.Array
    place: jax.Array
    covered: jax.Array


def _rows(site: Site, sequences: jax.Array, tokens: int) -> _Rows:
    first, count = sequences[:, 0], sequences[:, 1]
    row = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    member = (row >= first) & (row < first + count)
    numbers = jnp.arange(len(sequences), dtype=jnp.int32)
    sequence = jnp.max(jnp.where(member, numbers, 0), axis=1)
    place = row[:, 0] - _take(first, sequence)
    queries = first[:, None] + jnp.arange(site.max_rows, dtype=jnp.int32)
    return _Rows(
        of_sequence=jnp.clip(queries, 0, tokens - 1),
        sequence=sequence,
        place=jnp.clip(place, 0, site.max_rows - 1),
        covered=jnp.any(member, axis=1),
    )


def _take(x: jax.Array, *indexes: jax.Array) -> jax.Array:
    return x.at[indexes].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _paged_attention(
    site: Site,
    q: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    sequences: jax.Array,
    scale: float,
) -> jax.Array:
    tokens, heads, width = q.shape
    rows = _rows(site, sequences, tokens)
    kv_heads = k_new.shape[1]
    grouped = (q * scale).reshape(tokens, kv_heads, heads // kv_heads, width)
    queries = _take(grouped, rows.of_sequence)
    keys = _keys(_take(k_pages, block_tables), q.dtype)
    values = _values(_take(v_pages, block_tables), q.dtype)
    own_keys = _values(_take(k_new, rows.of_sequence), q.dtype)
    own_values = _values(_take(v_new, rows.of_sequence), q.dtype)
    past = _past(sequences, values.shape[1], values.shape[3])
    scores = jnp.einsum("rqhgd,rmhds->rhgqms", queries, keys)
    own = jnp.einsum("rqhgd,rjhd->rhgqj", queries, own_keys)
    weights, own_weights, total = _softmax(scores, own, past[:, None, None, None])
    values = jnp.where(past[:, :, None, :, None], values, 0)
    summed = jnp.einsum("rhgqms,rmhsd->rqhgd", weights, values)
    summed += jnp.einsum("rhgqj,rjhd->rqhgd", own_weights, own_values)
    summed = summed / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return _by_token(summed.reshape(*summed.shape[:2], heads, width), rows)


def _latent_attention(
    site: Site,
    q: jax.Array,
    latent_new: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    sequences: jax.Array,
    scale: float,
    rank: int,
) -> jax.Array:
    rows = _rows(site, sequences, len(q))
    queries = _take(q * scale, rows.of_sequence)
    latents = _values(_take(pages, block_tables), q.dtype)
    own_latents = _values(_take(latent_new, rows.of_sequence), q.dtype)
    past = _past(sequences, *latents.shape[1:3])
    scores = jnp.einsum("rqhd,rmsd->rhqms", queries, latents)
    own = jnp.einsum("rqhd,rjd->rhqj", queries, own_latents)
    weights, own_weights, total = _softmax(scores, own, past[:, None, None])
    latents = jnp.where(past[..., None], latents, 0)[..., :rank]
    summed = jnp.einsum("rhqms,rmsd->rqhd", weights, latents)
    summed += jnp.einsum("rhqj,rjd->rqhd", own_weights, own_latents[..., :rank])
    return _by_token(summed / jnp.swapaxes(total, 1, 2)[..., None], rows)


def _past(sequences: jax.Array, pages: int, size: int) -> jax.Array:
    """Which slots [R, MP, S] of a sequence's pages hold keys from before this step."""
    position = jnp.arange(pages * size, dtype=jnp.int32).reshape(pages, size)
    return position < sequences[:, 2][:, None, None]


def _softmax(
    scores: jax.Array, own: jax.Array, past: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(x - best) of cached [..., Q, MP, S] and own [..., Q, J] scores, and their sum."""
    queries = own.shape[-1]
    causal = jnp.tril(jnp.ones((queries, queries), jnp.bool_))
    scores, own = jnp.where(past, scores, _NEVER), jnp.where(causal, own, _NEVER)
    best = jnp.maximum(jnp.max(scores, axis=(-1, -2)), jnp.max(own, axis=-1))
    scores, own = jnp.exp(scores - best[..., None, None]), jnp.exp(own - best[..., None])
    return scores, own, jnp.sum(scores, axis=(-1, -2)) + jnp.sum(own, axis=-1)


def _by_token(x: jax.Array, rows: _Rows) -> jax.Array:
    """From [R, Q, ...] back to token rows; zeros where no sequence has the row."""
    return jnp.where(rows.covered[:, None, None], _take(x, rows.sequence, rows.place), 0)


# Caches of int8: rows of q + 128, then the four bytes of their scale


def _quantize_kv(_: Site, x: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    usable = (largest > 1e-30) & (largest < 1e38)
    q = jnp.where(usable, jnp.round(x * (127.0 / largest)), 0.0)
    scale = lax.bitcast_convert_type((largest / 127.0).astype(jnp.float32), jnp.uint8)
    bytes_ = [(q + _INT8_BIAS).astype(jnp.uint8), scale[..., 0, :]]
    return jnp.concatenate(bytes_, axis=-1)


def _values(rows: jax.Array, dtype: Any) -> jax.Array:
    """Stored rows [..., W] as numbers [..., D]."""
    if rows.dtype != jnp.uint8:
        return rows.astype(dtype)
    scale = lax.bitcast_convert_type(rows[..., -_SCALE_BYTES:], jnp.float32)
    return (rows[..., :-_SCALE_BYTES].astype(dtype) - _INT8_BIAS) * scale[..., None]


def _keys(pages: jax.Array, dtype: Any) -> jax.Array:
    """Pages of keys [..., W, S] as numbers [..., D, S]; the last 4 rows of bytes are S scales."""
    if pages.dtype != jnp.uint8:
        return pages.astype(dtype)
    size = pages.shape[-1]
    bytes_ = pages[..., -_SCALE_BYTES:, :].reshape(*pages.shape[:-2], size, _SCALE_BYTES)
    scale = lax.bitcast_convert_type(bytes_, jnp.float32)
    return (pages[..., :-_SCALE_BYTES, :].astype(dtype) - _INT8_BIAS) * scale[..., None, :]


# Writes


def _places(
    site: Site, block_tables: jax.Array, sequences: jax.Array, tokens: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the page and the slot [T] of each token row; the rest go to page 0, nobody's."""
    rows = _rows(site, sequences, tokens)
    position = _take(sequences[:, 2], rows.sequence) + rows.place
    block = jnp.clip(_div(position, size), 0, block_tables.shape[1] - 1)
    page = _take(block_tables, rows.sequence, block)
    return jnp.where(rows.covered, page, 0), lax.rem(position, jnp.full_like(position, size))


def _div(x: jax.Array, size: int) -> jax.Array:
    """Return x // size for x >= 0, without the correction that negative ones need."""
    return lax.div(x, jnp.full_like(x, size))


def _put(pages: jax.Array, where: tuple[Any, ...], rows: jax.Array) -> jax.Array:
    return pages.at[where].set(rows, mode="promise_in_bounds", wrap_negative_indices=False)


def _kv_write(
    site: Site,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    block_tables: jax.Array,
    sequences: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    size, width = v_pages.shape[2], k_new.shape[-1]
    page, slot = _places(site, block_tables, sequences, len(k_new), size)
    v_pages = _put(v_pages, (page, slice(None), slot), v_new)
    if k_pages.dtype != jnp.uint8:
        return _put(k_pages, (page, slice(None), slice(None), slot), k_new), v_pages
    width -= _SCALE_BYTES
    k_pages = _put(k_pages, (page, slice(None), slice(width), slot), k_new[..., :width])
    for byte in range(_SCALE_BYTES):
        offset = slot * _SCALE_BYTES + byte
        where = (
            page,
            slice(None),
            width + _div(offset, size),
            lax.rem(offset, jnp.full_like(offset, size)),
        )
        k_pages = _put(k_pages, where, k_new[..., width + byte])
    return k_pages, v_pages


def _latent_write(
    site: Site,
    pages: jax.Array,
    latent_new: jax.Array,
    block_tables: jax.Array,
    sequences: jax.Array,
) -> tuple[jax.Array]:
    page, slot = _places(site, block_tables, sequences, len(latent_new), pages.shape[1])
    return (_put(pages, (page, slot), latent_new),)


def _accept_drafts(
    site: Site, sampled: jax.Array, drafted: jax.Array, sequences: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many leading drafts are what was sampled, and the row of the last of them."""
    rows = _rows(site, sequences, len(sampled)).of_sequence
    picks, tokens, count = _take(sampled, rows), _take(drafted, rows), sequences[:, 1]
    right = jnp.ones(len(rows), jnp.bool_)
    accepted = jnp.zeros(len(rows), jnp.int32)
    for draft in range(1, site.max_rows):
        right = right & (picks[:, draft - 1] == tokens[:, draft]) & (draft < count)
        accepted = accepted + right
    return accepted, sequences[:, 0] + accepted


def _store_states(
    _: Site, states: jax.Array, slots: jax.Array, hidden: jax.Array, rows: jax.Array
) -> tuple[jax.Array]:
    return (_put(states, (slots,), _take(hidden, rows)),)


def _store_tokens(
    _: Site, last_tokens: jax.Array, slots: jax.Array, tokens: jax.Array
) -> tuple[jax.Array]:
    return (_put(last_tokens, (slots,), tokens),)


ATTENTION: Mapping[str, Row] = {
    "trnc.paged_attention.default": _paged_attention,
    "trnc.latent_attention.default": _latent_attention,
    "trnc.quantize_kv.default": _quantize_kv,
    "trnc.accept_drafts.default": _accept_drafts,
}

# The updates of a program. Each returns the new values of the state that comes first among its
# arguments, in that order.
UPDATES: Mapping[str, Row] = {
    "kv_write": _kv_write,
    "latent_write": _latent_write,
    "store_tokens": _store_tokens,
    "store_states": _store_states,
}
