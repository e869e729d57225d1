"""Equality saturation with egglog, in bounds: are two lists of terms equal under the rules?"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trnc.equiv.rules import BACK, RULES, SCHEMA, SHAPES
from trnc.equiv.terms import Arena, Id, program_lines
from trnc.errors import TrncError

_OVERSHOOT = 4  # a round may grow the graph to so many times the limit


@dataclass(frozen=True, slots=True)
class Limits:
    """When to give up: nodes of the e-graph, seconds, rounds of all rules."""

    nodes: int = 30_000
    seconds: float = 10.0
    rounds: int = 12


@dataclass(frozen=True, slots=True)
class Saturation:
    """What a run came to. `fired` are the rules that matched anything; not all of them matter.

    `is_saturated`: no rule has anything left to add.
    """

    equal: tuple[bool, ...]
    fired: tuple[str, ...]
    nodes: int
    seconds: float
    is_saturated: bool


class EGraph:
    """The terms of an arena and what has been found equal among them."""

    def __init__(self, *, arena: Arena, rules: Collection[str] | None = None) -> None:
        """Load the terms; with `rules` only rules of these names, and no others, will run.

        Raises:
            TrncError: egglog is not installed.
        """
        self._bindings = _bindings()
        self._graph = self._bindings.EGraph()
        self._run(_theory(None if rules is None else frozenset(rules)))
        self._run("\n".join(program_lines(arena)))

    def saturate(self, pairs: Sequence[tuple[Id, Id]], limits: Limits) -> Saturation:
        """Apply the rules, round by round, until all pairs are equal or a limit is reached."""
        start, fired, is_saturated = time.perf_counter(), dict[str, None](), False
        nodes = self.size()

        def is_over(size: int) -> bool:
            return size > limits.nodes or time.perf_counter() - start > limits.seconds

        self._step("(saturate shapes)", fired)
        for _ in range(limits.rounds):
            # What only simplifies comes first, to its end: which a cycle of terms may not have.
            while self._step("(seq (run directed) (run shapes))", fired):
                if is_over(self.size()):
                    break
            before, nodes = nodes, self.size()
            # A round cannot be stopped, so one that would grow out of all bounds is not begun.
            growth = max(1.0, nodes / max(before, 1))
            if all(self.are_equal(a, b) for a, b in pairs):
                break
            if is_over(nodes) or nodes * growth > _OVERSHOOT * limits.nodes:
                break
            if is_saturated := not self._step("(run rules)", fired):
                break
        return Saturation(
            equal=tuple(self.are_equal(a, b) for a, b in pairs),
            fired=tuple(name for name in fired if not name.startswith("(rule")),
            nodes=self.size(),
            seconds=time.perf_counter() - start,
            is_saturated=is_saturated,
        )

    def _step(self, schedule: str, fired: dict[str, None]) -> bool:
        """Run a schedule, note the rules that matched, and return whether it changed anything."""
        (done,) = self._run(f"(run-schedule {schedule})")
        matches = done.report.num_matches_per_rule
        fired.update({name: None for name, count in matches.items() if count})
        return bool(done.report.updated)

    def are_equal(self, a: Id, b: Id) -> bool:
        """Whether two terms have been found equal."""
        return bool(self._value(a) == self._value(b))

    def matched(self, terms: Sequence[Id], others: Sequence[Id]) -> list[bool]:
        """Of each term, whether it equals any of the others."""
        values = [self._value(other) for other in others]
        return [any(self._value(term) == value for value in values) for term in terms]

    def size(self) -> int:
        """The number of nodes."""
        (sizes,) = self._run("(print-size)")
        return sum(count for name, count in sizes.sizes if name != "shape")

    def _value(self, term: Id) -> Any:
        span = self._bindings.PanicSpan()
        _, value = self._graph.eval_expr(self._bindings.Var(span, f"$t{term.number}"))
        return value

    def _run(self, text: str) -> Any:
        return self._graph.run_program(*_parsed(text))


def used_rules(
    arena: Arena, pairs: Sequence[tuple[Id, Id]], fired: Sequence[str], limits: Limits
) -> tuple[str, ...]:
    """Return rules that suffice for the proof, none of which it can do without."""
    names = list(dict.fromkeys(name.removesuffix(BACK) for name in fired))
    size = len(names)
    while size:
        for start in range(0, len(names), size):  # leave out many at once first
            rest = names[:start] + names[start + size :]
            if all(EGraph(arena=arena, rules=rest).saturate(pairs, limits).equal):
                names = rest
                break
        else:
            size //= 2
    return tuple(names)


@lru_cache(maxsize=64)
def _theory(names: frozenset[str] | None) -> str:
    rules = (rule for rule in RULES if names is None or rule.name in names)
    return "\n".join([SCHEMA, SHAPES, *(line for rule in rules for line in rule.commands())])


def _parsed(text: str) -> Any:
    return _bindings().EGraph().parse_program(text)


def _bindings() -> Any:
    try:
        import egglog.bindings
    except ImportError as error:
        raise TrncError(
            "proofs need egglog: pip install 'trnc[prove]' (or .[dev] in a checkout)"
        ) from error
    return egglog.bindings
