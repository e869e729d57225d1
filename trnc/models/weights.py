"""From a checkpoint's weights to the tensors that stages take: fused, packed, named.

q, k and v become one matrix, gate and up another: one pass over the activations instead of three.
The matrices of all experts of a layer, and those of all heads, are stacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trnc import ops
from trnc.checkpoint.layouts import Dense, Layout, concatenate
from trnc.checkpoint.weights import Weights
from trnc.models.config import ModelConfig
from trnc.models.moe import ROUTER_FORMAT
from trnc.models.rope import rope_tables
from trnc.models.stage import LayerFormats, WeightFormats

_PACKED_AS = {
    "F32": "f32",
    "F16": "f32",  # exact, where bf16 would not be
    "BF16": "bf16",
    "Q4_0": "i4g32s",
    "Q4_1": "i4g32",
    "Q8_0": "i8g32",
}
_VECTORS = (
    *("attn_norm", "mlp_norm", "q_norm", "k_norm", "q_a_norm", "kv_a_norm", "router_correction"),
    *("enorm", "hnorm", "shared_norm", "draft_ids"),
)
_DEQUANTIZED = "bf16"  # what K-quants and other block formats are kept as


def choose_formats(stored: Mapping[str, str], model: ModelConfig) -> WeightFormats:
    """Return the packed format of every matrix, given the stored type of each weight.

    A weight keeps the precision that it is stored in. Matrices that are fused but stored in
    different types are kept in f32, which holds them all exactly.
    """

    def fused(names: Iterable[str]) -> str:
        kinds = {_PACKED_AS.get(stored[name], _DEQUANTIZED) for name in names}
        return kinds.pop() if len(kinds) == 1 else "f32"

    def layer(index: int) -> LayerFormats:
        parts = layer_matrices(model, index)
        formats = {port: fused(f"layers.{index}.{p}" for p in parts[port]) for port in parts}
        # Heads are cut out of one matrix and turned, which quantised groups do not survive.
        cut = {port: formats[port] for port in ("k_up", "v_up") if port in formats}
        dense = {port: f if f in ("f32", "bf16") else _DEQUANTIZED for port, f in cut.items()}
        return LayerFormats(**formats | dense)

    embed = fused(["embed"])
    return WeightFormats(
        embed=embed,
        head=embed if model.tie_embeddings else fused(["head"]),
        layers=tuple(map(layer, range(model.num_layers + model.mtp_layers))),
    )


def exact_formats(model: ModelConfig) -> WeightFormats:
    """Every matrix in f32, which holds any stored weight exactly: for the eager backend."""
    layers = (
        LayerFormats(**dict.fromkeys(layer_matrices(model, index), "f32"))
        for index in range(model.num_layers + model.mtp_layers)
    )
    return WeightFormats(embed="f32", head="f32", layers=tuple(layers))


def layer_matrices(model: ModelConfig, index: int) -> dict[str, list[str]]:
    """Return what is fused into each matrix of a layer that has a format: port -> names."""
    if model.mla is None:
        parts = {"qkv": ["q", "k", "v"], "o": ["o"]}
    elif model.mla.q_rank is None:
        parts = {"qkv": ["q", "kv_a"], "k_up": ["kv_b"], "v_up": ["kv_b"], "o": ["o"]}
    else:
        parts = {"qkv": ["q_a", "kv_a"], "q_up": ["q_b"]}
        parts |= {"k_up": ["kv_b"], "v_up": ["kv_b"], "o": ["o"]}
    if model.moe is not None and model.is_moe(index):
        experts = [f"experts.{expert}." for expert in range(model.moe.num_experts)]
        parts["gate_up"] = [e + name for e in experts for name in ("gate", "up")]
        parts["down"] = [e + "down" for e in experts]
        parts |= {"shared_gate_up": ["shared_gate", "shared_up"], "shared_down": ["shared_down"]}
    else:
        parts |= {"gate_up": ["gate", "up"], "down": ["down"]}
    if index >= model.num_layers:
        parts["eh_proj"] = ["eh_proj"]
    return parts


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
        for name, tensor in _bind_layer(weights, index, model, layer):
            yield f"weight.layers.{index}.{name}", tensor
        if f"layers.{index}.draft_ids" in weights:
            yield f"weight.layers.{index}.draft_head", _draft_head(weights, index, model, formats)
    yield "weight.norm", weights.vector("norm")
    if not model.tie_embeddings:
        yield "weight.head", _pack([weights.matrix("head")], formats.head)


def _bind_layer(
    weights: Weights, index: int, model: ModelConfig, formats: LayerFormats
) -> Iterator[tuple[str, Tensor]]:
    prefix = f"layers.{index}."
    for name in _VECTORS:
        if prefix + name in weights:
            yield name, weights.vector(prefix + name)
    if model.is_moe(index):
        yield "router", _pack([weights.matrix(f"{prefix}router")], ROUTER_FORMAT)
    for port, parts in layer_matrices(model, index).items():
        format, names = getattr(formats, port), [prefix + part for part in parts]
        if port in ("k_up", "v_up"):
            heads = _heads(weights.matrix(names[0]), model, port)
            yield port, _stack(heads, model.num_heads, format)
        elif parts[0].startswith("experts."):
            assert model.moe is not None
            yield port, _stack(_experts(weights, names, port), model.moe.num_experts, format)
        else:
            matrices = [_half_split(weights.matrix(name), model, name) for name in names]
            yield port, _pack(matrices, format)
        if f"{names[0]}_bias" in weights:
            yield f"{port}_bias", torch.cat([weights.vector(f"{name}_bias") for name in names])


def _draft_head(weights: Weights, index: int, model: ModelConfig, formats: WeightFormats) -> Tensor:
    """Pack the rows of the head that an MTP layer drafts with."""
    head = weights.matrix("embed" if model.tie_embeddings else "head")
    return _pack([head.permute_rows(weights.vector(f"layers.{index}.draft_ids"))], formats.head)


def _experts(weights: Weights, names: list[str], port: str) -> Iterator[list[Layout]]:
    """Load what is fused into each expert's matrix: gate and up, or down."""
    size = 2 if port == "gate_up" else 1
    for start in range(0, len(names), size):
        yield [weights.matrix(name) for name in names[start : start + size]]


