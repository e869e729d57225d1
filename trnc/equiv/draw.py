"""Random inputs that a stage accepts: what an input is for is read from the ops that take it.

Packed weights are valid records, block tables name existing pages, and the sequences of a step
share its token rows, as in serving. Other integers are drawn from ranges that get smaller until
the graph runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trnc.equiv.calls import Call, Ref, Type, parse_call, parse_types
from trnc.equiv.evaluate import DTYPES, shape_of
from trnc.equiv.text import Graph
from trnc.ops.packing import packed_constants

SCALES = (1.0, 0.01, 10.0)  # of the activations: a small constant only shows beside small numbers
DRAWS = 2 * len(SCALES)  # as many inputs show most differences
_RANGES = (64, 16, 4, 2, 1)  # of integers whose use is not known
_SIZES = (2, 3, 4, 5, 6, 7)

# op -> {position of a packed weight: position of its format}
_WEIGHTS = {
    "trnc.linear.default": {1: 3},
    "trnc.embedding.default": {1: 2},
    "trnc.head_linear.default": {1: 2},
    "trnc.experts.default": {3: 5, 4: 6},
}
# op -> positions of (pages..., block tables, sequences)
_PAGED = {
    "trnc.paged_attention.default": ((3, 4), 5, 6),
    "trnc.latent_attention.default": ((2,), 3, 4),
}


@dataclass(frozen=True, slots=True)
class Draw:
    """One set of inputs: the sizes bound to the graph's symbols, and the tensors in f32."""

    sizes: Mapping[str, int]
    inputs: tuple[Tensor, ...]
    generator: torch.Generator


def attempts() -> int:
    """How many ranges of integers there are to try."""
    return len(_RANGES)


def draw_inputs(graph: Graph, seed: int, attempt: int = 0) -> Draw:
    """Return the inputs of a seed; a later attempt has smaller integers."""
    dice = random.Random(seed)
    draw = Draw(_draw_sizes(graph, dice), (), torch.Generator().manual_seed(seed))
    calls = [parse_call(n.expression.render({})) for n in graph.nodes if n.expression]
    scale = SCALES[seed % len(SCALES)]
    tensors: dict[str, Tensor] = {}
    for value in graph.inputs:
        type_ = parse_types(value.type)[0]
        tensors[value.name] = _plain(
            shape_of(type_, draw.sizes), type_, draw.generator, scale, _RANGES[attempt]
        )
    for call in calls:
        _fill_weights(call, tensors, draw.generator)
        _fill_index(call, tensors, draw.generator)
        if call.op in _PAGED:
            _fill_paged(call, graph, draw, tensors, dice)
    return replace(draw, inputs=tuple(tensors[v.name] for v in graph.inputs))


def _draw_sizes(graph: Graph, dice: random.Random) -> dict[str, int]:
    """Bind every symbol to another small number, the token rows among them."""
    names = [text.split(":")[0] for text in graph.ranges]
    return dict(zip(names, dice.sample(_SIZES, len(names)), strict=True))


def _plain(
    shape: tuple[int, ...], type_: Type, generator: torch.Generator, scale: float, span: int
) -> Tensor:
    dtype = DTYPES[type_.dtype]
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    numbers = torch.randint(0, span, shape, generator=generator)
    if dtype != torch.uint8:  # -1 often means "none"
        numbers[torch.rand(shape, generator=generator) < 0.3] = -1
    return numbers.to(dtype)


