"""A whole step as one module: each distinct stage a private function, called once per layer.

The module is a pure function: weights, state and inputs are parameters, what the host reads and the
new state are results. State is donated, so each of its results has the memory of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from trnc.compiler.backends.stablehlo.attention import UPDATES
from trnc.compiler.backends.stablehlo.graph import (
    DTYPES,
    Argument,
    StageGraph,
    read_graph,
    stage_function,
)
from trnc.compiler.backends.stablehlo.parallel import WHOLE, split_of
from trnc.compiler.backends.stablehlo.site import Site
from trnc.compiler.backends.stablehlo.table import TABLE
from trnc.compiler.backends.stablehlo.weights import DeviceWeight, abstract_weight
from trnc.compiler.compile import TracedStage
from trnc.compiler.program import OVER_LOGITS, Call, Program, ProgramConfig, Update
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
class Functions:
    """The stages and updates as functions, each made once: jax traces one once for its shapes,
    however many variants call it.
    """

    graphs: Mapping[StageSpec, StageGraph]
    _made: dict[tuple[StageSpec | str, Site], Any] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def of(self, what: StageSpec | str, site: Site) -> Any:
        """Return a stage, or an update by name, as a function of the rank and its inputs.

        Raises:
            CompileError: an op of the stage, or the update, is in no table.
        """
        made = self._made.get((what, site))
        if made is None:
            made = (
                _private(what, _update(what), site)
                if isinstance(what, str)
                else _private(what.kind, stage_function(self.graphs[what], TABLE), site)
            )
            self._made[what, site] = made
        return made


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


@dataclass(frozen=True, slots=True)
class Step:
    """A step ready to lower: `function` takes arrays like `parameters`, donates those in
    `donated`, and gives `results`; `aliases` maps results to the parameters whose memory they get.
    """

    function: Callable[..., tuple[jax.Array, ...]]
    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]
    donated: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]


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


def build_step(lowering: Lowering) -> Step:
    """Return the step function of one variant.

    Raises:
        CompileError: an op of a stage, or an update, that the tables do not have.
    """
    specs = _specs(lowering)
    names = sorted(specs, key=_order)
    results = (*lowering.program.outputs, *_written(lowering.program))
    parameters = tuple(Parameter(n, str(s.dtype), s.shape) for n, s in _flat(specs, names))
    places = {parameter.name: place for place, parameter in enumerate(parameters)}
    aliases = tuple((i, places[n]) for i, n in enumerate(results) if n.startswith("state."))
    run = _runner(lowering)

    def step(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        values = _unflatten(specs, names, arrays)
        run(values)
        return tuple(values[name] for name in results)

    donated = tuple(parameter for _, parameter in aliases)
    return Step(step, parameters, results, donated, aliases)


def _runner(lowering: Lowering) -> Callable[[dict[str, Any]], None]:
    matmul = lowering.config.preset.trainium.matmul
    site = Site(lowering.sizes.max_rows, ranks=lowering.ranks, matmul=matmul)
    steps = [
        (lowering.functions.of(step.stage, site), step.inputs, step.outputs)
        if isinstance(step, Call)
        else (lowering.functions.of(step.op, site), step.inputs, _state(step))
        for step in lowering.program.steps
    ]

    def run(values: dict[str, Any]) -> None:
        rank = values.get(RANK)
        for function, inputs, outputs in steps:
            given = function(rank, *(values[name] for name in inputs))
            values |= zip(outputs, given, strict=True)

    return run


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


def _state(update: Update) -> list[str]:
    return [name for name in update.inputs if name.startswith("state.")]


def _written(program: Program) -> list[str]:
    return list(dict.fromkeys(name for update in program.updates for name in _state(update)))


# Parameters


def _order(name: str) -> tuple[int, int, str]:
    """Weights, state, inputs; layers by number."""
    kinds = ("weight", "state", "input", RANK)
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return kinds.index(name.split(".", maxsplit=1)[0]), numbers[0] if numbers else -1, name


def _specs(lowering: Lowering) -> dict[str, Any]:
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


def _flat(specs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    flat = []
    for name in names:
        spec = specs[name]
        parts = spec.parts if isinstance(spec, DeviceWeight) else {"": spec}
        flat += [(f"{name}:{part}" if part else name, parts[part]) for part in parts]
    return flat


def _unflatten(
    specs: Mapping[str, Any], names: Sequence[str], arrays: Sequence[jax.Array]
) -> dict[str, Any]:
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
