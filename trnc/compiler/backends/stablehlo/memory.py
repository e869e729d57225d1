"""How much memory a core needs: weights, KV pages, and the largest values inside a step.

The compiler alone knows what a step's buffers take. The estimate is what must be there in any case:
parameters (results share their memory), plus the largest sum of one operation's operands and
results, among values of more than a page that are no parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from trnc.compiler.backends.stablehlo.mlir import ir, parse_functions, split_functions
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.targets import NeuronTarget
from trnc.compiler.program import ProgramConfig
from trnc.errors import ConfigError
from trnc.models.cache import cache_layout

_MIB = 1 << 20
_KV_SHARE = 0.5  # of a core's memory, where the preset names no size


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on one core. `limit` is what it has."""

    weights: int
    state: int
    inputs: int
    buffers: int
    limit: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.state + self.inputs + self.buffers


def count_pages(config: ProgramConfig, target: NeuronTarget) -> int:
    """Return the KV pages of one core, page 0 included: a static size of every module.

    As many as all contexts take, but at most `kv_memory_mib`, or half of the core's memory.

    Raises:
        ConfigError: not even one page fits.
    """
    model, preset = config.model, config.preset
    layout = cache_layout(model, preset.kv_dtype, preset.page_size)
    page = (model.num_layers + model.mtp_layers) * layout.page_bytes
    full = preset.max_rows * preset.max_pages
    limit = preset.kv_memory_mib * _MIB or int(target.memory(preset.trainium.lnc) * _KV_SHARE)
    pages = min(full, limit // page)
    if pages < 1:
        raise ConfigError(
            f"preset '{preset.name}': one KV page of this model takes {page / _MIB:.1f} MiB, and "
            f"'kv_memory_mib' allows {limit / _MIB:.0f} MiB; raise it"
        )
    return pages + 1


def hbm_need(
    module: Module, target: NeuronTarget, lnc: int = 0, known: dict[str, int] | None = None
) -> Need:
    """Return what a module needs of one core; `lnc` 0: the largest that the target has.

    `known` keeps the largest value of each private function, by its text.
    """
    sizes = {"weight": 0, "state": 0, "input": 0, "rank": 0}
    for parameter in module.interface.parameters:
        sizes[parameter.name.split(".", 1)[0]] += parameter.size
    return Need(
        weights=sizes["weight"],
        state=sizes["state"],
        inputs=sizes["input"] + sizes["rank"],
        buffers=_largest_value(module.text, {} if known is None else known),
        limit=target.memory(lnc or max(target.lnc)),
    )


def _largest_value(text: str, known: dict[str, int]) -> int:
    """Return the most bytes that one op of a function reads and writes beside parameters.

    The step itself only calls functions.
    """
    main, *private = split_functions(text)
    if any(function not in known for function in private):
        functions = parse_functions(text, known)
        known.update((function, _largest_of(op)) for function, op in functions if function != main)
    return max(known[function] for function in private)


def _largest_of(function: Any) -> int:
    largest = 0
    for op in function.regions[0].blocks[0].operations:
        if op.operation.name in ("func.call", "func.return"):
            continue
        values = [v for v in op.operands if not isinstance(v.owner, ir.Block)]
        largest = max(largest, sum(_bytes(v.type) for v in (*values, *op.results)))
    return largest


def _bytes(type: Any) -> int:
    if not isinstance(type, ir.RankedTensorType):
        return 0
    element = type.element_type
    bits = element.width if hasattr(element, "width") else 32
    return int(prod(type.shape)) * max(bits // 8, 1)
