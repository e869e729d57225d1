"""A canonical stage graph as a function of jax arrays, one row of the table for each op.

The text is all that is lowered: two stages with one digest are one function, whatever traced them.
Sizes that the text leaves symbolic are bound to those of the arrays, so the graphs are the ones of
the CPU backend and of the graph lock.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trnc.compiler.backends.stablehlo.parallel import Partial, all_reduce
from trnc.compiler.backends.stablehlo.site import Row, Site
from trnc.compiler.backends.stablehlo.weights import DeviceWeight
from trnc.equiv.text import Graph, Value, parse
from trnc.errors import CompileError

# What a dtype of the graphs is on the device. Neuron counts in 32 bits, and an int8 cache holds
# q + 128: bytes are documented there, int8 is not.
DTYPES: Mapping[str, Any] = {
    "bool": jnp.bool_,
    "u8": jnp.uint8,
    "i8": jnp.uint8,
    "i32": jnp.int32,
    "i64": jnp.int32,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
}

# Ops that take packed weights: (position of the weight, position of its format).
PACKED_ARGUMENTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "trnc.linear.default": ((1, 3),),
    "trnc.embedding.default": ((1, 2),),
    "trnc.head_linear.default": ((1, 2),),
    "trnc.experts.default": ((3, 5), (4, 6)),
}
_WORDS = {"contiguous_format": None, "strided": None, "inf": float("inf"), "nan": float("nan")}
_CONSTANT = "constant"
_KEEPS_PARTIAL = "aten.add.Tensor"

Argument = jax.Array | DeviceWeight


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A parsed stage. `label` names it in errors; `packed` is the format of each packed input."""

    label: str
    graph: Graph
    packed: Mapping[int, str]


def read_graph(label: str, text: str) -> StageGraph:
    """Parse a canonical text and find which of its inputs are packed weights."""
    graph = parse(text)
    packed: dict[int, str] = {}
    for node in graph.nodes:
        assert node.expression is not None
        for weight, format in PACKED_ARGUMENTS.get(node.expression.op, ()):
            arguments = _tree(node).args
            name, kind = arguments[weight], arguments[format]
            assert isinstance(name, ast.Name)
            assert isinstance(kind, ast.Constant)
            packed[int(name.id.removeprefix("input_"))] = str(kind.value)
    return StageGraph(label, graph, packed)


def missing_rows(stage: StageGraph, table: Mapping[str, Row]) -> list[str]:
    """Return the ops of a stage that have no row in the table, in order."""
    used = dict.fromkeys(n.expression.op for n in stage.graph.nodes if n.expression)
    return [op for op in used if op not in table and op != _CONSTANT]


def stage_function(
    stage: StageGraph, table: Mapping[str, Row]
) -> Callable[[Site, Sequence[Argument]], tuple[jax.Array, ...]]:
    """Return the stage as a function of its inputs, in the order of its ports.

    Raises:
        CompileError: an op without a row in the table; the message names it and the stage.
    """
    if missing := missing_rows(stage, table):
        raise CompileError(
            f"stage '{stage.label}': the Trainium backend has no lowering for {missing[0]}; add a "
            "row for it in trnc/compiler/backends/stablehlo, or leave the feature off that uses it"
        )
    nodes = [(node, _tree(node)) for node in stage.graph.nodes]
    outputs = [_expression(o.render(_renamed(o.operands))) for o in stage.graph.outputs]

    def run(site: Site, inputs: Sequence[Argument]) -> tuple[jax.Array, ...]:
        scope = _Scope(stage.label, site, _bind(stage, inputs))
        for node, call in nodes:
            scope.values[_name(node.name)] = scope.call(node, table, call)
        return tuple(scope.whole(scope.evaluate(output)) for output in outputs)

    return run


class _Scope:
    """The values of one run of a stage, by name."""

    def __init__(self, label: str, site: Site, values: dict[str, Any]) -> None:
        self._label = label
        self._site = site
        self.values = values

    def call(self, value: Value, table: Mapping[str, Row], node: ast.Call) -> Any:
        op = _op(value)
        arguments = [self.evaluate(a) for a in node.args]
        named = {str(k.arg): self.evaluate(k.value) for k in node.keywords}
        if op == _CONSTANT:
            return self._constant(value.type, arguments[0])
        if op == _KEEPS_PARTIAL and len(arguments) == 2 and not named:
            left, right = arguments
            if isinstance(left, Partial) and isinstance(right, Partial):
                return Partial(left.array + right.array)
        arguments = [self.whole(a) for a in arguments]
        try:
            return table[op](self._site, *arguments, **named)
        except (TypeError, ValueError, NotImplementedError, KeyError) as error:
            raise CompileError(f"stage '{self._label}': {op} cannot be lowered: {error}") from error

    def _constant(self, type: str, values: Any) -> jax.Array:
        if not isinstance(values, list):
            raise CompileError(
                f"stage '{self._label}': the values of a constant are not in its text"
            )
        shape = [int(size) for size in _dimensions(type)]
        return jnp.array(values, DTYPES[type.split("[", maxsplit=1)[0]]).reshape(shape)

    def whole(self, value: Any) -> Any:
        """Add up over all cores what each has a part of; anything else is itself."""
        return all_reduce(self._site, value.array) if isinstance(value, Partial) else value

    def evaluate(self, node: ast.expr) -> Any:  # noqa: PLR0911
        """Return what an argument stands for: a value, a list, a literal, a dtype or a size."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Name(id=name) if name in DTYPES:
                return DTYPES[name]
            case ast.Name(id=name) if name in _WORDS:
                return _WORDS[name]
            case ast.List(elts=items):
                return [self.evaluate(item) for item in items]
            case ast.Subscript(value=value, slice=index):
                return self.evaluate(value)[self.evaluate(index)]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.evaluate(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                return _SIZES[type(operator)](self.evaluate(left), self.evaluate(right))
        raise CompileError(f"stage '{self._label}': '{ast.unparse(node)}' cannot be lowered")


_SIZES: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def _bind(stage: StageGraph, inputs: Sequence[Argument]) -> dict[str, Any]:
    """Name the inputs, and give each symbolic size the one of the arrays."""
    values: dict[str, Any] = {}
    for port, (declared, array) in enumerate(zip(stage.graph.inputs, inputs, strict=True)):
        values[f"input_{port}"] = array
        if isinstance(array, DeviceWeight):
            continue
        for word, size in zip(_dimensions(declared.type), array.shape, strict=False):
            known = values.setdefault(word, size) if word.isidentifier() else int(word)
            if known != size:
                raise CompileError(
                    f"stage '{stage.label}': input {port} is {declared.type}, where {word} is "
                    f"{known}, and gets {list(array.shape)}"
                )
    return values


def _dimensions(type: str) -> Iterator[str]:
    """Yield the sizes of a type such as `f32[s0, 576]`."""
    inside = re.fullmatch(r"\w+\[(.*?)\].*", type)
    yield from inside[1].split(", ") if inside and inside[1] else ()


def _renamed(operands: Sequence[str]) -> dict[str, str]:
    return {operand: _name(operand) for operand in operands}


def _name(operand: str) -> str:
    """A value's name as a word of Python: `$3` is `input_3`, `%3` is `value_3`."""
    return operand.replace("$", "input_").replace("%", "value_")


def _op(node: Value) -> str:
    assert node.expression is not None
    return node.expression.op


def _tree(node: Value) -> ast.Call:
    assert node.expression is not None
    tree = _expression(node.expression.render(_renamed(node.expression.operands)))
    if not isinstance(tree, ast.Call):
        raise CompileError(f"line {node.line} of a graph calls no op")
    return tree


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
