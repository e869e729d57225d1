"""A step as jax lowers it whole, with nothing kept from before: what a linked module must be."""

from __future__ import annotations

import re
from typing import Any

import jax

from trnc.compiler.backends.stablehlo.mlir import canonical_text
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.site import Site
from trnc.compiler.backends.stablehlo.step import (
    RANK,
    Lowering,
    named_arrays,
    parameter_order,
    parameter_specs,
    unflatten,
)
from trnc.compiler.program import Call


def lower_whole(lowering: Lowering, module: Module) -> str:
    """Lower the step of `module` as one jax function that calls its stages in turn."""
    specs = parameter_specs(lowering)
    names = sorted(specs, key=parameter_order)
    matmul = lowering.config.preset.trainium.matmul
    site = Site(lowering.sizes.max_rows, ranks=lowering.ranks, matmul=matmul)

    def step(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        values: dict[str, Any] = unflatten(specs, names, arrays)
        for call in lowering.program.steps:
            what = call.stage if isinstance(call, Call) else call.op
            if what not in functions:
                functions[what] = lowering.functions.traceable(what, site)
            given = functions[what](values.get(RANK), *(values[n] for n in call.inputs))
            state = [name for name in call.inputs if name.startswith("state.")]
            outputs = call.outputs if isinstance(call, Call) else state
            values |= zip(outputs, given, strict=True)
        return tuple(values[name] for name in module.interface.results)

    functions: dict[object, Any] = {}
    donated = tuple(parameter for _, parameter in module.interface.aliases)
    shapes = [spec for _, spec in named_arrays(specs, names)]
    jitted = jax.jit(step, donate_argnums=donated, keep_unused=True)
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("cpu",))
    return _numbered(canonical_text(lowered.compiler_ir("stablehlo")))


def _numbered(text: str) -> str:
    """Give functions that share a name numbers from 1; jax counts what it lowered before, too."""
    seen: dict[str, list[str]] = {}
    for symbol in re.findall(r"func\.func private @(\w+)\(", text):
        seen.setdefault(re.sub(r"_\d+$", "", symbol), []).append(symbol)
    new = {
        symbol: f"{kind}_{number}" if number else kind
        for kind, symbols in seen.items()
        for number, symbol in enumerate(symbols)
    }
    return re.sub(r"@(\w+)\(", lambda m: f"@{new.get(m[1], m[1])}(", text)
