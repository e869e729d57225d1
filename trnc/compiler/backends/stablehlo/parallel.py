"""Tensor parallelism: which part of each weight a core has, and the collectives between cores.

A core computes its share of the heads, of the MLP's width, of the experts and of the vocabulary.
Where it has a part of a sum, the parts of all cores are added up (`all_reduce`), as late as can be;
where it has some of the columns, they are joined (`all_gather`).

Which core it is comes as an input, so that all cores run one module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import mlir

from trnc.compiler.backends.stablehlo.mlir import ir, stablehlo
from trnc.compiler.backends.stablehlo.site import Site
from trnc.errors import ConfigError
from trnc.models.config import ModelConfig

# How a matrix [N, K] (or a stack of them) is divided: not at all, each section of its rows, all of
# its rows as a part of the vocabulary, its columns, or the matrices of the stack.
SplitKind = Literal["none", "rows", "vocabulary", "columns", "stack"]


@dataclass(frozen=True, slots=True)
class Partial:
    """An array of which every core has one addend."""

    array: jax.Array


@dataclass(frozen=True, slots=True)
class Section:
    """Some rows of a fused matrix, in `parts` equal parts.

    Each core has `parts / ranks` of them; where there are fewer, neighbours have the same one.
    """

    rows: int
    parts: int


@dataclass(frozen=True, slots=True)
class Split:
    """How one weight is divided between cores. `sections` are those of a split by rows."""

    kind: SplitKind = "none"
    sections: tuple[Section, ...] = ()


WHOLE = Split()


def local_model(model: ModelConfig, ranks: int) -> ModelConfig:
    """Return the config of the graphs that one of `ranks` cores runs.

    Raises:
        ConfigError: a size that does not divide; the message names it.
    """
    if ranks == 1:
        return model
    sizes = {"heads": model.num_heads, "intermediate_size": model.intermediate_size}
    sizes["vocab_size"] = model.vocab_size
    if model.moe is not None:
        sizes |= {"experts": model.moe.num_experts, "shared expert's width": model.moe.shared_inner}
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(f"ranks = {ranks}: the model's {name}, {size}, do not divide by it")
    kv = model.num_kv_heads
    if kv % ranks and ranks % kv:
        raise ConfigError(f"ranks = {ranks}: {kv} KV heads can neither be divided nor shared by it")
    moe = model.moe and replace(model.moe, shared_inner=model.moe.shared_inner // ranks)
    return replace(
        model,
        num_heads=model.num_heads // ranks,
        num_kv_heads=max(kv // ranks, 1),
        intermediate_size=model.intermediate_size // ranks,
        moe=moe,
    )


def split_of(name: str, model: ModelConfig) -> Split:
    """Return how the weight `name` of the whole `model` is divided between cores."""
    *_, layer, port = ("", *name.removeprefix("weight.").split("."))
    is_moe = layer.isdigit() and model.is_moe(int(layer))
    if port in ("embed", "head"):
        return Split("vocabulary")
    if port in ("k_up", "v_up") or (is_moe and port in ("gate_up", "down")):
        return Split("stack")
    if port in ("o", "down", "shared_down"):
        return Split("columns")
    return Split("rows", sections) if (sections := _sections(port, model)) else WHOLE


def _sections(port: str, model: ModelConfig) -> tuple[Section, ...]:
    """Return what is divided in a matrix or a vector that is split by rows."""
    if port in ("gate_up", "gate_up_bias"):
        return (Section(model.intermediate_size, model.intermediate_size),) * 2
    if port == "shared_gate_up" and model.moe is not None:
        return (Section(model.moe.shared_inner, model.moe.shared_inner),) * 2
    if port == "q_up":
        return (Section(model.num_heads * model.head_dim, model.num_heads),)
    return _qkv_sections(model) if port in ("qkv", "qkv_bias") else ()


def _qkv_sections(model: ModelConfig) -> tuple[Section, ...]:
    """Queries by head; keys and values by KV head; latents whole."""
    mla, heads = model.mla, model.num_heads
    if mla is None:
        kv = Section(model.num_kv_heads * model.head_dim, model.num_kv_heads)
        return Section(heads * model.head_dim, heads), kv, kv
    queries = Section(heads * mla.head_dim, heads) if mla.q_rank is None else Section(mla.q_rank, 1)
    return queries, Section(mla.latent_width, 1)


def row_indexes(split: Split, rank: int, ranks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return which rows of a weight that is split by rows one core has, in order."""
    indexes, start = [], 0
    for section in split.sections:
        size = section.rows // section.parts
        if section.parts >= ranks:
            share = section.parts // ranks
            first = rank * share
        else:
            share, first = 1, rank * section.parts // ranks
        indexes.append(start + np.arange(first * size, (first + share) * size))
        start += section.rows
    return np.concatenate(indexes)


def local_rows(split: Split, ranks: int) -> int:
    """Return how many rows of a weight that is split by rows each core has."""
    return len(row_indexes(split, 0, ranks))


# Collectives


def all_reduce(site: Site, x: jax.Array) -> jax.Array:
    """Return the sum of `x` over all cores."""
    if site.ranks == 1:
        return x
    result: jax.Array = _ALL_REDUCE.bind(x, ranks=site.ranks)
    return result


def all_gather(site: Site, x: jax.Array) -> jax.Array:
    """Join the columns of all cores: [T, N / ranks] to [T, N], in the order of their ranks."""
    if site.ranks == 1:
        return x
    result: jax.Array = _ALL_GATHER.bind(x, ranks=site.ranks)
    return result


def _groups(ranks: int) -> Any:
    """One group of all cores. It is part of the module, so that no key can forget it."""
    members = np.arange(ranks, dtype=np.int64)[None]
    word = ir.IntegerType.get_signless(64)
    type = ir.RankedTensorType.get((1, ranks), word)
    return ir.DenseIntElementsAttr.get(members, type=type)


def _lower_all_reduce(_: Any, x: Any, *, ranks: int) -> list[Any]:
    op = stablehlo.AllReduceOp([x.type], [x], _groups(ranks))
    scalar = ir.RankedTensorType.get((), ir.RankedTensorType(x.type).element_type)
    block = op.computation.blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.add(*block.arguments)])
    return [op.result]


def _lower_all_gather(context: Any, x: Any, *, ranks: int) -> list[Any]:
    (result,) = context.avals_out
    type = mlir.aval_to_ir_type(result)
    op = stablehlo.AllGatherOp([type], [x], len(result.shape) - 1, _groups(ranks))
    return [op.result]


def _primitive(name: str, widens: bool) -> core.Primitive:
    primitive = core.Primitive(name)

    def shape(x: Any, *, ranks: int) -> Any:
        return x.update(shape=(*x.shape[:-1], x.shape[-1] * (ranks if widens else 1)))

    primitive.def_abstract_eval(shape)
    mlir.register_lowering(primitive, _lower_all_gather if widens else _lower_all_reduce)
    return primitive


_ALL_REDUCE = _primitive("trnc_all_reduce", widens=False)
_ALL_GATHER = _primitive("trnc_all_gather", widens=True)


def rank_offset(site: Site, size: int) -> jax.Array:
    """Return the first of the `size` things that this core has, [1] int32."""
    return jnp.zeros(1, jnp.int32) if site.rank is None else site.rank * size
