"""What a whole step takes: the sizes of its variant, and the shape of each of its parameters.

A step is one module, a pure function: weights, state and inputs are parameters, what the host reads
and the new state are results. State is donated, so each of its results has its parameter's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trnc.compiler.backends.stablehlo.functions import Functions
from trnc.compiler.backends.stablehlo.graph import DTYPES, StageGraph, read_graph
from trnc.compiler.backends.stablehlo.parallel import WHOLE, split_of
from trnc.compiler.backends.stablehlo.weights import DeviceWeight, abstract_weight
from trnc.compiler.compile import TracedStage
from trnc.compiler.program import OVER_LOGITS, Program, ProgramConfig
from trnc.core import VariantKey
from trnc.errors import CompileError
from trnc.models.cache import cache_layout
from trnc.models.config import ModelConfig
from trnc.models.registry import build_stage
from trnc.models.stage import StageSpec, TensorSpec
from trnc.presets import Preset

RANK = "rank"
WIDE_INPUTS = ("seed",)  # 64 bits: two words, the high one first
_PER_TOKEN = {"input.prompt_rows", "input.targets"}  # rows of the stages that score a prompt
_PER_SEQUENCE = TensorSpec(("rows",), "int64")  # of inputs that only an update takes


@dataclass(frozen=True, slots=True)
class Parameter:
    """One array that a module takes or gives: what it is, and its dtype as numpy names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a step is static in: those of its variant, and those of the device state.

    `last_tokens` are the slots, and again for each draft. All of them are part of a module's key.
    """

    tokens: int
    rows: int
    logit_rows: int
    blocks: int
    slots: int
    last_tokens: int
    positions: int
    pages: int
    entries: int
    max_rows: int

    def resolve(self, spec: TensorSpec, *, over_logits: bool = False) -> tuple[int, ...]:
        """Return a shape with its named dimensions filled in; `over_logits`: rows are of logits."""
        rows = {"rows": "logit_rows"} if over_logits else {}
        sizes = (getattr(self, rows.get(d, d)) if isinstance(d, str) else d for d in spec.shape)
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Lowering:
    """A program with what it is lowered from: the functions that it calls, and the sizes.

    `whole` is the model of all cores together: weights are divided by its shape, while the graphs
    are those of one core.
    """

    config: ProgramConfig
    program: Program
    functions: Functions
    sizes: Sizes
    whole: ModelConfig

    @property
    def ranks(self) -> int:
        """How many cores share the model."""
        return self.config.preset.trainium.ranks


def sizes_of(key: VariantKey, preset: Preset, *, pages: int) -> Sizes:
    """Return the sizes of one variant; `key.context` is the most tokens of a sequence in it."""
    if key.context == 0:
        raise CompileError(f"variant {key} has no context bucket; this backend needs one")
    slots = preset.max_rows + 1
    return Sizes(
        tokens=key.tokens,
        rows=key.rows,
        logit_rows=key.logit_rows,
        blocks=-(-key.context // preset.page_size),
        slots=slots,
        last_tokens=slots * (1 + max(preset.mtp_depths, default=0)),
        positions=preset.positions,
        pages=pages,
        entries=key.penalties,
        max_rows=key.tokens if key.step == "prefill" else key.tokens // key.rows,
    )


def read_stages(traced: Mapping[StageSpec, TracedStage]) -> dict[StageSpec, StageGraph]:
    """Parse the graph of every stage."""
    return {spec: read_graph(spec.kind, stage.text) for spec, stage in traced.items()}


def packed_formats(
    programs: Sequence[Program], graphs: Mapping[StageSpec, StageGraph]
) -> dict[str, str]:
    """Return the packed format of every `weight.*` that the programs multiply with."""
    formats: dict[str, str] = {}
    for program in programs:
        for call in program.calls:
            for port, format in graphs[call.stage].packed.items():
                name = call.inputs[port]
                if formats.setdefault(name, format) != format:
                    raise CompileError(f"{name} is read as {formats[name]} and as {format}")
    return formats


# Parameters


def parameter_order(name: str) -> tuple[int, int, str]:
    """Weights, state, inputs; layers by number."""
    kinds = ("weight", "state", "input", RANK)
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return kinds.index(name.split(".", maxsplit=1)[0]), numbers[0] if numbers else -1, name


def parameter_specs(lowering: Lowering) -> dict[str, Any]:
    """Return the shape of every parameter by name; that of a packed weight is a `DeviceWeight`."""
    specs: dict[str, Any] = {}
    if lowering.ranks > 1:
        specs[RANK] = jax.ShapeDtypeStruct((1,), jnp.int32)
    for call in lowering.program.calls:
        ports = build_stage(call.stage).inputs.values()
        packed = lowering.functions.graphs[call.stage].packed
        for port, (name, spec) in enumerate(zip(call.inputs, ports, strict=True)):
            if name.startswith("value.") or name in specs:
                continue
            over_logits = call.stage.kind in OVER_LOGITS
            specs[name] = (
                _packed(lowering, name, spec, packed[port])
                if port in packed
                else _plain(lowering, name, spec, over_logits=over_logits)
            )
    for update in lowering.program.updates:
        for name in update.inputs:
            if name.startswith("input.") and name not in specs:
                specs[name] = _plain(lowering, name, _PER_SEQUENCE)
    state = _state_specs(lowering)
    used = [n for step in lowering.program.steps for n in step.inputs if n in state]
    return specs | {name: _plain(lowering, name, state[name]) for name in used}


def _state_specs(lowering: Lowering) -> dict[str, TensorSpec]:
    """Return every tensor of the device state, as `trnc.runtime.state` allocates them."""
    model, preset = lowering.config.model, lowering.config.preset
    layout = cache_layout(model, preset.kv_dtype, preset.page_size)
    return {
        "state.last_tokens": TensorSpec(("last_tokens",), "int64"),
        "state.lengths": TensorSpec(("slots",), "int64"),
        "state.mtp_states": TensorSpec(("slots", model.hidden_size)),
    } | {
        f"state.{name}.{index}": spec
        for index in range(model.num_layers + model.mtp_layers)
        for name, spec in layout.pages.items()
    }


def _packed(lowering: Lowering, name: str, spec: TensorSpec, format: str) -> DeviceWeight:
    split = split_of(name, lowering.whole) if lowering.ranks > 1 else WHOLE
    # Graphs are those of one core: its columns and heads are declared. Rows, experts and the
    # vocabulary are divided here, since what is padded, routed to or sampled from is whole.
    is_local = split.kind == "columns" or name.rsplit(".", 1)[-1] in ("k_up", "v_up")
    shape = tuple(int(d) for d in spec.shape)
    return abstract_weight(shape, format, split, 1 if is_local else lowering.ranks)


def _plain(
    lowering: Lowering, name: str, spec: TensorSpec, *, over_logits: bool = False
) -> jax.ShapeDtypeStruct:
    shape = lowering.sizes.resolve(spec, over_logits=over_logits)
    if name in _PER_TOKEN:
        shape = (lowering.sizes.tokens,)
    if name.removeprefix("input.") in WIDE_INPUTS:
        return jax.ShapeDtypeStruct((*shape, 2), jnp.uint32)
    return jax.ShapeDtypeStruct(shape, device_dtype(spec.dtype))


def device_dtype(torch_name: str) -> Any:
    """Return what a torch dtype is on the device."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
    if torch_name == "bool":
        return DTYPES["bool"]
    letters = torch_name.rstrip("0123456789")
    return DTYPES[short[letters] + torch_name.removeprefix(letters)]


def named_arrays(specs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return every array of these values with its name, that of a part of a packed weight too."""
    flat = []
    for name in names:
        spec = specs[name]
        parts = spec.parts if isinstance(spec, DeviceWeight) else {"": spec}
        flat += [(f"{name}:{part}" if part else name, parts[part]) for part in parts]
    return flat


def unflatten(
    specs: Mapping[str, Any], names: Sequence[str], arrays: Sequence[Any]
) -> dict[str, Any]:
    """Return the values by name, given what stands for each of `named_arrays`."""
    left = iter(arrays)
    values: dict[str, Any] = {}
    for name in names:
        spec = specs[name]
        if isinstance(spec, DeviceWeight):
            parts = {part: next(left) for part in spec.parts}
            values[name] = DeviceWeight(parts, spec.format, spec.split)
        else:
            values[name] = next(left)
    return values
