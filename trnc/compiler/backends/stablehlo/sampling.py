"""From logits to tokens without a sort: cuts are found by halving, the best by max and min.

A cut at the k best, or at a probability mass, is a value and, among equals, a token id. Both are
found bit by bit: how many tokens are at least so good is a plain sum over the vocabulary, and
negative floats are ordered as the integers of their bits are. The picks are those of
`trnc.ops.sampling`, noise included, up to the rounding of a mass that falls on a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from trnc.compiler.backends.stablehlo import words
from trnc.compiler.backends.stablehlo.linear import best
from trnc.compiler.backends.stablehlo.site import Row, Site

# splitmix64, as in trnc.ops.sampling.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FLOAT_BITS = 31  # of a float that is not negative


def _logit_bias(_: Site, logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    used = ids >= 0
    row = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    return logits.at[row, jnp.where(used, ids, 0)].add(
        jnp.where(used, values, 0.0), mode="promise_in_bounds", wrap_negative_indices=False
    )


def _apply_mask(_: Site, logits: jax.Array, mask: jax.Array) -> jax.Array:
    """As `trnc.ops.apply_mask`: bit t % 32 of word t // 32 allows token t."""
    place = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (*mask.shape, 32))
    words_ = jnp.broadcast_to(mask[..., None], place.shape)
    allowed = (lax.shift_right_logical(words_, place) & 1).reshape(len(mask), -1)
    return jnp.where(allowed[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def _penalize(
    _: Site,
    logits: jax.Array,
    ids: jax.Array,
    counts: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """As `trnc.ops.penalize`; unused entries are written to a column that is cut off again."""
    entry = jnp.arange(ids.shape[1], dtype=jnp.int32)
    end = jnp.min(jnp.where(ids < 0, entry, ids.shape[1]), axis=1, keepdims=True)
    wide = jnp.pad(logits, ((0, 0), (0, 1)))
    row = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    where = wide.at[row, jnp.where(entry < end, ids, logits.shape[1])]
    x = where.get(mode="promise_in_bounds", wrap_negative_indices=False)
    r = repetition[:, None]
    x = jnp.where(x > 0, x / r, x * r) - frequency[:, None] * counts
    x = jnp.where(counts > 0, x - presence[:, None], x)
    changed = where.set(x, mode="promise_in_bounds", wrap_negative_indices=False)
    return changed[:, : logits.shape[1]]


def _sample_greedy(_: Site, logits: jax.Array) -> jax.Array:
    return best(_without_nan(logits), 1)[0][0]


def _sample(
    _: Site,
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    output_index: jax.Array,
) -> jax.Array:
    """As `trnc.ops.sample`; `seed` is [R, 2] uint32, the high word first."""
    x = _without_nan(logits)
    top = jnp.max(x, axis=-1)
    random = (temperature > 0) & jnp.isfinite(top)
    divisor = jnp.where(random, temperature, 1.0)
    y = _without_nan((x - top[:, None]) / divisor[:, None])
    keep = _kept(y, top_k[:, None], top_p[:, None], min_p[:, None])
    score = jnp.where(keep, y + gumbel(seed, output_index, x.shape[1]), -jnp.inf)
    return best(jnp.where(random[:, None], score, x), 1)[0][0]


def _kept(y: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which tokens [R, V] pass the filters; y are log weights with a maximum of 0."""
    order = lax.bitcast_convert_type(jnp.abs(y), jnp.int32)  # better is less
    weight = jnp.exp(y)
    within_k = _shortest(order, jnp.ones_like(y), top_k.astype(y.dtype)) | (top_k <= 0)
    inside = jnp.where(within_k, weight, 0.0)
    wanted = top_p * jnp.sum(inside, axis=-1, keepdims=True)
    first = best(y, 1)[0][0][:, None] == jnp.arange(y.shape[1], dtype=jnp.int32)
    within_p = _shortest(order, inside, wanted) | (top_p >= 1) | first
    return within_k & within_p & (weight >= jnp.minimum(min_p, 1.0))


def _shortest(order: jax.Array, mass: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the shortest run of tokens [R, V] of least `order` whose mass reaches `wanted` [R, 1];
    lower ids come first among equals. All, where all together do not reach it."""
    token = jnp.arange(order.shape[1], dtype=jnp.int32)

    def reaches(inside: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(inside, mass, 0.0), axis=-1, keepdims=True) >= wanted

    cut = _least(_FLOAT_BITS, order, lambda value: reaches(order <= value))
    better, equal = order < cut, order == cut
    bits = max(order.shape[1] - 1, 1).bit_length()
    last = _least(bits, order, lambda value: reaches(better | (equal & (token <= value))))
    return better | (equal & (token <= last))


def _least(bits: int, like: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the least integer [R, 1] of so many bits that `holds`; all larger ones do, too."""
    value = jnp.zeros((len(like), 1), jnp.int32)
    for bit in reversed(range(bits)):
        without = value + jnp.int32((1 << bit) - 1)
        value = jnp.where(holds(without), value, value + jnp.int32(1 << bit))
    return value


def gumbel(seed: jax.Array, output_index: jax.Array, vocab: int) -> jax.Array:
    """Return the noise [R, vocab] f32 of each row's tokens, as in `trnc.ops.sampling`."""
    state = words.multiply(words.of_int32(output_index), words.constant(_GAMMA))
    key = _mix(words.add(_mix((seed[:, 0], seed[:, 1])), state))
    token = words.of_int32(jnp.arange(1, vocab + 1, dtype=jnp.int32))
    step = words.multiply(token, words.constant(_GAMMA))
    high, _ = _mix(words.add((key[0][:, None], key[1][:, None]), step))
    bits = lax.shift_right_logical(high, jnp.full_like(high, 9)).astype(jnp.int32)
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(u))


def _mix(z: words.Wide) -> words.Wide:
    z = words.multiply(words.xor_shifted(z, 30), words.constant(_MIX_1))
    z = words.multiply(words.xor_shifted(z, 27), words.constant(_MIX_2))
    return words.xor_shifted(z, 31)


def _logprobs(
    _: Site, logits: jax.Array, chosen: jax.Array, top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = _without_nan(logits)
    shifted = x - jnp.max(x, axis=-1, keepdims=True)
    logp = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    ids = jnp.stack(best(_without_nan(shifted), top)[0], axis=1)
    return _pick(logp, chosen), ids, jnp.stack([_pick(logp, i) for i in ids.T], axis=1)


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[r, index[r]]: a sum over one column, which costs less than a gather there."""
    column = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.sum(jnp.where(column == index[:, None], x, 0.0), axis=-1)


def _without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


SAMPLING: Mapping[str, Row] = {
    "trnc.apply_mask.default": _apply_mask,
    "trnc.logit_bias.default": _logit_bias,
    "trnc.penalize.default": _penalize,
    "trnc.sample_greedy.default": _sample_greedy,
    "trnc.sample.default": _sample,
    "trnc.logprobs.default": _logprobs,
}
