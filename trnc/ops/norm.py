"""RMSNorm and the gated SiLU, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch."""
    scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    return x * scale * weight.to(x.dtype)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    del weight, eps
    return torch.empty_like(x)


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


declare(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=reference_rms_norm,
    fake=_rms_norm_fake,
)
declare(
    "silu_mul(Tensor gate_up) -> Tensor",
    reference=reference_silu_mul,
    fake=_silu_mul_fake,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for rows `x` [T, K] and `weight` [K] f32."""
    result: Tensor = torch.ops.trnc.rms_norm.default(x, weight, eps)
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, I], of `gate_up` [T, 2I] with the gate first."""
    result: Tensor = torch.ops.trnc.silu_mul.default(gate_up)
    return result
