"""The linear layer and the embedding, on packed weights of any format.

For grouped formats the native `linear` quantises each row of activations, in spans of six groups of
32, to 12 bits (scale = largest magnitude / 2032), multiplies integers exactly and adds up groups,
then spans, in order in f32. So it differs from the reference, which does not quantise activations,
by at most sum over spans of (scale / 2) * sum |w|, plus rounding. For bf16 weights it rounds
activations to two bf16 where a matrix unit multiplies these, an error of at most 2^-17 * sum |x w|.
A row's bits never depend on other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare
from trnc.ops.norm import reference_rms_norm, reference_silu_mul
from trnc.ops.packing import unpack


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, out_features: int
) -> Tensor:
    dense = unpack(weight, format, out_features, x.shape[1]).to(x.dtype)
    out = x @ dense.T
    return out if bias is None else out + bias.to(x.dtype)


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, out_features: int
) -> Tensor:
    del weight, bias, format
    return x.new_empty(x.shape[0], out_features)


def _fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    format: str,
    out_features: int,
    eps: float,
    gated: bool,
) -> Tensor:
    if norm is not None:
        x = reference_rms_norm(x, norm, eps)
    out = _linear(x, weight, bias, format, out_features)
    if gated:
        out = reference_silu_mul(out)
    return out if residual is None else residual + out


def _fused_linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    format: str,
    out_features: int,
    eps: float,
    gated: bool,
) -> Tensor:
    del norm, residual, eps
    width = out_features // 2 if gated else out_features
    return _linear_fake(x, weight, bias, format, width)


def _embedding(ids: Tensor, weight: Tensor, format: str, width: int) -> Tensor:
    table = unpack(weight, format, weight.shape[0] * 16, width)
    return torch.where(ids[:, None] < 0, 0.0, table[ids.clamp(min=0)])


def _embedding_fake(ids: Tensor, weight: Tensor, format: str, width: int) -> Tensor:
    del format
    return weight.new_empty((ids.shape[0], width), dtype=torch.float32)


declare(
    "linear(Tensor x, Tensor weight, Tensor? bias, str format, int out_features) -> Tensor",
    reference=_linear,
    fake=_linear_fake,
)
declare(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor? residual, "
    "str format, int out_features, float eps, bool gated) -> Tensor",
    reference=_fused_linear,
    fake=_fused_linear_fake,
)
declare(
    "embedding(Tensor ids, Tensor weight, str format, int width) -> Tensor",
    reference=_embedding,
    fake=_embedding_fake,
)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, out_features: int
) -> Tensor:
    """Return x @ W^T + bias, [T, N].

    `x` [T, K] f32 (the reference takes fp64 too); `weight` is W [N, K] packed as `format`; `bias`
    [N] f32 or None. The bias is added last.
    """
    result: Tensor = torch.ops.trnc.linear.default(x, weight, bias, format, out_features)
    return result


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    format: str,
    out_features: int,
    eps: float,
    gated: bool,
) -> Tensor:
    """Return residual + linear(rms_norm(x)), [T, N], with the bits of the ops that it stands for.

    Without `norm` [K] there is no rms_norm; `residual` is [T, N] or None. Where `gated`, there is
    none, and the result is silu_mul of the linear, [T, N / 2]. Stages do not call it: the CPU
    backend puts it in the place of what it fuses.
    """
    result: Tensor = torch.ops.trnc.fused_linear.default(
        x, weight, bias, norm, residual, format, out_features, eps, gated
    )
    return result


def embedding(ids: Tensor, weight: Tensor, format: str, width: int) -> Tensor:
    """Return rows `ids` [T] int64 of W [V, width], packed as `format`, in f32; ids < 0 give zeros.

    An id at or past the padded end of W raises.
    """
    result: Tensor = torch.ops.trnc.embedding.default(ids, weight, format, width)
    return result