def random_packed(shape: tuple[int, ...], format: str, generator: torch.Generator) -> Tensor:
    """Return random packed weights of a shape that `packed_shape` gave, stacked or not."""
    if format in ("f32", "bf16"):
        width = 4 if format == "f32" else 2
        numbers = torch.randn((*shape[:-1], shape[-1] // width), generator=generator) * 0.2
        return numbers.to(torch.float32 if width == 4 else torch.bfloat16).view(torch.uint8)
    record, first = packed_constants(format)
    bytes_ = torch.randint(0, 256, (*shape[:-1], shape[-1] // record, record), generator=generator)
    records = bytes_.to(torch.uint8)
    numbers = torch.randn((*records.shape[:-1], (record - first) // 2), generator=generator) * 0.02
    records[..., first:] = numbers.half().view(torch.uint8)
    return records.view(shape)


def _fill_weights(call: Call, tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    for position, format_at in _WEIGHTS.get(call.op, {}).items():
        weight, format = call.arguments[position], call.arguments[format_at]
        if isinstance(weight, Ref) and weight.name in tensors and isinstance(format, str):
            shape = tuple(tensors[weight.name].shape)
            tensors[weight.name] = random_packed(shape, format, generator)


def _fill_index(call: Call, tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    """An index that is an input names a row of what it indexes."""
    if call.op != "aten.index.Tensor":
        return
    table, indexes = call.arguments
    if not isinstance(table, Ref) or table.name not in tensors or not isinstance(indexes, tuple):
        return
    for dim, index in enumerate(indexes):
        if isinstance(index, Ref) and index.name in tensors:
            size = tensors[table.name].shape[dim]
            old = tensors[index.name]
            tensors[index.name] = torch.randint(0, size, old.shape, generator=generator).to(old)


def _fill_paged(
    call: Call, graph: Graph, draw: Draw, tensors: dict[str, Tensor], dice: random.Random
) -> None:
    """Block tables name pages that exist; sequences lie one after the other in the token rows."""
    pages_at, tables_at, sequences_at = _PAGED[call.op]
    *pages, tables, sequences = (
        argument.name
        for argument in (call.arguments[at] for at in (*pages_at, tables_at, sequences_at))
        if isinstance(argument, Ref) and argument.name in tensors
    )
    for name in pages:
        if tensors[name].dtype == torch.int8:
            by_column = len(pages) > 1 and name == pages[0]
            tensors[name] = _stored_pages(tensors[name], by_column, draw.generator)
    count, size = len(tensors[pages[-1]]), tensors[pages[-1]].shape[-2]
    table = tensors[tables]
    tensors[tables] = torch.randint(0, count, table.shape, generator=draw.generator).to(table)
    query = call.arguments[0]
    assert isinstance(query, Ref)
    tokens = shape_of(_type_of(query, graph), draw.sizes)[0]
    room = size * table.shape[1]
    tensors[sequences] = random_sequences(len(tensors[sequences]), tokens, room, dice)


def random_sequences(rows: int, tokens: int, room: int, dice: random.Random) -> Tensor:
    """Return `sequences` [rows, 3] of `trnc.ops.attention` for a step of so many token rows."""
    first, entries = 0, []
    for row in range(rows):
        left = min(tokens - first, room)
        count = left if row == rows - 1 else dice.randint(0, left)
        entries.append((first, count, dice.randint(0, room - count)))
        first += count
    return torch.tensor(entries, dtype=torch.int32)


def _stored_pages(pages: Tensor, by_column: bool, generator: torch.Generator) -> Tensor:
    """Give int8 pages scales that are numbers; pages of keys have them in their last four rows."""
    pages = torch.randint(-127, 128, pages.shape, generator=generator).to(torch.int8)
    if by_column:
        scales = torch.rand((*pages.shape[:2], pages.shape[3]), generator=generator) * 0.02
        pages[:, :, -4:] = scales.view(torch.int8).view(*pages.shape[:2], 4, pages.shape[3])
    else:
        scales = torch.rand((*pages.shape[:-1], 1), generator=generator) * 0.02
        pages[..., -4:] = scales.view(torch.int8)
    return pages


def _type_of(ref: Ref, graph: Graph) -> Type:
    types = {v.name: v.type for v in (*graph.inputs, *graph.nodes)}
    return parse_types(types[ref.name])[ref.item or 0]
