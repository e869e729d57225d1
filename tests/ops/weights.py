"""Random weights in the logical form of each packed format."""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.checkpoint.layouts import Dense, Int4Groups, Int8Groups, Layout
from trnc.ops.packing import pack

GROUPED = ("i8g32", "i4g32", "i4g32s")


def random_weight(format: str, n: int, k: int, seed: int = 0) -> Layout:
    rng = torch.Generator().manual_seed(seed)
    if format in ("f32", "bf16"):
        weight = torch.randn(n, k, generator=rng)
        return Dense(weight.bfloat16() if format == "bf16" else weight)
    scale = (torch.rand(n, k // 32, generator=rng) * 0.1).half()
    if format == "i8g32":
        q = torch.randint(-127, 128, (n, k), generator=rng, dtype=torch.int8)
        return Int8Groups(q, scale)
    nibbles = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    offset = (torch.randn(n, k // 32, generator=rng) * 0.5).half()
    return Int4Groups(nibbles, scale, offset if format == "i4g32" else None)


def packed_weight(format: str, n: int, k: int, seed: int = 0) -> Tensor:
    return pack(random_weight(format, n, k, seed), format)


def random_rows(t: int, k: int, seed: int = 0) -> Tensor:
    """Rows whose magnitudes differ, as activations' do."""
    rng = torch.Generator().manual_seed(seed + 1)
    return torch.randn(t, k, generator=rng) * torch.rand(t, 1, generator=rng).exp2() * 3


def error_bound(x: Tensor, dense: Tensor, format: str) -> Tensor:
    """What the docstring of trnc.ops.linear allows, plus f32 rounding of the sums. [T, N] f64."""
    products = x.double().abs() @ dense.double().abs().T
    rounding = 1e-6 * products
    if format == "bf16":
        return rounding + 2.0**-17 * products
    if format not in GROUPED:
        return rounding
    steps = _spans(x.double()).abs().amax(dim=2) / 2032
    return rounding + 0.501 * steps @ _spans(dense.double()).abs().sum(dim=2).T


def _spans(matrix: Tensor) -> Tensor:
    """[N, K] as [N, spans, 192], zeros at the end."""
    padding = -matrix.shape[1] % 192
    return torch.nn.functional.pad(matrix, (0, padding)).unflatten(1, (-1, 192))
