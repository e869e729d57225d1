"""MLIR's own Python bindings, as jax brings them. They have no types."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ir: Any = import_module("jax.extend.mlir.ir")
passmanager: Any = import_module("jax.extend.mlir.passmanager")
stablehlo: Any = import_module("jax.extend.mlir.dialects.stablehlo")
