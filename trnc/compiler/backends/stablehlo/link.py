"""A variant's module, put together from functions that are lowered once for all of them.

A step calls functions and computes nothing itself, so its own text is written here, in the form
that MLIR prints; the tests hold it against what jax lowers the whole step to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from trnc.compiler.backends.stablehlo.functions import Function
from trnc.compiler.backends.stablehlo.module import Interface, Module
from trnc.compiler.backends.stablehlo.site import Site
from trnc.compiler.backends.stablehlo.step import (
    RANK,
    Lowering,
    Parameter,
    named_arrays,
    parameter_order,
    parameter_specs,
    unflatten,
)
from trnc.compiler.program import Call, Update

_HEAD = (
    "module @jit_step attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {\n"
)
_TYPES = {
    jnp.dtype(jnp.bool_): "i1",
    jnp.dtype(jnp.uint8): "ui8",
    jnp.dtype(jnp.int32): "i32",
    jnp.dtype(jnp.uint32): "ui32",
    jnp.dtype(jnp.float16): "f16",
    jnp.dtype(jnp.bfloat16): "bf16",
    jnp.dtype(jnp.float32): "f32",
}


def lower_step(lowering: Lowering) -> Module:
    """Lower one variant with abstract arguments: nothing is computed or allocated.

    Raises:
        CompileError: an op of a stage, or an update, that the tables do not have.
    """
    specs = parameter_specs(lowering)
    names = sorted(specs, key=parameter_order)
    arrays = named_arrays(specs, names)
    parameters = tuple(Parameter(name, str(spec.dtype), spec.shape) for name, spec in arrays)
    results = (*lowering.program.outputs, *_written(lowering))
    places = {parameter.name: place for place, parameter in enumerate(parameters)}
    aliases = tuple((i, places[n]) for i, n in enumerate(results) if n.startswith("state."))
    arguments = [f"%arg{place}" for place in range(len(parameters))]
    main = _Main(lowering, dict(specs), unflatten(specs, names, arguments))
    for step in lowering.program.steps:
        main.call(step)
    shapes = [spec for _, spec in arrays], [main.specs[name] for name in results]
    lines = [_HEAD, _signature(*shapes, aliases), *main.lines, main.returned(results), "  }\n"]
    lines += [function.text(symbol) for function, symbol in main.symbols.items()]
    interface = Interface(parameters, results, aliases, lowering.ranks)
    return Module("".join((*lines, "}\n")), interface)


@dataclass(frozen=True, slots=True)
class _Main:
    """The calls of a step. `specs` are the shapes and `values` the names of all values so far;
    those of a packed weight are a `DeviceWeight` of such.
    """

    lowering: Lowering
    specs: dict[str, Any]
    values: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    symbols: dict[Function, str] = field(default_factory=dict)

    def call(self, step: Call | Update) -> None:
        """Add one step: its results are values from now on."""
        lowering = self.lowering
        site = Site(
            lowering.sizes.max_rows,
            ranks=lowering.ranks,
            matmul=lowering.config.preset.trainium.matmul,
        )
        what = step.stage if isinstance(step, Call) else step.op
        outputs = step.outputs if isinstance(step, Call) else _state(step)
        specs, values = self._inputs(self.specs, step), self._inputs(self.values, step)
        function = lowering.functions.lower(what, site, specs)
        result = f"%{len(self.lines)}"
        several = len(function.results) > 1
        self.lines.append(
            f"    {result}{f':{len(function.results)}' * several} = call @{self._symbol(function)}"
            f"({', '.join(jax.tree.leaves(values))}) : "
            f"({', '.join(map(_type, jax.tree.leaves(specs)))}) -> {_types(function.results)}\n"
        )
        given = [f"{result}{f'#{i}' * several}" for i in range(len(function.results))]
        self.specs.update(zip(outputs, function.results, strict=True))
        self.values.update(zip(outputs, given, strict=True))

    def returned(self, results: Sequence[str]) -> str:
        """Return the line that ends the step."""
        types = ", ".join(_type(self.specs[name]) for name in results)
        return f"    return {', '.join(self.values[name] for name in results)} : {types}\n"

    def _inputs(self, of: dict[str, Any], step: Call | Update) -> tuple[Any, ...]:
        return (of.get(RANK), *(of[name] for name in step.inputs))

    def _symbol(self, function: Function) -> str:
        """A function's name in this module: its own, or with a number where that is taken."""
        if function not in self.symbols:
            same = sum(other.name == function.name for other in self.symbols)
            self.symbols[function] = f"{function.name}{f'_{same}' * bool(same)}"
        return self.symbols[function]


def _signature(
    parameters: Sequence[Any], results: Sequence[Any], aliases: Sequence[tuple[int, int]]
) -> str:
    """The first line of the step, which says which results have the memory of a parameter."""
    taken = [f"%arg{place}: {_type(parameter)}" for place, parameter in enumerate(parameters)]
    for result, parameter in aliases:
        taken[parameter] += f" {{tf.aliasing_output = {result} : i32}}"
    given = [f'{_type(r)} {{jax.result_info = "result[{i}]"}}' for i, r in enumerate(results)]
    return f"  func.func public @main({', '.join(taken)}) -> ({', '.join(given)}) {{\n"


def _types(specs: Sequence[Any]) -> str:
    types = ", ".join(map(_type, specs))
    return types if len(specs) == 1 else f"({types})"


def _type(spec: Any) -> str:
    """A type as MLIR prints it."""
    return f"tensor<{''.join(f'{size}x' for size in spec.shape)}{_TYPES[spec.dtype]}>"


def _state(update: Update) -> tuple[str, ...]:
    return tuple(name for name in update.inputs if name.startswith("state."))


def _written(lowering: Lowering) -> list[str]:
    return list(dict.fromkeys(n for update in lowering.program.updates for n in _state(update)))
