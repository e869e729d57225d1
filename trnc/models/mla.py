"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its absorbed form.

With l = RMSNorm(kv_a(x)) the latent of a token, a head's key is [W_uk l | k_rope] and its value
W_uv l. Only l and the rotated k_rope are cached: q_nope W_uk l = (W_uk^T q_nope) l, so each query
is brought into the space of latents instead, and sums of latents out of it by W_uv. The norms of
the latents have transformers' default epsilon, not the config's.

Pairs that rope rotates are half-split here; the loader brings interleaved ones into this order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trnc import ops
from trnc.models.config import ModelConfig
from trnc.models.config_parts import MlaConfig
from trnc.models.llama import cache_rows, rotate
from trnc.models.stage import StageSpec, TensorSpec, packed_spec, stacked_spec

LATENT_EPS = 1e-6


def attend(spec: StageSpec, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The attention half of a layer: the hidden states, and the step's own latents [T, W]."""
    model, formats, t = spec.model, spec.layer_formats, tensors
    mla = _mla(model)
    q, latent_new = project(spec, tensors)
    if mla.q_rank is not None:
        q = ops.rms_norm(q.contiguous(), t["q_a_norm"], LATENT_EPS)
        q = ops.linear(q, t["q_up"], None, formats.q_up, model.num_heads * mla.head_dim)
    absorbed = _absorb(spec, q.unflatten(1, (model.num_heads, mla.head_dim)), t)
    paged = (t["latent_pages"], t["block_tables"], t["sequences"])
    summed = ops.latent_attention(absorbed, latent_new, *paged, mla.scale, mla.kv_rank)
    attended = ops.head_linear(summed, t["v_up"], formats.v_up, mla.value_dim)
    out = ops.linear(attended.flatten(1), t["o"], None, formats.o, model.hidden_size)
    return t["hidden"] + out, latent_new


PROJECTED = ("attn_norm", "qkv", "kv_a_norm")  # the weights that `project` takes


def project(spec: StageSpec, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The queries of a layer, or their latents, [T, q_width], and its latent rows for the cache."""
    model, t = spec.model, tensors
    mla = _mla(model)
    normed = ops.rms_norm(t["hidden"], t["attn_norm"], model.rms_eps)
    fused = ops.linear(normed, t["qkv"], None, spec.layer_formats.qkv, _down_width(model))
    q, latent, k_rope = fused.split([_q_width(model), mla.kv_rank, mla.rope_dim], dim=1)
    latent = ops.rms_norm(latent.contiguous(), t["kv_a_norm"], LATENT_EPS)
    k_rope = rotate(k_rope.unsqueeze(1), t["cos"], t["sin"]).squeeze(1)
    # Rounded to the cache's dtype before it is attended, as in trnc.models.llama.
    row = torch.cat((latent, k_rope), dim=1).unsqueeze(1)
    return q, cache_rows(row, TensorSpec((), spec.kv_dtype).torch_dtype).squeeze(1)


def attention_weights(spec: StageSpec) -> dict[str, TensorSpec]:
    """The weight ports of `attend`.

    `qkv` is the way down, [q_rank | kv_rank | rope_dim] (queries themselves where there is no
    q_rank); `k_up` stacks W_uk^T [kv_rank, nope_dim] of each head, `v_up` W_uv [value_dim,
    kv_rank].
    """
    model, formats = spec.model, spec.layer_formats
    mla, heads, hidden = _mla(model), model.num_heads, model.hidden_size
    specs = {
        "attn_norm": TensorSpec((hidden,)),
        "qkv": packed_spec(formats.qkv, _down_width(model), hidden),
    }
    if mla.q_rank is not None:
        specs["q_a_norm"] = TensorSpec((mla.q_rank,))
        specs["q_up"] = packed_spec(formats.q_up, heads * mla.head_dim, mla.q_rank)
    return specs | {
        "kv_a_norm": TensorSpec((mla.kv_rank,)),
        "k_up": stacked_spec(formats.k_up, heads, mla.kv_rank, mla.nope_dim),
        "v_up": stacked_spec(formats.v_up, heads, mla.value_dim, mla.kv_rank),
        "o": packed_spec(formats.o, hidden, heads * mla.value_dim),
    }


def _absorb(spec: StageSpec, q: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Rotate queries [T, Hq, nope + rope] and bring them into the space of latents, [T, Hq, W]."""
    mla = _mla(spec.model)
    nope, rope = q.split([mla.nope_dim, mla.rope_dim], dim=2)
    k_up = tensors["k_up"]
    latent = ops.head_linear(nope.contiguous(), k_up, spec.layer_formats.k_up, mla.kv_rank)
    return torch.cat((latent, rotate(rope, tensors["cos"], tensors["sin"])), dim=2)


def _q_width(model: ModelConfig) -> int:
    """What the first matrix gives of the queries: their latent, or all of them."""
    mla = _mla(model)
    return model.num_heads * mla.head_dim if mla.q_rank is None else mla.q_rank


def _down_width(model: ModelConfig) -> int:
    return _q_width(model) + _mla(model).latent_width


def _mla(model: ModelConfig) -> MlaConfig:
    assert model.mla is not None
    return model.mla
