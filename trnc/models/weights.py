"""From a checkpoint's weights to the tensors that stages take: fused, packed, named.

q, k and v become one matrix, gate and up another: one pass over the activations instead of three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trnc import ops
from trnc.checkpoint.layouts import Dense, Layout, concatenate
from trnc.checkpoint.weights import Weights
from trnc.models.config import ModelConfig
from trnc.models.rope import rope_tables
from trnc.models.stage import LayerFormats, WeightFormats

FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_PACKED_AS = {
    "F32": "f32",
    "F16": "f32",  # exact, where bf16 would not be
    "BF16": "bf16",
    "Q4_0": "i4g32s",
    "Q4_1": "i4g32",
    "Q8_0": "i8g32",
}
_DEQUANTIZED = "bf16"  # what K-quants and other block formats are kept as


def choose_formats(stored: Mapping[str, str], model: ModelConfig) -> WeightFormats:
    """Return the packed format of every matrix, given the stored type of each weight.

    A weight keeps the precision that it is stored in. Matrices that are fused but stored in
    different types are kept in f32, which holds them all exactly.
    """

    def fused(names: Iterable[str]) -> str:
        kinds = {_PACKED_AS.get(stored[name], _DEQUANTIZED) for name in names}
        return kinds.pop() if len(kinds) == 1 else "f32"

    layers = tuple(
        LayerFormats(
            **{
                port: fused(f"layers.{index}.{part}" for part in parts)
                for port, parts in FUSED.items()
            }
        )
        for index in range(model.num_layers)
    )
    embed = fused(["embed"])
    return WeightFormats(
        embed=embed, head=embed if model.tie_embeddings else fused(["head"]), layers=layers
    )


def exact_formats(model: ModelConfig) -> WeightFormats:
    """Every matrix in f32, which holds any stored weight exactly: for the eager backend."""
    layer = LayerFormats(qkv="f32", o="f32", gate_up="f32", down="f32")
    return WeightFormats(embed="f32", head="f32", layers=(layer,) * model.num_layers)


def bind_weights(
    weights: Weights, model: ModelConfig, formats: WeightFormats, *, max_context: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every `weight.*` tensor by name: the tables of rope, then `pack_weights`."""
    yield from bind_tables(model, max_context=max_context).items()
    yield from pack_weights(weights, model, formats)


def bind_tables(model: ModelConfig, *, max_context: int) -> dict[str, Tensor]:
    """Return the `weight.*` tensors that are computed from the config alone."""
    cos, sin = rope_tables(model.rope, max_context)
    return {"weight.cos_table": cos, "weight.sin_table": sin}


def pack_weights(
    weights: Weights, model: ModelConfig, formats: WeightFormats
) -> Iterator[tuple[str, Tensor]]:
    """Yield the `weight.*` tensors that come from the checkpoint, one at a time, so that no more is
    held than needed.

    They depend on nothing but the arguments and the sources below `trnc.checkpoint`, `trnc.models`
    and `trnc.ops`: what `trnc.runtime.packed` keeps is keyed by these.
    """
    yield "weight.embed", _pack([weights.matrix("embed")], formats.embed)
    for index, layer in enumerate(formats.layers):
        for name, tensor in _bind_layer(weights, f"layers.{index}.", model, layer):
            yield f"weight.layers.{index}.{name}", tensor
    yield "weight.norm", weights.vector("norm")
    if not model.tie_embeddings:
        yield "weight.head", _pack([weights.matrix("head")], formats.head)


def _bind_layer(
    weights: Weights, prefix: str, model: ModelConfig, formats: LayerFormats
) -> Iterator[tuple[str, Tensor]]:
    for name in ("attn_norm", "mlp_norm"):
        yield name, weights.vector(prefix + name)
    for port, parts in FUSED.items():
        matrices = [weights.matrix(prefix + part) for part in parts]
        yield port, _pack(matrices, getattr(formats, port))
        if f"{prefix}{parts[0]}_bias" in weights:
            biases = [weights.vector(f"{prefix}{part}_bias") for part in parts]
            yield f"{port}_bias", torch.cat(biases)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield name, weights.vector(prefix + name)


def _pack(matrices: Sequence[Layout], format: str) -> Tensor:
    """Fuse matrices along their rows and pack them; grouped formats keep the stored values."""
    if format in ("f32", "bf16"):
        return ops.pack(Dense(torch.cat([m.dequantize() for m in matrices])), format)
    return ops.pack(concatenate(matrices), format)
