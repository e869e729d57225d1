"""The llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) as pure stage functions.

The two halves of a layer are functions of their own, so that other families can have one of them.

A step is embed -> layer x N -> head. T token rows of up to R sequences are computed at once; which
sequence a row belongs to is data (`sequences`), not shape, so one function serves prefill and
decode. Every operator gives a row the same bits whatever the other rows are (see trnc.ops).

Shapes: T token rows, R sequences, H hidden, Hq/Hkv heads, D head_dim, S page_size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trnc import ops
from trnc.models.config import ModelConfig
from trnc.models.stage import Stage, StageSpec, TensorSpec, WeightFormats, packed_spec


def embed_stage(spec: StageSpec) -> Stage:
    """Token ids [T] to hidden states [T, H] and the rotary factors [T, D/2] of their positions.

    A row whose `token_slots` entry is not negative takes the last token sampled in that slot of the
    device state instead of its `token_ids` entry, so that the host can plan a step ahead.
    """
    model, formats = spec.model, spec.formats
    assert isinstance(formats, WeightFormats)
    half = model.rope.dim // 2

    def embed(
        token_ids: Tensor,
        token_slots: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        cos_table: Tensor,
        sin_table: Tensor,
        embed: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sampled = last_tokens[token_slots.clamp(min=0)]
        ids = torch.where(token_slots >= 0, sampled, token_ids)
        hidden = ops.embedding(ids, embed, formats.embed, model.hidden_size)
        return hidden, cos_table[positions], sin_table[positions]

    per_row = TensorSpec((spec.tokens,), "int64")
    table = TensorSpec(("positions", half))
    inputs = {
        "token_ids": per_row,
        "token_slots": per_row,
        "positions": per_row,
        "last_tokens": TensorSpec(("slots",), "int64"),
        "cos_table": table,
        "sin_table": table,
        "embed": packed_spec(formats.embed, model.vocab_size, model.hidden_size),
    }
    return Stage(function=embed, inputs=inputs, outputs=("hidden", "cos", "sin"))


def attend(spec: StageSpec, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The attention half of a layer: the hidden states, and the step's own K and V rows."""
    model, t = spec.model, tensors
    q, k_new, v_new = project(spec, tensors)
    paged = (t["k_pages"], t["v_pages"], t["block_tables"], t["sequences"])
    attended = ops.paged_attention(q, k_new, v_new, *paged, model.head_dim**-0.5)
    flat, format = attended.flatten(1), spec.layer_formats.o
    out = ops.linear(flat, t["o"], t.get("o_bias"), format, model.hidden_size)
    return t["hidden"] + out, k_new, v_new


PROJECTED = ("attn_norm", "qkv", "qkv_bias", "q_norm", "k_norm")  # the weights that `project` takes


