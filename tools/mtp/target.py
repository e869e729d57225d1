"""The model whose tokens are foretold, in plain torch: weights, states after the last norm, head.

Nothing of this runs in the engine. It is a second, simple reading of the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trnc.checkpoint.source import Source
from trnc.checkpoint.weights import load_weights
from trnc.models.config import ModelConfig, load_config
from trnc.models.rope import rope_tables

Layer = dict[str, Tensor]

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Dequantised weights, f32: `embed` and `head` [V, H], `norm` [H], and those of each layer."""

    config: ModelConfig
    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: list[Layer]


def load_target(source: Source) -> Target:
    """Dequantise a model of the llama family without biases; raises SystemExit for another one."""
    config = load_config(source)
    weights = load_weights(source, config)
    if config.architecture != "llama" or config.qkv_bias or config.output_bias or config.mlp_bias:
        raise SystemExit("only models of the llama family without biases can be trained for")
    if config.qk_norm:
        raise SystemExit("models with norms of q and k cannot be trained for")
    embed = weights.matrix("embed").dequantize()
    return Target(
        config=config,
        embed=embed,
        head=embed if config.tie_embeddings else weights.matrix("head").dequantize(),
        norm=weights.vector("norm"),
        layers=[
            {name: weights.matrix(f"layers.{i}.{name}").dequantize() for name in MATRICES}
            | {name: weights.vector(f"layers.{i}.{name}") for name in NORMS}
            for i in range(config.num_layers)
        ],
    )


@torch.inference_mode()
def target_states(target: Target, tokens: Tensor) -> Tensor:
    """Return the states after the last norm [B, T, H] of sequences of tokens [B, T]."""
    tables = rope_tables(target.config.rope, tokens.shape[1])
    hidden = target.embed[tokens].float()
    for layer in target.layers:
        q, k, v = project(hidden, layer, target.config, tables)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = finish(hidden, attended, layer, target.config)
    return norm(hidden, target.norm, target.config)


def norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    """RMSNorm (arXiv 1910.07467), in f32."""
    return functional.rms_norm(x.float(), x.shape[-1:], weight, config.rms_eps)


def project(
    hidden: Tensor, layer: Layer, config: ModelConfig, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated q [B, Hq, T, D] and k, and v [B, Hkv, T, D], of one layer's input."""
    normed = norm(hidden, layer["attn_norm"], config)
    q, k, v = (
        functional.linear(normed, layer[name]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for name in ("q", "k", "v")
    )
    return rotate(q, *tables).to(v.dtype), rotate(k, *tables).to(v.dtype), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rope to [B, h, T, D], half-split, with factors [T, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def finish(hidden: Tensor, attended: Tensor, layer: Layer, config: ModelConfig) -> Tensor:
    """Return what a layer gives, from its input and what its heads attended [B, Hq, T, D]."""
    hidden = hidden + functional.linear(attended.transpose(1, 2).flatten(2), layer["o"])
    normed = norm(hidden, layer["mlp_norm"], config)
    gate, up = (functional.linear(normed, layer[name]) for name in ("gate", "up"))
    return hidden + functional.linear(functional.silu(gate) * up, layer["down"])
