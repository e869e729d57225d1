"""Stages and updates as private functions of StableHLO, each lowered once.

Variants differ in what they call far more than in the functions themselves, so a function is kept
by what it is and by the shapes of its inputs, and every module that calls it has the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from trnc.compiler.backends.stablehlo.attention import UPDATES
from trnc.compiler.backends.stablehlo.graph import Argument, StageGraph, stage_function
from trnc.compiler.backends.stablehlo.mlir import canonical_text
from trnc.compiler.backends.stablehlo.site import Site
from trnc.compiler.backends.stablehlo.table import TABLE
from trnc.errors import CompileError
from trnc.models.stage import StageSpec

_PRIVATE = "  func.func private @"


@dataclass(frozen=True, slots=True)
class Function:
    """`name` is the stage's kind or the update's; `body` is the function's text after its name.

    `results` are the shapes of what it gives.
    """

    name: str
    body: str
    results: tuple[jax.ShapeDtypeStruct, ...]

    def text(self, symbol: str) -> str:
        """Return the function as a module has it, under this name."""
        return f"{_PRIVATE}{symbol}{self.body}"


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a configuration; what was lowered once is kept."""

    graphs: Mapping[StageSpec, StageGraph]
    _lowered: dict[object, Function] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def lower(self, what: StageSpec | str, site: Site, inputs: Sequence[Any]) -> Function:
        """Return a stage, or an update by name, for inputs of these shapes; see `traceable`.

        Raises:
            CompileError: an op of the stage, or the update, is in no table.
        """
        leaves, tree = jax.tree.flatten(inputs)
        key = (what, site, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._lowered:
            self._lowered[key] = _lower(self.traceable(what, site), inputs)
        return self._lowered[key]

    def traceable(self, what: StageSpec | str, site: Site) -> Any:
        """Return a stage or an update as a jax function of the rank (or None) and its inputs."""
        if isinstance(what, str):
            return _private(what, _update(what), site)
        return _private(what.kind, stage_function(self.graphs[what], TABLE), site)


def _lower(private: Any, inputs: Sequence[Any]) -> Function:
    def caller(*arguments: Any) -> tuple[jax.Array, ...]:
        result: tuple[jax.Array, ...] = private(*arguments)
        return result

    traced = jax.jit(caller, keep_unused=True).trace(*inputs)
    text = canonical_text(traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo"))
    _, *functions = text.removesuffix("}\n").split(_PRIVATE)
    if len(functions) != 1:
        raise CompileError(f"{private.__name__} is lowered to {len(functions)} functions, not one")
    name, bracket, rest = functions[0].partition("(")
    results = tuple(jax.ShapeDtypeStruct(r.shape, r.dtype) for r in traced.out_info)
    return Function(name, bracket + rest, results)


def _update(op: str) -> Callable[[Site, Sequence[Argument]], tuple[jax.Array, ...]]:
    if op not in UPDATES:
        raise CompileError(
            f"update '{op}': the Trainium backend has no lowering for it; add a row for it in "
            "trnc/compiler/backends/stablehlo/attention.py"
        )

    def update(site: Site, inputs: Sequence[Argument]) -> tuple[jax.Array, ...]:
        written: tuple[jax.Array, ...] = UPDATES[op](site, *inputs)
        return written

    return update


def _private(name: str, function: Callable[..., Any], site: Site) -> Any:
    """A stage or an update as a function of its own in the module."""

    def private(rank: jax.Array | None, *inputs: Argument) -> tuple[jax.Array, ...]:
        # jax.numpy is made of functions of its own, which are not to be functions of the module.
        with jax.disable_jit():
            result: tuple[jax.Array, ...] = function(replace(site, rank=rank), inputs)
        return result

    private.__name__ = private.__qualname__ = name
    return jax.jit(private)
