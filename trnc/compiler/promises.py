"""What the product promises of its graphs, proved for every variant of a configuration.

1. A variant with features, given the inputs of requests that use none of them, picks the tokens
   and leaves the state of the variant without them.
2. A layer computes one function of a position, whatever the step: a token row of `decode`,
   `verify` or `prefill` is the layer of one token, in the context that the row attends in. That is
   proved with symbolic buckets, which covers every bucket at once, and for the graph of each
   static bucket.

Programs are compared stage by stage: a stage that both programs call is a function that needs no
looking into, the others are opened. So thirty equal layers cost nothing, and equal pairs of
programs are proved once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from trnc.compiler.canonical import canonical_text
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import Call, Program, ProgramConfig, build_program, distinct_specs
from trnc.compiler.trace import trace_stage
from trnc.core import VariantKey
from trnc.equiv.calls import parse_types
from trnc.equiv.egraph import EGraph, Limits
from trnc.equiv.lower import lower_all
from trnc.equiv.terms import Arena, Context, Id, Terms
from trnc.equiv.text import Graph, parse
from trnc.models.cache import cache_layout
from trnc.models.layer import layer_weights
from trnc.models.registry import build_stage
from trnc.models.stage import StageSpec

# What the host gives for a request that does not use a feature.
NEUTRAL: Mapping[str, float] = {"bias_ids": -1, "bias_values": 0}

_LAYERS = ("layer", "moe_layer")


@dataclass(frozen=True, slots=True)
class Promise:
    """One proved or unproved statement. `rules` are those that matched anything."""

    statement: str
    is_proved: bool
    rules: tuple[str, ...] = ()


class Promises:
    """Proves what is asked of it once: stages are traced and pairs compared one time."""

    def __init__(self, *, limits: Limits | None = None) -> None:
        """Start with nothing known."""
        self._limits = limits or Limits()
        self._texts: dict[StageSpec, str] = {}
        self._graphs: dict[str, Graph] = {}
        self._proofs: dict[object, Promise] = {}

    def of(self, config: ProgramConfig) -> Iterator[Promise]:
        """Yield every promise of a configuration, proved or not."""
        yield from self._features(config)
        yield from self._positions(config)

    def _features(self, config: ProgramConfig) -> Iterator[Promise]:
        keys = variant_matrix(config.preset)
        for key in keys:
            plain = without_features(key)
            if plain != key:
                pair = (build_program(config, key), build_program(config, plain))
                statement = f"{key} with neutral inputs is {plain}"
                yield self._once(pair, statement, partial(self._programs, *pair))

    def _positions(self, config: ProgramConfig) -> Iterator[Promise]:
        plain = [key for key in variant_matrix(config.preset) if without_features(key) == key]
        for is_static in (False, True):
            form = replace(config, static_buckets=is_static)
            steps: dict[StageSpec, dict[str, None]] = {}
            for key in plain:
                for spec in distinct_specs(iter([build_program(form, key)])):
                    if spec.kind in _LAYERS:
                        name = str(key).partition("/")[0] if is_static else key.step
                        steps.setdefault(spec, {})[name] = None
            for spec, names in steps.items():
                size = "" if is_static else " in any bucket"
                statement = f"{spec.kind}, a row of {', '.join(names)}{size} is a step of one token"
                yield self._once(spec, statement, partial(self._row, spec))

    def _once(
        self, subject: object, statement: str, proof: Callable[[], tuple[bool, tuple[str, ...]]]
    ) -> Promise:
        if subject not in self._proofs:
            self._proofs[subject] = Promise(statement, *proof())
        return replace(self._proofs[subject], statement=statement)

    # One program is another

    def _programs(self, program: Program, plain: Program) -> tuple[bool, tuple[str, ...]]:
        specs, others = (set(distinct_specs(iter([p]))) for p in (program, plain))
        shared = specs & others
        arena = Arena()
        results = [self._run(arena, p, shared) for p in (program, plain)]
        left, right = results
        return self._decide(arena, [(left[name], right[name]) for name in sorted(right)])

    def _run(self, arena: Arena, program: Program, shared: set[StageSpec]) -> dict[str, Id]:
        """Return the outputs of a program and the state that it leaves, by name."""
        values = _Values(arena)
        for step in program.steps:
            if not isinstance(step, Call):
                values.update(step.op, step.inputs)
            elif step.stage in shared:
                values.call_whole(self.text(step.stage), step)
            else:
                graph = self.graph(step.stage)
                inputs = values.inputs(step, graph)
                _, outputs = lower_all(graph, arena, inputs)
                values.known.update(zip(step.outputs, outputs, strict=True))
        kept = (*program.outputs, *values.written)
        return {name: values.known[name] for name in kept}

    # A row of a layer is the layer of one row

    def _row(self, spec: StageSpec) -> tuple[bool, tuple[str, ...]]:
        one = replace(spec, tokens=1, rows=1)
        step, single = self.graph(spec), self.graph(one)
        arena = Arena()
        terms = _input_terms(arena, step)
        _, outputs = lower_all(step, arena, tuple(terms))
        ports = list(build_stage(spec).inputs)
        context = [*cache_layout(spec.model, spec.kv_dtype, spec.page_size).pages]
        context += ["block_tables", "sequences"]
        by_port = dict(zip(ports, terms, strict=True))
        at = Context(Terms(tuple(outputs[1:])), Terms(tuple(by_port[port] for port in context)))
        alone = [
            arena.make("Item", at, context.index(port))
            if port in context
            else term
            if port in layer_weights(spec)
            else arena.make("Row", term)
            for port, term in by_port.items()
        ]
        _, results = lower_all(single, arena, tuple(alone))
        rows = [arena.make("Row", output) for output in outputs]
        return self._decide(arena, list(zip(rows, results, strict=True)))

    def _decide(self, arena: Arena, pairs: Sequence[tuple[Id, Id]]) -> tuple[bool, tuple[str, ...]]:
        run = EGraph(arena=arena).saturate(pairs, self._limits)
        if not all(run.equal):
            return False, ()
        return True, run.fired

    def text(self, spec: StageSpec) -> str:
        """The canonical text of a stage, traced once."""
        if spec not in self._texts:
            self._texts[spec] = canonical_text(trace_stage(spec))
        return self._texts[spec]

    def graph(self, spec: StageSpec) -> Graph:
        """The graph of a stage."""
        return parse(self.text(spec))


def without_features(key: VariantKey) -> VariantKey:
    """The variant of the same bucket and sampling mode with every feature off."""
    off: dict[str, Any] = {f.name: False for f in fields(key) if isinstance(f.default, bool)}
    return replace(key, **off)


def _input_terms(arena: Arena, graph: Graph) -> list[Id]:
    return [arena.make("In", index) for index in range(len(graph.inputs))]


class _Values:
    """The values of a program by name, as terms."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.known: dict[str, Id] = {}
        self.written: dict[str, None] = {}  # names of the state

    def get(self, name: str) -> Id:
        """A value; one that the program is given is a term of its own."""
        if name not in self.known:
            self.known[name] = self.arena.make("Op", name, Terms(()), Terms(()))
        return self.known[name]

    def inputs(self, call: Call, graph: Graph) -> tuple[Id, ...]:
        """The operands of a call; those of features are the neutral ones."""
        terms = []
        for name, value in zip(call.inputs, graph.inputs, strict=True):
            port = name.removeprefix("input.")
            if name.startswith("input.") and port in NEUTRAL:
                shape = parse_types(value.type)[0].shape
                literal = self.arena.literal(NEUTRAL[port])
                terms.append(self.arena.make("Expand", literal, shape, shape=shape))
            else:
                terms.append(self.get(name))
        return tuple(terms)

    def call_whole(self, text: str, call: Call) -> None:
        """A stage that both programs call is a function of its operands."""
        operands = Terms(tuple(self.get(name) for name in call.inputs))
        op = self.arena.make("Op", text, Terms(()), operands)
        for index, name in enumerate(call.outputs):
            self.known[name] = self.arena.make("Get", op, index)

    def update(self, op: str, names: Sequence[str]) -> None:
        """A write to the state: every state it takes may be another one afterwards."""
        operands = Terms(tuple(self.get(name) for name in names))
        term = self.arena.make("Op", f"update {op}", Terms(()), operands)
        for index, name in enumerate(names):
            if name.startswith("state."):
                self.known[name] = self.arena.make("Get", term, index)
                self.written[name] = None
