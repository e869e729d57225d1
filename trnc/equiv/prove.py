"""Do two stage graphs compute the same function? Proved, refuted, or unknown.

1. Graphs with other inputs or outputs are refuted at once.
2. Both are run in f64 on the same random inputs. A difference beyond rounding is a refutation, and
   the inputs are the proof of it.
3. Otherwise an e-graph looks for a proof: both graphs as terms over the same inputs, and rewrite
   rules until the outputs are one (`trnc.equiv.rules`).

What is proved is equality over the reals. What f32 makes of it is measured beside it: how far each
graph in f32 is from the first in f64. The first graph's own distance cannot be avoided, so the
second's is given in multiples of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trnc.equiv.draw import DRAWS, SCALES, Draw, attempts, draw_inputs
from trnc.equiv.egraph import EGraph, Limits, used_rules
from trnc.equiv.evaluate import CannotEvaluate, evaluate
from trnc.equiv.lower import graph_inputs, lower_all
from trnc.equiv.terms import Arena, Id
from trnc.equiv.text import Graph, parse

Verdict = Literal["proved", "refuted", "unknown"]

TOLERANCE = 1e-9  # of a difference in f64, relative to the largest magnitude of an output
MAX_RATIO = 8.0  # of the second graph's error in f32 to the first one's
_FLOOR = 1e-7  # f32's own resolution: errors below it are not told apart


@dataclass(frozen=True, slots=True)
class Gate:
    """Errors in f32 relative to f64, as a share of an output's largest magnitude."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The second error in multiples of the first, both at least f32's resolution."""
        return max(self.after, _FLOOR) / max(self.before, _FLOOR)

    @property
    def is_open(self) -> bool:
        """Whether the second graph is about as exact as the first."""
        return self.ratio <= MAX_RATIO


@dataclass(frozen=True, slots=True)
class Proof:
    """The answer. `reason` is for people: what was shown, and by which inputs.

    `rules` suffice for the proof and none can be left out; empty where the texts are equal.
    `stuck` are lines of the second graph that match nothing in the first though their operands do.
    `nodes` and `seconds` are the e-graph's.
    """

    verdict: Verdict
    reason: str
    rules: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    gate: Gate | None = None
    nodes: int = 0
    seconds: float = 0.0


def prove(before: str, after: str, *, limits: Limits | None = None, explain: bool = True) -> Proof:
    """Compare two canonical texts.

    With `explain` a proof names the rules that it needs, which takes some more runs.

    Raises:
        TrncError: a text cannot be parsed, or egglog is not installed.
    """
    old, new = parse(before), parse(after)
    if _function(old) == _function(new):
        return Proof("proved", "the texts are equal")
    if (difference := _interface(old, new)) is not None:
        return Proof("refuted", difference)
    numbers = compare_numbers(old, new)
    if numbers.difference is not None:
        return Proof("refuted", numbers.difference)
    proof = _by_rules(old, new, limits or Limits(), explain=explain)
    if proof.verdict == "unknown" and numbers.not_run:
        proof = replace(proof, reason=f"{proof.reason}; {numbers.not_run}")
    return replace(proof, gate=numbers.gate)


def format_proof(title: str, proof: Proof) -> str:
    """Return the answer for people."""
    lines = [f"{title}: {proof.verdict}, {proof.reason}"]
    if proof.rules:
        lines.append(f"  by {', '.join(proof.rules)} ({proof.nodes} nodes, {proof.seconds:.2f} s)")
    lines += [f"  matches nothing before: {line}" for line in proof.stuck]
    if proof.gate is not None:
        word = "as exact as before" if proof.gate.is_open else "LESS EXACT than before"
        lines.append(
            f"  in f32: {word}, error {proof.gate.after:.1e} and {proof.gate.before:.1e} before"
        )
    return "\n".join(lines)


def _function(graph: Graph) -> Graph:
    """A graph without the torch that traced it."""
    return replace(graph, torch="")


def _interface(old: Graph, new: Graph) -> str | None:
    """Say how the inputs or outputs differ."""
    if len(old.inputs) != len(new.inputs):
        return f"{len(old.inputs)} inputs became {len(new.inputs)}"
    for a, b in zip(old.inputs, new.inputs, strict=True):
        if a.type != b.type:
            return f"input {a.name} is {a.type} before and {b.type} after"
    if old.ranges != new.ranges:
        return f"the sizes have other bounds: {old.ranges} before, {new.ranges} after"
    if len(old.outputs) != len(new.outputs):
        return f"{len(old.outputs)} outputs became {len(new.outputs)}"
    return None


# Numbers


@dataclass(frozen=True, slots=True)
class Numbers:
    """What running both graphs shows. `not_run` says why they were not run."""

    difference: str | None = None
    gate: Gate | None = None
    not_run: str = ""


def compare_numbers(old: Graph, new: Graph) -> Numbers:
    """Run both graphs on the same random inputs, at every scale of activations."""
    gates = []
    for seed in range(DRAWS):
        try:
            found = _run_first(old, seed)
        except CannotEvaluate as error:
            return Numbers(not_run=f"it was not run: {error}")
        if found is None:
            return Numbers(not_run="no random input was found on which it runs")
        draw, expected = found
        shown = f"the random input {seed} (sizes {dict(draw.sizes)})"
        try:
            results = evaluate(new, draw.inputs, draw.sizes, torch.float64)
        except CannotEvaluate as error:
            return Numbers(not_run=f"it was not run: {error}")
        except (RuntimeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            return Numbers(f"the second graph fails on {shown}: {reason}")
        if (difference := output_difference(expected, results)) is not None:
            return Numbers(f"{difference}, on {shown}")
        if seed < len(SCALES):
            gates.append(_gate(old, new, draw, expected))
    return Numbers(gate=max(gates, key=lambda gate: gate.ratio))


def _run_first(graph: Graph, seed: int) -> tuple[Draw, list[Tensor]] | None:
    """Find an input that the graph accepts, and its outputs in f64."""
    for attempt in range(attempts()):
        draw = draw_inputs(graph, seed, attempt)
        try:
            return draw, evaluate(graph, draw.inputs, draw.sizes, torch.float64)
        except (RuntimeError, IndexError):
            continue
    return None


def output_difference(expected: Sequence[Tensor], results: Sequence[Tensor]) -> str | None:
    """Say where two lists of outputs in f64 differ by more than rounding; None if nowhere."""
    for index, (a, b) in enumerate(zip(expected, results, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            types = (f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (a, b))
            return f"output {index} is {' before and '.join(types)} after"
        if a.numel() and (error := relative_error(a, b)) > TOLERANCE:
            return f"output {index} differs by {error:.2g} of its largest magnitude"
    return None


def relative_error(expected: Tensor, result: Tensor) -> float:
    """The largest difference as a share of the largest finite magnitude expected."""
    a, b = expected.double(), result.double()
    both = a.isfinite() & b.isfinite()
    if not torch.equal(a[~both], b[~both]) and not _alike(a[~both], b[~both]):
        return float("inf")
    if not both.any():
        return 0.0
    size = a[both].abs().max().clamp(min=1e-300)
    return float((a[both] - b[both]).abs().max() / size)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether infinities and NaN are at the same places."""
    return torch.allclose(a, b, equal_nan=True)


