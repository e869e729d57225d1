"""The linear layer and the embedding, on packed weights of any format.

For grouped formats the native `linear` quantises each row of activations, in groups of 32, to int16
(scale = largest magnitude / 32512), multiplies integers exactly and adds up groups in order in f32.
So it differs from the reference, which does not quantise activations, by at most
sum over groups of (scale / 2) * sum |w|, plus rounding. A row's bits never depend on other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare
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


def embedding(ids: Tensor, weight: Tensor, format: str, width: int) -> Tensor:
    """Return rows `ids` [T] int64 of W [V, width], packed as `format`, in f32; ids < 0 give zeros.

    An id at or past the padded end of W raises.
    """
    result: Tensor = torch.ops.trnc.embedding.default(ids, weight, format, width)
    return result
