"""Linking: from programs with named values to flat code over one table of slots.

Weights, state and inputs keep their slots for good; values are numbered anew in each program but
share the same range of slots, and each instruction lists the values that nothing reads after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trnc.compiler.manifest import LinkedCall, LinkedUpdate, Variant
from trnc.core import VariantKey


@dataclass(frozen=True, slots=True)
class LinkedProgram:
    """`code` is what the native runner's `add_program` documents; `inputs` are bare input names."""

    code: list[int]
    input_names: tuple[str, ...]
    input_slots: list[int]
    output_slots: list[int]


@dataclass(frozen=True, slots=True)
class Linked:
    """All programs of a catalog over one table. `bound` are the weight and state names to bind."""

    table_size: int
    bound: Mapping[str, int]
    programs: Mapping[VariantKey, LinkedProgram]


def link(
    variants: Iterable[Variant], *, stages: Mapping[str, int], updates: Mapping[str, int]
) -> Linked:
    """Link every variant. `stages` and `updates` give the runner's index of each target."""
    variants = tuple(variants)
    names = dict.fromkeys(name for v in variants for name in _names(v))
    bound = {n: i for i, n in enumerate(n for n in names if not n.startswith("value."))}
    values: dict[VariantKey, dict[str, int]] = {
        v.key: {
            n: len(bound) + i
            for i, n in enumerate(dict.fromkeys(n for n in _names(v) if n.startswith("value.")))
        }
        for v in variants
    }
    size = len(bound) + max(len(slots) for slots in values.values())
    programs = {
        v.key: _link_one(v, bound | values[v.key], stages=stages, updates=updates) for v in variants
    }
    fixed = {n: i for n, i in bound.items() if not n.startswith("input.")}
    return Linked(table_size=size, bound=fixed, programs=programs)


def _names(variant: Variant) -> Iterable[str]:
    for step in variant.steps:
        yield from step.inputs
        yield from step.outputs if isinstance(step, LinkedCall) else ()


def _link_one(
    variant: Variant,
    slots: Mapping[str, int],
    *,
    stages: Mapping[str, int],
    updates: Mapping[str, int],
) -> LinkedProgram:
    dead = _dead_after(variant.steps, keep=variant.outputs)
    code: list[int] = []
    for step, names in zip(variant.steps, dead, strict=True):
        outputs = step.outputs if isinstance(step, LinkedCall) else ()
        code += (
            [stages[step.artifact], 0] if isinstance(step, LinkedCall) else [updates[step.op], 1]
        )
        for group in (step.inputs, outputs, names):
            code += [len(group), *(slots[name] for name in group)]
    inputs = tuple(dict.fromkeys(n for n in _names(variant) if n.startswith("input.")))
    return LinkedProgram(
        code=code,
        input_names=tuple(n.removeprefix("input.") for n in inputs),
        input_slots=[slots[n] for n in inputs],
        output_slots=[slots[n] for n in variant.outputs],
    )


def _dead_after(
    steps: Sequence[LinkedCall | LinkedUpdate], *, keep: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """For each step, the values that it touches last. A name that is written again stays alive."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        written = step.outputs if isinstance(step, LinkedCall) else ()
        last |= dict.fromkeys(
            (n for n in (*step.inputs, *written) if n.startswith("value.")), index
        )
    dead: list[list[str]] = [[] for _ in steps]
    for name, index in last.items():
        if name not in keep:
            dead[index].append(name)
    return [tuple(names) for names in dead]
