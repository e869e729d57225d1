"""MLIR's own Python bindings, as jax brings them, which have no types; and modules as texts."""

from __future__ import annotations

from collections.abc import Container, Iterator
from importlib import import_module
from typing import Any

from jax.interpreters import mlir

ir: Any = import_module("jax.extend.mlir.ir")
passmanager: Any = import_module("jax.extend.mlir.passmanager")
stablehlo: Any = import_module("jax.extend.mlir.dialects.stablehlo")

_FUNCTION = "  func.func "


def canonical_text(module: Any) -> str:
    """Return the text of a module without debug information. The module is changed."""
    with module.context:
        strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        strip.run(module.operation)
        text = str(module.operation.get_asm(enable_debug_info=False))
    return text.rstrip("\n") + "\n"


def split_functions(text: str) -> list[str]:
    """Return the text of each function of a module, in order."""
    _, *functions = text.rstrip("\n").removesuffix("}").split(f"\n{_FUNCTION}")
    return [f"{_FUNCTION}{function}" for function in functions]


def parse_functions(text: str, known: Container[str]) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a module that are not `known`, each as its text and as MLIR has it.

    Those that are known are only declared, which costs little.
    """
    functions = split_functions(text)
    parts = [f.split(" {\n", maxsplit=1)[0] if f in known else f for f in functions]
    with mlir.make_ir_context() as context:
        module = ir.Module.parse("module {\n" + "\n".join(parts) + "\n}", context)
        for function, op in zip(functions, module.body.operations, strict=True):
            if function not in known:
                yield function, op
