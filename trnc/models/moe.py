"""A mixture of experts behind a sigmoid router, as in GLM-4.5 and DeepSeek-V3.

y = sum over a token's experts of weight * expert(x), plus the shared experts, which are not scaled.
The router is kept in f32, as in transformers: a rounded score would pick other experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trnc import ops
from trnc.models.config import ModelConfig
from trnc.models.config_parts import MoeConfig
from trnc.models.stage import StageSpec, TensorSpec, packed_spec, stacked_spec

ROUTER_FORMAT = "f32"


def feed_forward(spec: StageSpec, hidden: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The MLP half of a layer, with its residual: hidden states [T, H] to [T, H]."""
    model, formats, t = spec.model, spec.layer_formats, tensors
    moe = _moe(model)
    x = ops.rms_norm(hidden, t["mlp_norm"], model.rms_eps)
    logits = ops.linear(x, t["router"], None, ROUTER_FORMAT, moe.num_experts)
    ids, weights = ops.route(
        logits,
        t["router_correction"],
        moe.num_groups,
        moe.top_groups,
        moe.top_k,
        moe.normalize,
        moe.scale,
    )
    routed = ops.experts(
        x, ids, weights, t["gate_up"], t["down"], formats.gate_up, formats.down, moe.inner
    )
    wide = ops.linear(x, t["shared_gate_up"], None, formats.shared_gate_up, 2 * moe.shared_inner)
    shared = ops.linear(
        ops.silu_mul(wide), t["shared_down"], None, formats.shared_down, model.hidden_size
    )
    return hidden + (routed + shared)


def feed_forward_weights(spec: StageSpec) -> dict[str, TensorSpec]:
    """The weight ports of `feed_forward`; those of all experts are stacked."""
    model, formats = spec.model, spec.layer_formats
    moe, hidden = _moe(model), model.hidden_size
    return {
        "mlp_norm": TensorSpec((hidden,)),
        "router": packed_spec(ROUTER_FORMAT, moe.num_experts, hidden),
        "router_correction": TensorSpec((moe.num_experts,)),
        "gate_up": stacked_spec(formats.gate_up, moe.num_experts, 2 * moe.inner, hidden),
        "down": stacked_spec(formats.down, moe.num_experts, hidden, moe.inner),
        "shared_gate_up": packed_spec(formats.shared_gate_up, 2 * moe.shared_inner, hidden),
        "shared_down": packed_spec(formats.shared_down, hidden, moe.shared_inner),
    }


def _moe(model: ModelConfig) -> MoeConfig:
    assert model.moe is not None
    return model.moe
