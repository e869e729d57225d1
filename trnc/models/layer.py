"""A decoder layer: one kind of attention, then one kind of MLP, each with its residual."""

from __future__ import annotations

from torch import Tensor

from trnc.models import llama, mla, moe
from trnc.models.cache import cache_layout
from trnc.models.stage import Stage, StageSpec, TensorSpec


def layer_stage(spec: StageSpec) -> Stage:
    """Hidden states [T, H] through one layer, and what the step adds to the cache.

    The kind is `layer` for a dense MLP and `moe_layer` for routed experts; the attention is the
    model's. MTP layers have the same stage as the others, with their own weights and pages.
    """
    routed = spec.kind == "moe_layer"
    attend = llama.attend if spec.model.mla is None else mla.attend
    feed_forward = moe.feed_forward if routed else llama.feed_forward

    def layer(**tensors: Tensor) -> tuple[Tensor, ...]:
        hidden, *new = attend(spec, tensors)
        return feed_forward(spec, hidden, tensors), *new

    cache = cache_layout(spec.model, spec.kv_dtype, spec.page_size)
    return Stage(
        function=layer,
        inputs=_inputs(spec) | layer_weights(spec),
        outputs=("hidden", *cache.new),
    )


def layer_weights(spec: StageSpec) -> dict[str, TensorSpec]:
    """The weight ports of one layer, in the order in which its graph takes them."""
    model = spec.model
    latent, routed = model.mla is not None, spec.kind == "moe_layer"
    specs = mla.attention_weights(spec) if latent else llama.attention_weights(spec)
    specs |= moe.feed_forward_weights(spec) if routed else llama.feed_forward_weights(spec)
    specs |= {} if latent else llama.attention_vectors(model)
    return specs | ({} if routed else llama.feed_forward_vectors(model))


def _inputs(spec: StageSpec) -> dict[str, TensorSpec]:
    half = spec.model.rope.dim // 2
    return {
        "hidden": TensorSpec((spec.tokens, spec.model.hidden_size)),
        "cos": TensorSpec((spec.tokens, half)),
        "sin": TensorSpec((spec.tokens, half)),
        **cache_layout(spec.model, spec.kv_dtype, spec.page_size).pages,
        "block_tables": TensorSpec((spec.rows, "blocks"), "int32"),
        "sequences": TensorSpec((spec.rows, 3), "int32"),
    }
