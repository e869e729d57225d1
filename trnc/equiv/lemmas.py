"""What promises need to know of one stage: that it passes a value on, or works row by row.

Proved like two graphs in `trnc.equiv.prove`; where the rules do not suffice, numbers may refute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trnc.equiv.calls import parse_types
from trnc.equiv.certify import context_at
from trnc.equiv.draw import DRAWS, draw_inputs
from trnc.equiv.egraph import EGraph, Limits
from trnc.equiv.evaluate import CannotEvaluate, evaluate
from trnc.equiv.lower import graph_inputs, lower
from trnc.equiv.prove import Proof, output_difference
from trnc.equiv.terms import Arena, Context, Id, Terms
from trnc.equiv.text import Graph

# What an input of a layer is to one of its token rows: that row of it, all of it, or what attention
# sees: pages, block tables and sequences, in this order.
Role = Literal["row", "shared", "context"]


@dataclass(frozen=True, slots=True)
class _Sample:
    """What a graph should give and what it gives, for random inputs."""

    expected: list[Tensor]
    results: list[Tensor]


def prove_passes_on(
    graph: Graph, neutral: Mapping[int, float], passed: Sequence[int], limits: Limits
) -> Proof:
    """Is output i input `passed[i]`, where the inputs at `neutral` hold these numbers?"""
    arena = Arena()
    terms = list(graph_inputs(graph, arena))
    for index, value in neutral.items():
        shape = parse_types(graph.inputs[index].type)[0].shape
        terms[index] = arena.make("Expand", arena.literal(value), shape, shape=shape)
    outputs = lower(graph, arena, terms)
    pairs = [(output, terms[index]) for output, index in zip(outputs, passed, strict=True)]

    def samples() -> Iterator[_Sample]:
        for seed in range(DRAWS):
            draw = draw_inputs(graph, seed)
            inputs = list(draw.inputs)
            for index, value in neutral.items():
                inputs[index] = torch.full_like(inputs[index], value)
            results = evaluate(graph, inputs, draw.sizes, torch.float64)
            yield _Sample([inputs[index].double() for index in passed], results)

    return _decide(arena, pairs, limits, samples())


def prove_row(step: Graph, single: Graph, roles: Sequence[Role], limits: Limits) -> Proof:
    """Is every token row of a layer's outputs what `single` gives for that row?

    `single` is the layer of one token. It attends in the context that the row attends in: the cache
    after the earlier rows of its sequence are written. Output 0 is the layer's, the others are what
    it adds to the cache.
    """
    arena = Arena()
    terms = graph_inputs(step, arena)
    outputs = lower(step, arena, terms)
    context = tuple(t for t, role in zip(terms, roles, strict=True) if role == "context")
    at = Context(Terms(outputs[1:]), Terms(context))

    def alone(term: Id, role: Role) -> Id:
        if role == "context":
            return arena.make("Item", at, context.index(term))
        return term if role == "shared" else arena.make("Row", term)

    own = [alone(term, role) for term, role in zip(terms, roles, strict=True)]
    results = lower(single, arena, own)
    pairs = [(arena.make("Row", a), b) for a, b in zip(outputs, results, strict=True)]
    return _decide(arena, pairs, limits, _row_samples(step, single, roles))


def _decide(
    arena: Arena, pairs: Sequence[tuple[Id, Id]], limits: Limits, samples: Iterator[_Sample]
) -> Proof:
    run = EGraph(arena=arena).saturate(pairs, limits)
    if all(run.equal):
        reason = "the outputs are equal over the reals"
        return Proof("proved", reason, run.fired, nodes=run.nodes, seconds=run.seconds)
    try:
        for seed, sample in enumerate(samples):
            if (found := output_difference(sample.expected, sample.results)) is not None:
                return Proof("refuted", f"{found}, on the random input {seed}")
    except (CannotEvaluate, RuntimeError, IndexError) as error:
        return Proof("unknown", f"no rule applies, and it was not run: {error}")
    return Proof("unknown", "no rule applies, and no random input shows a difference")


def _row_samples(step: Graph, single: Graph, roles: Sequence[Role]) -> Iterator[_Sample]:
    for seed in range(DRAWS):
        inputs = _with_own_pages(draw_inputs(step, seed).inputs, roles, seed)
        outputs = evaluate(step, inputs, _sizes(step, inputs), torch.float64)
        context = [x for x, role in zip(inputs, roles, strict=True) if role == "context"]
        used = [
            row for first, count, _ in context[-1].tolist() for row in range(first, first + count)
        ]
        row = random.Random(seed).choice(used)
        seen = iter(context_at(outputs[1:], context, row))
        alone = [
            next(seen) if role == "context" else x if role == "shared" else x[row : row + 1]
            for x, role in zip(inputs, roles, strict=True)
        ]
        results = evaluate(single, alone, _sizes(single, alone), torch.float64)
        yield _Sample([output[row : row + 1] for output in outputs], results)


def _with_own_pages(inputs: Sequence[Tensor], roles: Sequence[Role], seed: int) -> list[Tensor]:
    """Give each entry of the block tables a page of its own, as serving does."""
    found = list(inputs)
    *pages, tables, _ = (i for i, role in enumerate(roles) if role == "context")
    count = found[tables].numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for index in pages:
        page = found[index][torch.arange(count) % len(found[index])]
        found[index] = page.double() if page.dtype == torch.float32 else page
    found[tables] = order.view_as(found[tables]).to(found[tables])
    return found


def _sizes(graph: Graph, inputs: Sequence[Tensor]) -> dict[str, int]:
    """Bind the symbols of a graph to the sizes of its inputs."""
    shapes = (parse_types(value.type)[0].shape for value in graph.inputs)
    pairs = zip(shapes, inputs, strict=True)
    return {
        name: size
        for shape, x in pairs
        for name, size in zip(shape, x.shape, strict=True)
        if name.isidentifier()
    }
