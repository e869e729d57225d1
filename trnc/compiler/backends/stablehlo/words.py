"""64-bit integers as two words of 32, for the noise of sampling: Neuron counts in 32 bits.

A value is a pair of uint32 arrays, the high word first; sums and products wrap. Products of words
are made of products of halves, which fit a word.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Wide = tuple[jax.Array, jax.Array]


def constant(value: int) -> Wide:
    """Return a constant, of which the lower 64 bits count."""
    return jnp.uint32(value >> 32 & 0xFFFFFFFF), jnp.uint32(value & 0xFFFFFFFF)


def of_int32(x: jax.Array) -> Wide:
    """Return x >= 0 as a wide value."""
    low = x.astype(jnp.uint32)
    return jnp.zeros_like(low), low


def add(x: Wide, y: Wide) -> Wide:
    """Return x + y."""
    low = x[1] + y[1]
    carry = (low < y[1]).astype(jnp.uint32)
    return x[0] + y[0] + carry, low


def multiply(x: Wide, y: Wide) -> Wide:
    """Return x * y."""
    high, low = _product(x[1], y[1])
    return high + x[0] * y[1] + x[1] * y[0], low


def xor_shifted(x: Wide, bits: int) -> Wide:
    """Return x ^ (x >> bits), 0 < bits < 32."""
    low = _right(x[1], bits) | lax.shift_left(x[0], _word(x[0], 32 - bits))
    return x[0] ^ _right(x[0], bits), x[1] ^ low


def _product(x: jax.Array, y: jax.Array) -> Wide:
    """Return the whole product of two words."""
    half = jnp.uint32(0xFFFF)
    x_low, x_high, y_low, y_high = x & half, _right(x, 16), y & half, _right(y, 16)
    lowest, first, second = x_low * y_low, x_low * y_high, x_high * y_low
    middle = _right(lowest, 16) + (first & half) + (second & half)
    high = x_high * y_high + _right(first, 16) + _right(second, 16) + _right(middle, 16)
    return high, (lowest & half) | lax.shift_left(middle, _word(middle, 16))


def _right(x: jax.Array, bits: int) -> jax.Array:
    return lax.shift_right_logical(x, _word(x, bits))


def _word(like: jax.Array, value: int) -> jax.Array:
    return jnp.full(jnp.shape(like), value, jnp.uint32)