def _gate(old: Graph, new: Graph, draw: Draw, expected: Sequence[Tensor]) -> Gate:
    errors = []
    for graph in (old, new):
        results = evaluate(graph, draw.inputs, draw.sizes, torch.float32)
        floats = [(a, b) for a, b in zip(expected, results, strict=True) if a.is_floating_point()]
        errors.append(max((relative_error(a, b) for a, b in floats if a.numel()), default=0.0))
    return Gate(*errors)


# Rules


def _by_rules(old: Graph, new: Graph, limits: Limits, *, explain: bool) -> Proof:
    arena = Arena()
    inputs = graph_inputs(old, arena)
    left, outputs = lower_all(old, arena, inputs)
    right, results = lower_all(new, arena, inputs)
    pairs = tuple(zip(outputs, results, strict=True))
    graph = EGraph(arena=arena)
    run = graph.saturate(pairs, limits)
    if all(run.equal):
        rules = used_rules(arena, pairs, run.fired, limits) if explain else run.fired
        reason = "the outputs are equal over the reals"
        return Proof("proved", reason, rules, nodes=run.nodes, seconds=run.seconds)
    unequal = [str(i) for i, is_equal in enumerate(run.equal) if not is_equal]
    end = "no rule applies any more" if run.is_saturated else "the limit was reached"
    return Proof(
        "unknown",
        f"not proved for output {', '.join(unequal)}: {end} at {run.nodes} nodes",
        stuck=_stuck(graph, new, left, right),
        nodes=run.nodes,
        seconds=run.seconds,
    )


def _stuck(
    graph: EGraph, new: Graph, left: dict[str, tuple[Id, ...]], right: dict[str, tuple[Id, ...]]
) -> tuple[str, ...]:
    """Lines of the new graph that match nothing of the old one, though all their operands do."""
    known = list(dict.fromkeys(term for terms in left.values() for term in terms))
    matches = {name: all(graph.matched(terms, known)) for name, terms in right.items()}
    return tuple(
        f"{v.name}: {v.type} = {v.expression.render({})}"
        for v in new.nodes
        if v.expression and not matches[v.name] and all(matches[o] for o in v.expression.operands)
    )
