"""Routing to experts and the experts themselves, and a linear layer of its own for each head.

Shapes: T token rows, E experts, k experts a token, H hidden size, I the width of one expert.
Weights of one shape are stacked: uint8 [count, tiles, tile bytes], each packed as `trnc.ops.pack`
does. What a row gets depends on that row alone: its experts are added up in the order of its ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare
from trnc.ops.norm import reference_silu_mul
from trnc.ops.packing import unpack


def route(
    logits: Tensor,
    correction: Tensor,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Pick each row's experts: (ids [T, k] int32, weights [T, k]), the best first.

    With s = sigmoid(logits), the choice is by s + `correction`: of the `groups` equal groups of
    experts, those `top_groups` with the largest sum of their two best, and of the experts in these,
    the `top_k` best; lower indexes win ties. The weights are s itself, divided by their sum + 1e-20
    where `normalize`, times `scale` (DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16).

    Args:
        logits: [T, E].
        correction: [E] f32, the bias that balances the load.
    """
    result: tuple[Tensor, Tensor] = torch.ops.trnc.route.default(
        logits, correction, groups, top_groups, top_k, normalize, scale
    )
    return result


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_format: str,
    down_format: str,
    inner: int,
) -> Tensor:
    """Return sum over j of weights[t, j] * expert ids[t, j] of x[t], [T, H].

    An expert is down(silu_mul(gate_up(x))). `gate_up` stacks E packed [2I, H], the gate first;
    `down` E packed [H, I]; `inner` is I.
    """
    result: Tensor = torch.ops.trnc.experts.default(
        x, ids, weights, gate_up, down, gate_up_format, down_format, inner
    )
    return result


def head_linear(x: Tensor, weight: Tensor, format: str, out_features: int) -> Tensor:
    """Return x[:, h] @ W[h]^T for each head, [T, heads, N], of `x` [T, heads, K].

    `weight` stacks one packed [N, K] for each head.
    """
    result: Tensor = torch.ops.trnc.head_linear.default(x, weight, format, out_features)
    return result


def _route(
    logits: Tensor,
    correction: Tensor,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = (scores + correction.to(scores.dtype)).unflatten(1, (groups, -1))
    best_groups = _best(choice.topk(2, dim=-1).values.sum(dim=-1), top_groups)
    chosen = torch.zeros(choice.shape[:2], dtype=torch.bool).scatter(1, best_groups, True)
    ids = _best(choice.masked_fill(~chosen[..., None], float("-inf")).flatten(1), top_k)
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * scale


def _best(x: Tensor, count: int) -> Tensor:
    """Return the indexes of each row's largest values, largest first; lower indexes win ties."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_format: str,
    down_format: str,
    inner: int,
) -> Tensor:
    results = x.new_zeros(*ids.shape, x.shape[1])
    for expert in ids.unique().tolist():
        wide = unpack(gate_up[expert], gate_up_format, 2 * inner, x.shape[1]).to(x.dtype)
        narrow = unpack(down[expert], down_format, x.shape[1], inner).to(x.dtype)
        row, place = (ids == expert).nonzero(as_tuple=True)
        results[row, place] = reference_silu_mul(x[row] @ wide.T) @ narrow.T
    return (weights[..., None] * results).sum(dim=1)


def _head_linear(x: Tensor, weight: Tensor, format: str, out_features: int) -> Tensor:
    dense = [unpack(head, format, out_features, x.shape[2]) for head in weight]
    return torch.einsum("thk,hnk->thn", x, torch.stack(dense).to(x.dtype))


declare(
    "route(Tensor logits, Tensor correction, int groups, int top_groups, int top_k, "
    "bool normalize, float scale) -> (Tensor, Tensor)",
    reference=_route,
    fake=lambda logits, correction, groups, top_groups, top_k, normalize, scale: (  # noqa: ARG005
        logits.new_empty(logits.shape[0], top_k, dtype=torch.int32),
        logits.new_empty(logits.shape[0], top_k),
    ),
)
declare(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, "
    "str gate_up_format, str down_format, int inner) -> Tensor",
    reference=_experts,
    fake=lambda x, *_: x.new_empty(x.shape),
)
declare(
    "head_linear(Tensor x, Tensor weight, str format, int out_features) -> Tensor",
    reference=_head_linear,
    fake=lambda x, weight, format, out_features: x.new_empty(  # noqa: ARG005
        x.shape[0], x.shape[1], out_features
    ),
)
