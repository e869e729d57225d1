"""Random variations of a stage graph, to try the prover on: rewrites keep its function, mutations
change it.

Both work on the lines of a canonical text and know nothing of the prover's rules. A rewrite is an
identity of real arithmetic or of shapes that people write when they refactor; a mutation is one
slip: another op, constant, operand, slice or order of outputs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trnc.equiv.calls import Argument, Call, Ref, Type, Word, parse_call, parse_types
from trnc.equiv.text import Graph, Value, parse


@dataclass(frozen=True, slots=True)
class Place:
    """One line of a graph that is being edited, its call and the types of all values.

    `added` are lines that will be put in front of it.
    """

    graph: Graph
    value: Value
    call: Call
    types: Mapping[str, tuple[Type, ...]]
    dice: random.Random
    added: list[str] = field(default_factory=list)

    @property
    def type(self) -> str:
        """The value's type as it is printed, without strides."""
        return re.sub(r"\{[^}]*\}", "", self.value.type)

    @property
    def shape(self) -> tuple[str, ...]:
        """The shape of the value's first tensor."""
        return parse_types(self.value.type)[0].shape

    def words(self) -> list[str]:
        """The call's arguments as text."""
        return [written(argument) for argument in self.call.arguments]

    def operand_type(self, index: int) -> Type:
        """The type of an operand."""
        ref = self.call.arguments[index]
        assert isinstance(ref, Ref)
        return self.types[ref.name][ref.item or 0]

    def add(self, type_: str, op: str, *words: str) -> str:
        """Compute a new value in front of the line; return its name."""
        name = f"%{len(self.graph.nodes) + len(self.added) + _FIRST_NEW}"
        self.added.append(f"{name}: {type_} = {op}({', '.join(words)})")
        return name


_FIRST_NEW = 1000


def written(argument: Argument) -> str:
    """Return an argument as the text has it."""
    if isinstance(argument, Ref):
        return argument.name if argument.item is None else f"{argument.name}[{argument.item}]"
    if isinstance(argument, tuple):
        return f"[{', '.join(map(written, argument))}]"
    if isinstance(argument, Word):
        return argument.text
    return f'"{argument}"' if isinstance(argument, str) else repr(argument)


Edit = Callable[[Place], "str | None"]


def vary(text: str, edits: Sequence[Edit], dice: random.Random) -> tuple[str, str] | None:
    """Apply one random edit at one random line where one applies: (the edit's name, the text).

    None where no edit applies anywhere. A graph can be edited again and again.
    """
    graph, lines = parse(text), text.splitlines()
    types = {v.name: parse_types(v.type) for v in (*graph.inputs, *graph.nodes)}
    choices = [(value, edit) for value in graph.nodes for edit in edits]
    dice.shuffle(choices)
    for value, edit in choices:
        assert value.expression is not None
        place = Place(graph, value, parse_call(value.expression.render({})), types, dice)
        if (changed := edit(place)) is not None:
            line = value.line - 1
            lines[line : line + 1] = [*place.added, f"{value.name}: {value.type} = {changed}"]
            return edit.__name__, "\n".join(lines) + "\n"
    return None


ARITHMETIC = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")


def is_real(place: Place, *ops: str) -> bool:
    """Whether the line is one of these ops on f32 tensors, without keywords."""
    is_plain = place.call.op in ops and not place.call.keywords
    return is_plain and place.value.type.startswith("f32[")


def two_tensors(place: Place) -> bool:
    """Whether the first two arguments are there, and tensors."""
    first = place.call.arguments[:2]
    return len(first) == 2 and all(isinstance(a, Ref) for a in first)


# Mutations


def another_op(place: Place) -> str | None:
    """Call another op of the same signature."""
    others = {
        "aten.add.Tensor": ("aten.sub.Tensor", "aten.mul.Tensor", "aten.maximum.default"),
        "aten.sub.Tensor": ("aten.add.Tensor", "aten.mul.Tensor"),
        "aten.mul.Tensor": ("aten.add.Tensor", "aten.div.Tensor", "aten.maximum.default"),
        "aten.ge.Scalar": ("aten.lt.Scalar", "aten.le.Scalar", "aten.ne.Scalar"),
        "aten.clone.default": ("aten.abs.default", "aten.neg.default"),
    }
    if place.call.op not in others:
        return None
    return f"{place.dice.choice(others[place.call.op])}({', '.join(place.words())})"


