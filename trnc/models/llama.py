"""The llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) as pure stage functions.

A step is embed -> layer x N -> head. T token rows of up to R sequences are computed at once; which
sequence a row belongs to is data (`sequences`), not shape, so one function serves prefill and
decode. Every operator gives a row the same bits whatever the other rows are (see trnc.ops).

Shapes: T token rows, R sequences, H hidden, Hq/Hkv heads, D head_dim, S page_size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc import ops
from trnc.models.config import ModelConfig
from trnc.models.stage import (
    LayerFormats,
    Stage,
    StageSpec,
    TensorSpec,
    WeightFormats,
    packed_spec,
)


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


def layer_stage(spec: StageSpec) -> Stage:
    """One decoder block. Returns the hidden states and the step's own K and V rows.

    K and V are rounded to the cache's dtype before they are attended, so that a key has the same
    bits whether it comes from this step or from the pages.
    """
    model, formats = spec.model, spec.formats
    assert isinstance(formats, LayerFormats)
    kv_dtype = TensorSpec((), spec.kv_dtype).torch_dtype

    def layer(
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_tables: Tensor,
        sequences: Tensor,
        attn_norm: Tensor,
        qkv: Tensor,
        o: Tensor,
        mlp_norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        qkv_bias: Tensor | None = None,
        o_bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = ops.rms_norm(hidden, attn_norm, model.rms_eps)
        fused = ops.linear(normed, qkv, qkv_bias, formats.qkv, _qkv_width(model))
        q, k, v = _split_heads(fused, model)
        if q_norm is not None and k_norm is not None:
            q, k = _head_norm(q, q_norm, model.rms_eps), _head_norm(k, k_norm, model.rms_eps)
        q = rotate(q, cos, sin)
        k_new, v_new = cache_rows(rotate(k, cos, sin), kv_dtype), cache_rows(v, kv_dtype)
        attended = ops.paged_attention(
            q, k_new, v_new, k_pages, v_pages, block_tables, sequences, model.head_dim**-0.5
        )
        hidden = hidden + ops.linear(attended.flatten(1), o, o_bias, formats.o, model.hidden_size)
        normed = ops.rms_norm(hidden, mlp_norm, model.rms_eps)
        wide = ops.linear(
            normed, gate_up, gate_up_bias, formats.gate_up, 2 * model.intermediate_size
        )
        narrow = ops.linear(ops.silu_mul(wide), down, down_bias, formats.down, model.hidden_size)
        return hidden + narrow, k_new, v_new

    return Stage(
        function=layer,
        inputs=_layer_inputs(spec) | layer_weights(model, formats),
        outputs=("hidden", "k_new", "v_new"),
    )


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


def layer_weights(model: ModelConfig, formats: LayerFormats) -> dict[str, TensorSpec]:
    """The weight ports of one decoder layer, in the order in which its graph takes them."""
    hidden, inner = model.hidden_size, model.intermediate_size
    attended = model.num_heads * model.head_dim
    specs = {
        "attn_norm": TensorSpec((hidden,)),
        "qkv": packed_spec(formats.qkv, _qkv_width(model), hidden),
        "o": packed_spec(formats.o, hidden, attended),
        "mlp_norm": TensorSpec((hidden,)),
        "gate_up": packed_spec(formats.gate_up, 2 * inner, hidden),
        "down": packed_spec(formats.down, hidden, inner),
    }
    if model.qkv_bias:
        specs["qkv_bias"] = TensorSpec((_qkv_width(model),))
    if model.output_bias:
        specs["o_bias"] = TensorSpec((hidden,))
    if model.qk_norm:
        specs["q_norm"] = specs["k_norm"] = TensorSpec((model.head_dim,))
    if model.mlp_bias:
        specs["gate_up_bias"] = TensorSpec((2 * inner,))
        specs["down_bias"] = TensorSpec((hidden,))
    return specs


def _layer_inputs(spec: StageSpec) -> dict[str, TensorSpec]:
    model, half = spec.model, spec.model.rope.dim // 2
    kv, page = model.num_kv_heads, spec.page_size
    row = ops.kv_row_size(model.head_dim, TensorSpec((), spec.kv_dtype).torch_dtype)
    return {
        "hidden": TensorSpec((spec.tokens, model.hidden_size)),
        "cos": TensorSpec((spec.tokens, half)),
        "sin": TensorSpec((spec.tokens, half)),
        "k_pages": TensorSpec(("pages", kv, row, page), spec.kv_dtype),
        "v_pages": TensorSpec(("pages", kv, page, row), spec.kv_dtype),
        "block_tables": TensorSpec((spec.rows, "blocks"), "int32"),
        "sequences": TensorSpec((spec.rows, 3), "int32"),
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
