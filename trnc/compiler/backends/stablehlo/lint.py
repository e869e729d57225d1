"""What the Neuron compiler is known to refuse, or to do badly, found before it is asked.

The rules are those of AWS's documentation (Neuron SDK 2.32, compiler error codes, JAX known issues)
that a module's text can show. `code` is Neuron's own error code where it has one. An error is what
the compiler or the device refuses, a warning what it is told to do slowly or to change soon.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trnc.compiler.backends.stablehlo.mlir import ir, parse_functions, split_functions
from trnc.compiler.backends.stablehlo.targets import NeuronTarget

Level = Literal["error", "warning"]

_CUSTOM_CALLS = frozenset(
    f"AwsNeuron{name}"
    for name in (
        *("Erf", "Gelu", "GeluApprxTanh", "GeluBackward", "Silu", "SiluBackward", "RmsNorm"),
        *("Softmax", "SoftmaxBackward", "CollectiveMatmul", "IntMatmult", "ArgMax", "ArgMin"),
        *("TopK", "DropoutMaskV1", "CustomNativeKernel", "CustomOp", "DevicePrint"),
        *("ResizeNearest", "ResizeBilinear", "ResizeNearestGrad", "LNCShardingConstraint"),
        *("TransferWithStaticRing", "ModuleMarkerStart", "ModuleMarkerEnd"),
        *("NeuronBoundaryMarkerStart", "NeuronBoundaryMarkerEnd"),
    )
) | {"QuantizeMX", "__op$block_scaled_dot"}
_TENSOR = re.compile(r"tensor<(?:(?:\d+|\?)x)*(complex<\w+>|\w+)")
_DOCUMENTED = {"i1", "ui8", "i32", "ui32", "f32", "tf32", "bf16", "f16"}
_COMPARISONS = {"LT", "LE", "GT", "GE"}
_COLLECTIVES = {"stablehlo.all_reduce", "stablehlo.reduce_scatter"}
_DYNAMIC = {
    *("stablehlo.dynamic_reshape", "stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_pad"),
    *("stablehlo.dynamic_gather", "stablehlo.dynamic_iota", "stablehlo.dynamic_conv"),
    *("stablehlo.set_dimension_size", "stablehlo.real_dynamic_slice"),
}
_CALLBACKS = {"stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send", "stablehlo.recv"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: `trips` says what is wrong with an op, or None."""

    name: str
    code: str
    level: Level
    trips: Callable[[_Op, NeuronTarget], str | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: `count` ops of one function, with what is wrong with the first."""

    rule: str
    code: str
    level: Level
    function: str
    count: int
    message: str


@dataclass(frozen=True, slots=True)
class _Op:
    """An op of a module, with what the rules ask of it: `operands`, `results` are element types."""

    name: str
    op: Any
    operands: list[str]
    results: list[str]

    @classmethod
    def of(cls, op: Any) -> _Op:
        """Look an op up; every rule asks for its types, so they are made once."""
        operands = [_element(v.type) for v in op.operands]
        return cls(str(op.name), op, operands, [_element(v.type) for v in op.results])

    @property
    def types(self) -> list[str]:
        """Element types of operands and results."""
        return self.operands + self.results

    @property
    def body(self) -> list[Any]:
        """The ops of all its regions."""
        return [o for region in self.op.regions for block in region for o in block.operations]

    def attribute(self, name: str) -> str:
        """An attribute as text, empty where there is none."""
        return str(self.op.attributes[name]) if name in self.op.attributes else ""


def lint(
    text: str, target: NeuronTarget, known: dict[str, tuple[Finding, ...]] | None = None
) -> list[Finding]:
    """Return what is wrong with a canonical module, errors first, one entry for a rule and
    function.

    `known` keeps what was found in each private function, by its text: modules of one target that
    share it share most of their functions, and those are looked through once.
    """
    known = {} if known is None else known
    found = dict(known)
    for function, op in parse_functions(text, known):
        found[function] = tuple(_lint_function(op, target))
        if " private " in function[:32]:
            known[function] = found[function]
    findings = [finding for function in split_functions(text) for finding in found[function]]
    return sorted(findings, key=lambda f: (f.level, f.rule, f.function))


def _lint_function(function: Any, target: NeuronTarget) -> Iterator[Finding]:
    label = str(function.attributes["sym_name"]).strip('"')
    found: dict[Rule, list[str]] = {}
    for op in _ops(function.operation):
        for rule in RULES:
            if (message := rule.trips(op, target)) is not None:
                found.setdefault(rule, []).append(message)
    for rule, messages in found.items():
        yield Finding(rule.name, rule.code, rule.level, label, len(messages), messages[0])


def _ops(parent: Any) -> Iterator[_Op]:
    yield _Op.of(parent)
    for region in parent.regions:
        for block in region:
            for child in block.operations:
                yield from _ops(child.operation)


def _element(type: Any) -> str:
    """`ui8` of `tensor<4x2xui8>`; other types as they are."""
    text = str(type)
    match = _TENSOR.match(text)
    return match[1] if match else text


# Shapes and control flow


def _is_dynamic(op: _Op, _: NeuronTarget) -> str | None:
    dynamic = [
        str(v.type)
        for v in op.op.results
        if "?" in str(v.type) or "#stablehlo.bounds" in str(v.type)
    ]
    return f"{op.name} gives {dynamic[0]}: every dimension must be a number" if dynamic else None


def _depends_on_data(op: _Op, _: NeuronTarget) -> str | None:
    return f"{op.name}: a shape that depends on data" if op.name in _DYNAMIC else None


def _is_loop(op: _Op, _: NeuronTarget) -> str | None:
    """A loop that does not end by comparing a counter with a constant."""
    if op.name != "stablehlo.while":
        return None
    condition = [o.operation.name for o in op.op.regions[0].blocks[0].operations]
    counted = {"stablehlo.constant", "stablehlo.compare", "stablehlo.return"}
    is_counted = condition.count("stablehlo.compare") == 1 and set(condition) == counted
    return None if is_counted else "a loop whose trip count the text does not fix"


def _is_branch(op: _Op, _: NeuronTarget) -> str | None:
    is_branch = op.name in ("stablehlo.if", "stablehlo.case")
    return f"{op.name}: compute both sides and select" if is_branch else None


def _is_callback(op: _Op, _: NeuronTarget) -> str | None:
    return f"{op.name}: a step cannot talk to the host" if op.name in _CALLBACKS else None


# Reductions and sorts


def _is_variadic_reduce(op: _Op, _: NeuronTarget) -> str | None:
    if op.name == "stablehlo.reduce" and len(op.op.results) > 1:
        return f"a reduce of {len(op.op.results)} operands; use max, compare and min for an argmax"
    return None


def _is_window(op: _Op, _: NeuronTarget) -> str | None:
    if op.name != "stablehlo.reduce_window":
        return None
    dilations = op.attribute("base_dilations") + op.attribute("window_dilations")
    is_dilated = any(int(number) > 1 for number in re.findall(r"[ ,](\d+)", dilations))
    if len(op.op.results) > 1 or is_dilated:
        return "a reduce_window of several operands, or dilated"
    return None


def _is_cumulative(op: _Op, _: NeuronTarget) -> str | None:
    if op.name != "stablehlo.reduce_window":
        return None
    return "a reduce_window (what a cumsum is lowered to) costs the square of its length"


def _is_sort(op: _Op, _: NeuronTarget) -> str | None:
    return "a sort: cuts can be found by halving" if op.name == "stablehlo.sort" else None


def _sorts_oddly(op: _Op, _: NeuronTarget) -> str | None:
    if op.name != "stablehlo.sort":
        return None
    compares = [o for o in op.body if o.operation.name == "stablehlo.compare"]
    directions = [str(o.attributes["comparison_direction"]) for o in compares]
    odd = [d for d in directions if not any(f" {c}>" in d or d.endswith(c) for c in _COMPARISONS)]
    return f"a sort by {odd[0]}; only LT, LE, GT and GE are taken" if odd else None


def _is_integer_topk(op: _Op, _: NeuronTarget) -> str | None:
    is_topk = "top_k" in op.name or "top_k" in op.attribute("name")
    if is_topk and op.operands and _is_integer(op.operands[0]):
        return f"a top_k of {op.operands[0]}; convert to a float first"
    return None


# Types


def _is_integer(type: str) -> bool:
    return type.startswith(("i", "ui")) and type not in ("i1", "index")


def _scatters_integers(op: _Op, _: NeuronTarget) -> str | None:
    if op.name != "stablehlo.scatter" or not _is_integer(op.results[0]):
        return None
    computes = [o.operation.name for o in op.body if o.operation.name != "stablehlo.return"]
    return f"a scatter of {op.results[0]} that computes ({computes[0]})" if computes else None


def _multiplies_integers(op: _Op, target: NeuronTarget) -> str | None:
    is_dot = op.name in ("stablehlo.dot", "stablehlo.dot_general") and target.name != "trn1"
    wrong = [t for t in op.operands if t in ("i32", "i64", "ui32", "ui64")] if is_dot else []
    return f"a matrix product of {wrong[0]}" if wrong else None


def _reduces_wide_integers(op: _Op, _: NeuronTarget) -> str | None:
    wrong = [t for t in op.operands if t in ("i32", "i64", "ui32", "ui64")]
    return f"{op.name} of {wrong[0]}" if op.name in _COLLECTIVES and wrong else None


def _raises_wide_integers(op: _Op, _: NeuronTarget) -> str | None:
    is_wide = op.name == "stablehlo.power" and op.operands[0] in ("i64", "ui64")
    return "a power of 64-bit integers" if is_wide else None


def _is_wide_integer(op: _Op, _: NeuronTarget) -> str | None:
    wide = [t for t in op.types if t in ("i64", "ui64")]
    return (
        f"{op.name} has {wide[0]}, which is cut to 32 bits now and refused soon" if wide else None
    )


def _is_complex(op: _Op, _: NeuronTarget) -> str | None:
    wrong = [t for t in op.types if t.startswith("complex")]
    return f"{op.name} of {wrong[0]}" if wrong else None


def _is_double(op: _Op, _: NeuronTarget) -> str | None:
    return f"{op.name} of f64" if "f64" in op.types else None


def _is_unusual_float8(op: _Op, _: NeuronTarget) -> str | None:
    wrong = [t for t in op.types if t.startswith("f8") and ("FNUZ" in t or "B11" in t)]
    return f"{op.name} of {wrong[0]}, which no Neuron core has" if wrong else None


def _is_float8_of_trn3(op: _Op, target: NeuronTarget) -> str | None:
    if target.fp8_e4m3fn or "f8E4M3FN" not in op.types:
        return None
    return f"{op.name} of f8E4M3FN: {target.name} has f8E4M3, whose largest value is 240, not 448"


def _is_undocumented(op: _Op, _: NeuronTarget) -> str | None:
    known = (*_DOCUMENTED, "i64", "ui64", "f64")
    wrong = [t for t in op.results if t[:1] in "iuft" and t not in known and not t.startswith("f8")]
    return f"{op.name} of {wrong[0]}, which is not among the documented types" if wrong else None


# Single ops


def _shifts_narrow(op: _Op, _: NeuronTarget) -> str | None:
    is_shift = op.name == "stablehlo.shift_right_arithmetic"
    if is_shift and op.operands[0] not in ("i32", "ui32"):
        return f"an arithmetic shift of {op.operands[0]}; convert to 32 bits first"
    return None


def _draws(op: _Op, _: NeuronTarget) -> str | None:
    if op.name == "stablehlo.rng":
        return "a generator inside the step; pass the randomness in"
    if op.name == "stablehlo.rng_bit_generator" and "DEFAULT" not in op.attribute("rng_algorithm"):
        return "a generator other than the default one; pass the randomness in"
    return None


def _indexes_out_of_range(op: _Op, _: NeuronTarget) -> str | None:
    """A gather or scatter whose indexes are an iota that counts past the end of a dimension."""
    if op.name not in ("stablehlo.gather", "stablehlo.scatter"):
        return None
    owner = op.op.operands[1].owner
    if isinstance(owner, ir.Block) or str(owner.name) != "stablehlo.iota":
        return None
    counted = ir.IntegerAttr(owner.attributes["iota_dimension"]).value
    count, source = op.op.operands[1].type.shape[counted], op.op.operands[0].type.shape
    numbers = op.attribute("dimension_numbers") + op.attribute("scatter_dimension_numbers")
    (indexed,) = re.findall(r"(?:start_index_map|operand_dims) = \[([\d, ]*)\]", numbers)
    if any(source[int(dimension)] < count for dimension in indexed.split(", ")):
        return f"{op.name} by an iota of {count} in {list(source)}: out of range"
    return None


def _calls_unknown(op: _Op, _: NeuronTarget) -> str | None:
    if op.name != "stablehlo.custom_call":
        return None
    name = op.attribute("call_target_name").strip('"')
    return None if name in _CUSTOM_CALLS else f"custom call '{name}' is not one of Neuron's"


def _is_unsupported(op: _Op, _: NeuronTarget) -> str | None:
    return f"{op.name} is not supported" if op.name == "stablehlo.reduce_precision" else None


def _aliases_another_type(op: _Op, _: NeuronTarget) -> str | None:
    """A donated parameter must have the type of the result that gets its memory."""
    if op.name != "func.func" or "arg_attrs" not in op.op.attributes:
        return None
    type = ir.TypeAttr(op.op.attributes["function_type"]).value
    inputs, results = list(type.inputs), list(type.results)
    for number, attributes in enumerate(ir.ArrayAttr(op.op.attributes["arg_attrs"])):
        if "tf.aliasing_output" not in attributes:
            continue
        result = ir.IntegerAttr(attributes["tf.aliasing_output"]).value
        given, taken = inputs[number], results[result]
        if given != taken:
            return f"parameter {number} is {given}, and result {result}, its alias, {taken}"
    return None


def _is_not_aliased(op: _Op, _: NeuronTarget) -> str | None:
    """State that is donated but gets no result: the device would copy it in each step."""
    if op.name != "func.func" or "arg_attrs" not in op.op.attributes:
        return None
    attributes = list(ir.ArrayAttr(op.op.attributes["arg_attrs"]))
    lost = [i for i, a in enumerate(attributes) if "jax.buffer_donor" in a]
    return f"parameter {lost[0]} is donated, but no result has its memory" if lost else None


RULES = (
    Rule("static-shapes", "EMOD025", "error", _is_dynamic),
    Rule("data-dependent-shape", "", "error", _depends_on_data),
    Rule("loop", "", "error", _is_loop),
    Rule("branch", "", "error", _is_branch),
    Rule("host-callback", "", "error", _is_callback),
    Rule("variadic-reduce", "", "error", _is_variadic_reduce),
    Rule("reduce-window", "EVRF017/018/019", "error", _is_window),
    Rule("cumulative", "", "warning", _is_cumulative),
    Rule("sort", "", "warning", _is_sort),
    Rule("sort-comparator", "", "error", _sorts_oddly),
    Rule("integer-top-k", "EVRF013", "error", _is_integer_topk),
    Rule("integer-scatter", "EVRF016/060", "error", _scatters_integers),
    Rule("integer-dot", "EVRF035", "error", _multiplies_integers),
    Rule("integer-collective", "EVRF061/063", "error", _reduces_wide_integers),
    Rule("integer-power", "EVRF062", "error", _raises_wide_integers),
    Rule("64-bit-integers", "ESFH002", "warning", _is_wide_integer),
    Rule("complex", "EVRF004", "warning", _is_complex),
    Rule("f64", "", "error", _is_double),
    Rule("unusual-fp8", "EVRF052", "error", _is_unusual_float8),
    Rule("fp8-e4m3fn", "EVRF051", "error", _is_float8_of_trn3),
    Rule("undocumented-type", "", "warning", _is_undocumented),
    Rule("narrow-shift", "EVRF022", "error", _shifts_narrow),
    Rule("generator", "EVRF006", "error", _draws),
    Rule("index-range", "EVRF031/056", "error", _indexes_out_of_range),
    Rule("custom-call", "EHCA005/EVRF015", "error", _calls_unknown),
    Rule("unsupported-op", "", "error", _is_unsupported),
    Rule("alias-type", "", "error", _aliases_another_type),
    Rule("alias-lost", "", "error", _is_not_aliased),
)