def project(spec: StageSpec, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The queries [T, Hq, D] of a layer, and its K and V rows for the cache.

    K and V are rounded to the cache's dtype before they are attended, so that a key has the same
    bits whether it comes from this step or from the pages.
    """
    model, t = spec.model, tensors
    kv_dtype = TensorSpec((), spec.kv_dtype).torch_dtype
    cos, sin = t["cos"], t["sin"]
    normed = ops.rms_norm(t["hidden"], t["attn_norm"], model.rms_eps)
    format = spec.layer_formats.qkv
    fused = ops.linear(normed, t["qkv"], t.get("qkv_bias"), format, _qkv_width(model))
    q, k, v = _split_heads(fused, model)
    if model.qk_norm:
        q = _head_norm(q, t["q_norm"], model.rms_eps)
        k = _head_norm(k, t["k_norm"], model.rms_eps)
    k_new, v_new = cache_rows(rotate(k, cos, sin), kv_dtype), cache_rows(v, kv_dtype)
    return rotate(q, cos, sin), k_new, v_new


def feed_forward(spec: StageSpec, hidden: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The dense MLP half of a layer, with its residual."""
    model, formats, t = spec.model, spec.layer_formats, tensors
    normed = ops.rms_norm(hidden, t["mlp_norm"], model.rms_eps)
    wide = ops.linear(
        normed, t["gate_up"], t.get("gate_up_bias"), formats.gate_up, 2 * model.intermediate_size
    )
    narrow = ops.linear(
        ops.silu_mul(wide), t["down"], t.get("down_bias"), formats.down, model.hidden_size
    )
    return hidden + narrow


def head_stage(spec: StageSpec) -> Stage:
    """Hidden states to the logits [R, V] of the rows that sample."""
    model, formats = spec.model, spec.formats
    assert isinstance(formats, WeightFormats)

    def head(hidden: Tensor, sample_rows: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor]:
        normed = ops.rms_norm(hidden[sample_rows], norm, model.rms_eps)
        return (ops.linear(normed, head, None, formats.head, model.vocab_size),)

    inputs = {
        "hidden": TensorSpec((spec.tokens, model.hidden_size)),
        "sample_rows": TensorSpec((spec.rows,), "int64"),
        "norm": TensorSpec((model.hidden_size,)),
        "head": packed_spec(formats.head, model.vocab_size, model.hidden_size),
    }
    return Stage(function=head, inputs=inputs, outputs=("logits",))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding, half-split layout, to the first 2 * cos.shape[-1] dims of [T, h, D].

    x' = [x1 cos - x2 sin, x2 cos + x1 sin] (RoFormer, arXiv 2104.09864).
    """
    half = cos.shape[-1]
    rest = x.shape[-1] - 2 * half
    first, second, *passed = x.split([half, half, rest] if rest else [half, half], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *passed), dim=-1)


def cache_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round keys or values [T, Hkv, D] to stored rows of a cache of `dtype`, contiguous."""
    if dtype == torch.int8:
        return ops.quantize_kv(x.contiguous())
    return x.to(dtype).contiguous()  # values are a slice of the fused rows otherwise


def attention_weights(spec: StageSpec) -> dict[str, TensorSpec]:
    """The matrices of `attend`, and the norm before them."""
    model, formats = spec.model, spec.layer_formats
    hidden, attended = model.hidden_size, model.num_heads * model.head_dim
    return {
        "attn_norm": TensorSpec((hidden,)),
        "qkv": packed_spec(formats.qkv, _qkv_width(model), hidden),
        "o": packed_spec(formats.o, hidden, attended),
    }


def attention_vectors(model: ModelConfig) -> dict[str, TensorSpec]:
    """What `attend` takes only in some models."""
    specs = {}
    if model.qkv_bias:
        specs["qkv_bias"] = TensorSpec((_qkv_width(model),))
    if model.output_bias:
        specs["o_bias"] = TensorSpec((model.hidden_size,))
    if model.qk_norm:
        specs["q_norm"] = specs["k_norm"] = TensorSpec((model.head_dim,))
    return specs


def feed_forward_weights(spec: StageSpec) -> dict[str, TensorSpec]:
    """The matrices of `feed_forward`, and the norm before them."""
    hidden, inner = spec.model.hidden_size, spec.model.intermediate_size
    formats = spec.layer_formats
    return {
        "mlp_norm": TensorSpec((hidden,)),
        "gate_up": packed_spec(formats.gate_up, 2 * inner, hidden),
        "down": packed_spec(formats.down, hidden, inner),
    }


def feed_forward_vectors(model: ModelConfig) -> dict[str, TensorSpec]:
    """What `feed_forward` takes only in some models."""
    if not model.mlp_bias:
        return {}
    return {
        "gate_up_bias": TensorSpec((2 * model.intermediate_size,)),
        "down_bias": TensorSpec((model.hidden_size,)),
    }


def _qkv_width(model: ModelConfig) -> int:
    return (model.num_heads + 2 * model.num_kv_heads) * model.head_dim


def _split_heads(fused: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
    q, k, v = fused.unflatten(1, (sum(sizes), model.head_dim)).split(sizes, dim=1)
    return q, k, v


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of every head's D values by one shared weight [D] (Qwen3's qk-norm)."""
    normed: Tensor = ops.rms_norm(x.flatten(0, 1), weight, eps).view(x.shape)
    return normed
