"""Tables of rotary position embedding.

They are computed once, on the host, in fp64, and rounded to f32 at the end: the position times the
frequency loses digits in f32 at long contexts. A graph takes them as inputs, so two scalings of
rope share their artifacts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trnc.models.config import RopeConfig


def rope_tables(rope: RopeConfig, max_positions: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each f32 [max_positions, dim/2]; row p rotates pairs (d, d + dim/2).

    They are already multiplied by the attention factor.
    """
    positions = torch.arange(max_positions, dtype=torch.float64)
    angles = positions[:, None] * inverse_frequencies(rope)[None, :]
    scale = rope.attention_factor
    return (angles.cos() * scale).float(), (angles.sin() * scale).float()


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return radians per position, f64 [dim/2], after the scaling of `rope.kind`."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    base = rope.theta**-exponent
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "factors":
        return base / torch.tensor(rope.factors, dtype=torch.float64)
    return base


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, a ramp between."""
    turns = rope.original_max_position * base / (2 * math.pi)  # full rotations in the old context
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return base * keep + base / rope.factor * (1.0 - keep)


def _yarn(rope: RopeConfig, base: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): the ramp is linear in the dimension index."""

    def dimension(turns: float) -> float:
        context = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(context) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high if high != low else low + 0.001  # as transformers: no division by zero
    index = torch.arange(rope.dim // 2, dtype=torch.float64)
    interpolate = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return base / rope.factor * interpolate + base * (1.0 - interpolate)