def another_number(place: Place) -> str | None:
    """Change a real constant, a count or a flag of one of our ops."""
    if not place.call.op.startswith("trnc."):
        return None
    words = place.words()
    places = [
        i
        for i, a in enumerate(place.call.arguments)
        if isinstance(a, float) or (isinstance(a, bool) and place.call.op == "trnc.route.default")
    ]
    if not places:
        return None
    index = place.dice.choice(places)
    old = place.call.arguments[index]
    new = (not old) if isinstance(old, bool) else float(str(old)) * place.dice.choice((0.5, 3.0))
    words[index] = repr(new)
    return f"{place.call.op}({', '.join(words)})"


def another_operand(place: Place) -> str | None:
    """Read another value of the same type, one that is computed by then."""
    refs = [(i, a) for i, a in enumerate(place.call.arguments) if isinstance(a, Ref)]
    if not refs:
        return None
    index, old = place.dice.choice(refs)
    wanted = place.types[old.name][old.item or 0]
    options = [
        f"{value.name}[{item}]" if len(types) > 1 else value.name
        for value in (*place.graph.inputs, *place.graph.nodes)
        if value.line < place.value.line
        for types in (place.types[value.name],)
        for item, type_ in enumerate(types)
        if type_ == wanted and wanted.dtype != "u8"
    ]
    copies = _copies(place.graph)
    same = copies.get(written(old), written(old))
    others = [name for name in options if copies.get(name, name) != same]
    words = place.words()
    if not others:
        return None
    words[index] = place.dice.choice(others)
    if sorted(words[:2]) == sorted(place.words()[:2]) and place.call.op in ARITHMETIC:
        return None
    tail = "".join(f", {name}={written(value)}" for name, value in place.call.keywords)
    return f"{place.call.op}({', '.join(words)}{tail})"


def _copies(graph: Graph) -> dict[str, str]:
    """What each copy is a copy of."""
    calls = ((v.name, parse_call(v.expression.render({}))) for v in graph.nodes if v.expression)
    return {
        name: written(call.arguments[0]) for name, call in calls if call.op == "aten.clone.default"
    }


def swapped(place: Place) -> str | None:
    """Swap the operands of what does not commute, or two halves."""
    words = place.words()
    if place.call.op == "aten.sub.Tensor" and words[0] != words[1]:
        return f"aten.sub.Tensor({words[1]}, {words[0]})"
    if place.call.op == "aten.where.self":
        return f"aten.where.self({words[0]}, {words[2]}, {words[1]})"
    if place.call.op == "aten.cat.default":
        parts = place.call.arguments[0]
        assert isinstance(parts, tuple)
        first, second, *rest = (written(p) for p in parts)
        if place.types[_name(parts[0])] != place.types[_name(parts[1])]:
            return None
        dim = written(place.call.keyword("dim", 0))
        return f"aten.cat.default([{', '.join((second, first, *rest))}], dim={dim})"
    return None


def _name(argument: Argument) -> str:
    assert isinstance(argument, Ref)
    return argument.name


def left_out(place: Place) -> str | None:
    """Pass an operand on instead of computing with it."""
    if place.call.op not in (*ARITHMETIC, "trnc.rms_norm.default"):
        return None
    for index, argument in enumerate(place.call.arguments[:2]):
        if isinstance(argument, Ref) and place.operand_type(index).shape == place.shape:
            return f"aten.clone.default({place.words()[index]})"
    return None


def rounded(place: Place) -> str | None:
    """Round on the way: an f32 that passes through bf16, which is coarser than any cache."""
    if not is_real(place, *ARITHMETIC):
        return None
    full = place.add(place.type, place.call.op, *place.words())
    half = place.add(place.type.replace("f32", "bf16"), "aten._to_copy.default", full, "dtype=bf16")
    return f"aten._to_copy.default({half}, dtype=f32)"


MUTATIONS: tuple[Edit, ...] = (
    another_op,
    another_number,
    another_operand,
    swapped,
    left_out,
    rounded,
)