def _heads(kv_b: Layout, model: ModelConfig, port: str) -> Iterator[list[Layout]]:
    """Cut kv_b [heads * (nope + value), rank] into each head's W_uk^T or W_uv."""
    assert model.mla is not None
    nope, value = model.mla.nope_dim, model.mla.value_dim
    for start in range(0, kv_b.shape[0], nope + value):
        if port == "k_up":
            yield [Dense(kv_b.rows(start, start + nope).dequantize().T.contiguous())]
        else:
            yield [Dense(kv_b.rows(start + nope, start + nope + value).dequantize())]


def _half_split(matrix: Layout, model: ModelConfig, name: str) -> Layout:
    """Bring the rows that rope rotates from interleaved pairs, as latent attention has them, into
    the order of pairs (d, d + rope_dim/2): the last `rope_dim` rows of `kv_a`, and of each head.
    """
    mla, leaf = model.mla, name.rsplit(".", 1)[-1]
    if mla is None or not mla.interleaved or leaf not in ("q", "q_b", "kv_a"):
        return matrix
    fixed = mla.kv_rank if leaf == "kv_a" else mla.nope_dim
    pairs = torch.arange(mla.rope_dim).view(-1, 2).T.flatten()
    order = torch.cat([torch.arange(fixed), fixed + pairs])
    starts = torch.arange(0, matrix.shape[0], len(order))
    return matrix.permute_rows((starts[:, None] + order).flatten())


def _stack(items: Iterator[Sequence[Layout]], count: int, format: str) -> Tensor:
    """Fuse and pack `count` items of one shape, one at a time into one tensor."""
    first = _pack(next(items), format)
    stacked = first.new_empty((count, *first.shape))
    stacked[0] = first
    for index, item in enumerate(items, start=1):
        stacked[index] = _pack(item, format)
    return stacked


def _pack(matrices: Sequence[Layout], format: str) -> Tensor:
    """Fuse matrices along their rows and pack them; grouped formats keep the stored values."""
    if format in ("f32", "bf16"):
        return ops.pack(Dense(torch.cat([m.dequantize() for m in matrices])), format)
    return ops.pack(concatenate(matrices), format)
