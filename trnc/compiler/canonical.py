"""A stage graph as canonical text: equal computations print equal bytes, on every machine.

The text holds what the compiled code depends on: ops with their overloads, constants, shapes,
dtypes, layouts that are not contiguous, and the wiring. It does not hold what tracing adds: names,
source lines, paths, metadata, the order of independent statements, dead code, or repeats of a
subexpression. Values are numbered by what they compute (hash-consing: same op, same arguments,
same result type), then printed in post-order from the outputs.

What is left out, and why that is safe:

- `detach`, `alias`, `lift_fresh[_copy]`: the graph is pure, so a second name for a value is the
  value. (`clone` stays: it decides whether an output shares memory with an input.)
- a view or conversion whose result has its operand's type, such as `to(f32)` of an f32, or
  `contiguous` of a contiguous tensor: PyTorch returns the operand itself.
- `_assert_tensor_metadata` and range checks of symbolic sizes: the printed types say the same.
- `device`, `layout=strided` and `pin_memory=False` arguments: a value that is not on the CPU has
  its device type after its shape, whichever op put it there. A device index is never printed.
- arguments that equal the schema's default.

A stage that is not a pure function of its inputs has no canonical text: a mutation, a random op, a
parameter or buffer, a size that depends on data and a higher-order op are each a CompileError.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from trnc.compiler.sources import source_of
from trnc.equiv.text import FORMAT, TORCH_PREFIX
from trnc.errors import CompileError

MAX_PRINTED_VALUES = 64  # a constant with more elements is printed as the sha-256 of its bytes

# Text with values in it: an int stands for the value of that number, a str for itself.
Template = tuple[str | int, ...]

_ALIASES = {
    "aten.alias.default",
    "aten.detach.default",
    "aten.detach_.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
}
_IDENTITY_IF_SAME_TYPE = {
    "aten._unsafe_view.default",
    "aten.contiguous.default",
    "aten.expand.default",
    "aten.reshape.default",
    "aten.slice.Tensor",
    "aten.to.device",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.view.default",
}
_CHECKS = {
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
}
_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}


@dataclass(slots=True)
class _Numbering:
    """Values by what they compute. `types[i]` and `expressions[i]` define value i; an input has no
    expression. `sources[i]` is where it was first written."""

    symbols: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    types: list[str] = field(default_factory=list)
    expressions: list[Template | None] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    known: dict[tuple[str, Template], int] = field(default_factory=dict)

    def add_input(self, type_text: str) -> int:
        self.types.append(type_text)
        self.expressions.append(None)
        self.sources.append(None)
        return len(self.types) - 1

    def value(self, type_text: str, expression: Template, source: str | None = None) -> int:
        """Return the number of this value, an old one where the same was computed before."""
        key = (type_text, expression)
        if key not in self.known:
            self.known[key] = self.add_input(type_text)
            self.expressions[-1] = expression
            self.sources[-1] = source
        return self.known[key]


def canonical_text(program: torch.export.ExportedProgram) -> str:
    """Return the canonical text of an exported stage.

    The grammar is in `trnc.equiv.text`. Inputs are the flattened user inputs by position.

    Raises:
        CompileError: the stage is not a pure function of its inputs (see the module's docstring).
    """
    return "\n".join(line for line, _ in _lines(program)) + "\n"


def source_map(program: torch.export.ExportedProgram) -> dict[int, str]:
    """Return line number of the canonical text (from 1) -> `file:line` where it was written.

    An annotation for people; it is no part of the text. Trace under `recording_sources` to have
    the lines of what the stage calls, not only its own.
    """
    lines = enumerate(_lines(program), start=1)
    return {number: source for number, (_, source) in lines if source is not None}


def digest(text: str) -> str:
    """Return the sha-256 of a canonical text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(program: torch.export.ExportedProgram) -> list[tuple[str, str | None]]:
    """The text's lines, each with its source."""
    numbering = _Numbering()
    inputs, templates = _number_inputs(program, numbering)
    outputs: Sequence[Template] = ()
    for node in program.graph.nodes:
        if node.op == "call_function":
            template = _number_node(node, templates, numbering)
            if template is not None:
                templates[node] = template
        elif node.op == "output":
            outputs = [_argument(a, templates, numbering) for a in node.args[0]]
        elif node.op != "placeholder":
            raise CompileError(f"stage graph: '{node.name}' is a {node.op}, not a call of an op")
    return [
        (FORMAT, None),
        (TORCH_PREFIX + torch.__version__.split("+")[0], None),
        *((text, None) for text in _input_lines(inputs, numbering)),
        *((text, None) for text in _range_lines(program, numbering)),
        *_value_lines(inputs, outputs, numbering),
    ]


# Inputs


def _number_inputs(
    program: torch.export.ExportedProgram, numbering: _Numbering
) -> tuple[list[int], dict[Node, Template]]:
    """Number the user inputs first, then the constants that tracing lifted into inputs."""
    for output in program.graph_signature.output_specs:
        if output.kind is not OutputKind.USER_OUTPUT:
            raise CompileError(
                f"stage graph: it mutates '{output.target or output.arg.name}'; a stage is pure:"
                " return the new value instead"
            )
    inputs: list[int] = []
    templates: dict[Node, Template] = {}
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = node.meta.get("val")
        if spec.kind is InputKind.USER_INPUT:
            number = numbering.add_input(_type(value, numbering))
            inputs.append(number)
            templates[node] = (number,)
        elif spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
            constant = program.constants[spec.target]
            templates[node] = (_number_constant(spec.target, constant, numbering),)
        else:
            raise CompileError(
                f"stage graph: it holds the {spec.kind.name.lower()} '{spec.target}';"
                " weights and state are inputs of a stage"
            )
    return inputs, templates


def _number_constant(name: str, constant: Any, numbering: _Numbering) -> int:
    if not isinstance(constant, torch.Tensor) or isinstance(constant, FakeTensor):
        raise CompileError(f"stage graph: the value of constant '{name}' is not known")
    flat = constant.detach().cpu().contiguous().reshape(-1)
    if flat.numel() <= MAX_PRINTED_VALUES:
        content = f"[{', '.join(repr(v) for v in flat.tolist())}]"
    else:
        data = flat.view(torch.uint8).numpy().tobytes()
        content = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return numbering.value(_type(constant, numbering), (f"constant({content})",))


# Ops


def _number_node(
    node: Node, templates: dict[Node, Template], numbering: _Numbering
) -> Template | None:
    """Return what stands for the node's result; None for a check, which has none."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return (_symbolic(value, numbering),)
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node)
        return (*templates[source], f"[{index}]")
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise CompileError(
            f"stage graph: '{node.name}' calls {target}; a stage is a straight line of ops"
            f"{_at(node)}"
        )
    name = str(target)
    if name in _CHECKS:
        return None
    if name in _ALIASES:
        return _argument(node.args[0], templates, numbering)
    _refuse_impure(target, node)
    arguments = _arguments(node, target, templates, numbering)
    result = _type(value, numbering)
    if name in _IDENTITY_IF_SAME_TYPE and ("copy=True",) not in arguments:
        operand = node.args[0]
        assert isinstance(operand, Node)
        if result == _type(operand.meta.get("val"), numbering):
            return templates[operand]
    expression = _call(name, arguments)
    return (numbering.value(result, expression, source_of(node)),)


def _refuse_impure(target: torch._ops.OpOverload, node: Node) -> None:
    if target._schema.is_mutable:
        raise CompileError(
            f"stage graph: {target} writes to its argument; a stage is pure: use the op that"
            f" returns a new value{_at(node)}"
        )
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise CompileError(
            f"stage graph: {target} draws from a generator with state; hash a seed that is an"
            f" input instead{_at(node)}"
        )
    if not target._schema.returns:
        raise CompileError(f"stage graph: {target} has no result, only an effect{_at(node)}")


def _arguments(
    node: Node,
    target: torch._ops.OpOverload,
    templates: dict[Node, Template],
    numbering: _Numbering,
) -> list[Template]:
    """The call's arguments in the schema's order, defaults dropped.

    What has no default is printed in place, what has one as `name=value`.
    """
    given = list(node.args)
    arguments: list[Template] = []
    for position, schema in enumerate(target._schema.arguments):
        if position < len(given):
            value = given[position]
        elif schema.name in node.kwargs:
            value = node.kwargs[schema.name]
        else:
            continue
        if _is_placement(schema.name, value):
            continue
        if str(schema.type) == "float" and isinstance(value, int):
            value = float(value)  # the dispatcher would
        template = _argument(value, templates, numbering)
        if not schema.has_default_value():
            arguments.append(_merge(template))
        elif template != _argument(schema.default_value, templates, numbering):
            arguments.append(_merge((f"{schema.name}=", *template)))
    return arguments


def _is_placement(name: str, value: object) -> bool:
    """Whether an argument only says where a tensor lies, as the printed type does."""
    return (
        isinstance(value, torch.device)
        or (name == "layout" and value in (None, torch.strided))
        or (name == "pin_memory" and value in (None, False))
    )


def _argument(value: object, templates: dict[Node, Template], numbering: _Numbering) -> Template:
    if isinstance(value, Node):
        return templates[value]
    if isinstance(value, list | tuple):
        return _call("", [_argument(v, templates, numbering) for v in value], "[]")
    return (_literal(value, numbering),)


def _call(name: str, arguments: Sequence[Template], brackets: str = "()") -> Template:
    """`name(a, b)` as one template."""
    parts: list[str | int] = [name + brackets[0]]
    for position, argument in enumerate(arguments):
        parts += (", ", *argument) if position else argument
    return _merge((*parts, brackets[1]))


def _merge(template: Template) -> Template:
    """Join neighbouring text, so that equal templates are equal tuples."""
    merged: list[str | int] = []
    for part in template:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return tuple(merged)


# Words


def _literal(value: object, numbering: _Numbering) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _symbolic(value, numbering)
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, torch.memory_format | torch.layout):
        return str(value).removeprefix("torch.")
    raise CompileError(f"stage graph: an argument of type {type(value).__name__} has no text")


def _dtype(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _type(value: object, numbering: _Numbering) -> str:
    """A value's type: `f32[4, 576]`, with strides `{1, 4}` unless contiguous, `@cuda` off the CPU;
    `(f32[4], i64[4])` for several results."""
    if isinstance(value, list | tuple):
        return f"({', '.join(_type(v, numbering) for v in value)})"
    if not isinstance(value, torch.Tensor):
        return _literal(value, numbering)
    if value.layout is not torch.strided:
        raise CompileError(f"stage graph: a tensor of layout {value.layout}; use a dense one")
    shape = [_symbolic(d, numbering) for d in value.shape]
    strides = [_symbolic(s, numbering) for s in value.stride()]
    text = f"{_dtype(value.dtype)}[{', '.join(shape)}]"
    if not _is_contiguous(value):
        text += f"{{{', '.join(strides)}}}"
    return text if value.device.type == "cpu" else f"{text}@{value.device.type}"


def _expression(size: Any) -> sympy.Expr:
    """A size as sympy sees it: comparing these adds no guard to the traced program."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        extent = _expression(size)
        if extent == 0:
            return True
        if extent != 1 and _expression(stride) != expected:
            return False
        expected = sympy.expand(expected * extent)
    return True


def _symbolic(value: Any, numbering: _Numbering) -> str:
    """A size: an int, or an expression over s0, s1, ... in the order of first appearance."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return repr(value)
    expression = value.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        if re.match(r"z?uf?\d", symbol.name):
            raise CompileError(
                f"stage graph: a size depends on data ({expression}); shapes of a stage are static"
            )
        index = len(numbering.symbols)
        numbering.symbols.setdefault(symbol, sympy.Symbol(f"s{index}", integer=True, positive=True))
    return str(expression.xreplace(numbering.symbols))


def _at(node: Node) -> str:
    source = source_of(node)
    return f" ({source})" if source else ""


# Printing


def _input_lines(inputs: Sequence[int], numbering: _Numbering) -> Iterator[str]:
    for position, number in enumerate(inputs):
        yield f"input ${position}: {numbering.types[number]}"


def _range_lines(program: torch.export.ExportedProgram, numbering: _Numbering) -> Iterator[str]:
    for symbol, name in numbering.symbols.items():
        if symbol in program.range_constraints:
            bounds = program.range_constraints[symbol]
            yield f"range {name}: {bounds.lower} .. {bounds.upper}"


def _value_lines(
    inputs: Sequence[int], outputs: Sequence[Template], numbering: _Numbering
) -> Iterator[tuple[str, str | None]]:
    names = {number: f"${position}" for position, number in enumerate(inputs)}

    def render(template: Template) -> str:
        return "".join(p if isinstance(p, str) else names[p] for p in template)

    for number in _post_order(outputs, lambda n: numbering.expressions[n] or ()):
        expression = numbering.expressions[number]
        if expression is None:
            continue
        names[number] = f"%{len(names) - len(inputs)}"
        text = f"{names[number]}: {numbering.types[number]} = {render(expression)}"
        yield text, numbering.sources[number]
    for output in outputs:
        yield f"output {render(output)}", None


def _post_order(roots: Sequence[Template], operands: Callable[[int], Template]) -> Iterator[int]:
    """Values that `roots` need, each after its operands, in the order of the arguments."""
    seen: set[int] = set()
    stack: list[tuple[int, bool]] = []

    def push(template: Template) -> None:
        stack.extend((p, False) for p in reversed(template) if isinstance(p, int))

    for root in roots:
        push(root)
        while stack:
            number, is_ready = stack.pop()
            if is_ready:
                yield number
            elif number not in seen:
                seen.add(number)
                stack.append((number, True))
                push(operands(number))
