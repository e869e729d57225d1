"""Run a canonical text on tensors: in f64 as the numbers that it stands for, or in f32 as it is.

In f64 every `f32` of the text is computed in double precision, so that what is left of rounding is
too small to hide a difference. Conversions to narrower types (`f16`, `bf16`, `i8`) are carried out:
they are part of the function. Our operators run their references, which compute in the type of
their activations.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trnc import ops  # noqa: F401  (declares our operators)
from trnc.equiv.calls import (
    Argument,
    Call,
    Ref,
    Type,
    Word,
    parse_argument,
    parse_call,
    parse_types,
)
from trnc.equiv.text import Graph, Value
from trnc.errors import TrncError
from trnc.ops.library import reference_mode

DTYPES = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
_FORMATS = {"contiguous_format": torch.contiguous_format, "preserve_format": torch.preserve_format}
# Values have no layout here, so a view of any tensor is a reshape.
_SAME_VALUES = {"aten.view.default": "aten.reshape.default"}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class CannotEvaluate(TrncError):  # noqa: N818  (it is an answer, not a mistake)
    """The text has something that has no numbers: an unknown op, or a constant kept as a digest."""


def evaluate(
    graph: Graph, inputs: Sequence[Tensor], sizes: Mapping[str, int], real: torch.dtype
) -> list[Tensor]:
    """Return the outputs. `sizes` binds the symbols; `real` is what `f32` is computed in.

    Raises:
        CannotEvaluate: see there.
        RuntimeError, IndexError: an op refused these inputs.
    """
    values: dict[str, Any] = {
        v.name: _as_real(x, real) for v, x in zip(graph.inputs, inputs, strict=True)
    }
    with torch.no_grad(), reference_mode():
        for node in graph.nodes:
            values[node.name] = _run(node, values, sizes, real)
    return [_resolve(parse_argument(o.render({})), values, sizes, real) for o in graph.outputs]


def size_of(text: str, sizes: Mapping[str, int]) -> int:
    """Return a size such as `2*s0 + 1` as a number."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise CannotEvaluate(f"the size '{text}' has no number")

    try:
        return value(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise CannotEvaluate(f"'{text}' is no size") from error


def shape_of(type_: Type, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of a tensor as numbers."""
    return tuple(size_of(size, sizes) for size in type_.shape)


def find_op(name: str) -> Any:
    """Return the overload `namespace.op.overload`."""
    try:
        namespace, op, overload = _SAME_VALUES.get(name, name).split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (ValueError, AttributeError) as error:
        raise CannotEvaluate(f"there is no op {name} here") from error


def _run(node: Value, values: Mapping[str, Any], sizes: Mapping[str, int], real: Any) -> Any:
    assert node.expression is not None
    call = parse_call(node.expression.render({}))
    if call.op == "constant":
        return _constant(call, parse_types(node.type)[0], sizes, real)
    keywords = {k: _resolve(v, values, sizes, real) for k, v in call.keywords}
    arguments = [_resolve(a, values, sizes, real) for a in call.arguments]
    result = find_op(call.op)(*arguments, **keywords)
    if isinstance(result, tuple | list):
        return [_as_real(r, real) for r in result]
    return _as_real(result, real)


def _constant(call: Call, type_: Type, sizes: Mapping[str, int], real: torch.dtype) -> Tensor:
    (content,) = call.arguments
    assert isinstance(content, str)
    if not content.startswith("["):
        raise CannotEvaluate("a large constant is kept as a digest only")
    numbers = [
        float(n) if "." in n or "n" in n else n == "True" or int(n)
        for n in content[1:-1].replace("False", "0").split(", ")
        if n
    ]
    tensor = torch.tensor(numbers, dtype=DTYPES[type_.dtype])
    result: Tensor = _as_real(tensor.reshape(shape_of(type_, sizes)), real)
    return result


def _resolve(
    argument: Argument, values: Mapping[str, Any], sizes: Mapping[str, int], real: Any
) -> Any:
    if isinstance(argument, Ref):
        value = values[argument.name]
        return value if argument.item is None else value[argument.item]
    if isinstance(argument, tuple):
        return [_resolve(a, values, sizes, real) for a in argument]
    if isinstance(argument, Word):
        if argument.text in DTYPES:
            return real if argument.text == "f32" else DTYPES[argument.text]
        return _FORMATS.get(argument.text) or size_of(argument.text, sizes)
    return argument


def _as_real(value: Any, real: torch.dtype) -> Any:
    is_real = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    return value.to(real) if is_real else value
