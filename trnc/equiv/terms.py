"""Terms of the prover: a small core language over real tensors, built with sharing.

    In i                      input i of both graphs
    Lit c                     a scalar, an exact rational
    Map f x, Zip f x y        elementwise, with broadcasting: `add`, `mul`, `inv`, `not`, `lt`, ...
    Where c x y               elementwise choice
    Reshape x shape, Permute x order, Slice x dim start end, Cat dim x y, Expand x shape
    Reduce f x dim            over one dimension, which stays with size 1
    Matmul x y, Norm x w eps
    Attend name q new context attention over cached and new rows (`trnc.ops.attention`)
    Op name rows others       any other op; the first dimension of `rows` and of its result is the
                              token row, and a row of the result depends on that row of them only
    Get op i                  one of several results
    Row x                     one token row, the same one everywhere, as a tensor of one row
    At new context, Item a i  the context that a row attends in when it is a step of its own

Equality is over the reals: `f32` and `f64` are one, integers do not overflow, NaN does not occur.
A conversion to `f16`, `bf16` or an integer is a `Map`: it rounds, so it is part of the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

Dims: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Id:
    """A term of an arena."""

    number: int


@dataclass(frozen=True, slots=True)
class Order:
    """The argument of a Permute."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """A list of terms."""

    items: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """The terms `At new context`."""

    new: Terms
    context: Terms


Leaf: TypeAlias = "Id | Terms | Context | Order | Dims | Fraction | str | int"


@dataclass(slots=True)
class Arena:
    """Terms with their shapes, where these are known. Equal terms are one.

    `definitions` are terms that are equal because an op is defined so; `linear` names the ops that
    are linear in their only row operand.
    """

    terms: list[tuple[str, tuple[Leaf, ...]]] = field(default_factory=list)
    shapes: dict[int, Dims] = field(default_factory=dict)
    definitions: list[tuple[Id, Id]] = field(default_factory=list)
    linear: set[str] = field(default_factory=set)
    known: dict[tuple[str, tuple[Leaf, ...]], Id] = field(default_factory=dict)

    def make(self, head: str, *arguments: Leaf, shape: Dims | None = None) -> Id:
        """Return the term `head(arguments)`."""
        key = (head, arguments)
        if key not in self.known:
            self.known[key] = Id(len(self.terms))
            self.terms.append(key)
        term = self.known[key]
        if shape is not None:
            self.shapes.setdefault(term.number, shape)
        return term

    def shape(self, term: Id) -> Dims | None:
        """Return a term's shape, None where it is not known."""
        return self.shapes.get(term.number)

    def literal(self, value: float | Fraction) -> Id:
        """Return a scalar; infinities are names of their own."""
        try:
            return self.make("Lit", Fraction(value), shape=())
        except (OverflowError, ValueError):
            return self.make("Op", f"constant {value}", Terms(()), Terms(()), shape=())

    def map(self, name: str, x: Id, shape: Dims | None = None) -> Id:
        """Return `name(x)`, elementwise."""
        return self.make("Map", name, x, shape=shape if shape is not None else self.shape(x))

    def zip(self, name: str, x: Id, y: Id, shape: Dims | None = None) -> Id:
        """Return `name(x, y)`, elementwise; where both have one shape, so has the result."""
        if shape is None:
            shapes = [s for s in (self.shape(x), self.shape(y)) if s != ()]
            shape = shapes[0] if shapes and all(s == shapes[0] for s in shapes) else None
        return self.make("Zip", name, x, y, shape=shape)

    def slice(self, x: Id, dim: int, start: int, end: int) -> Id:
        """Return `x[..., start:end, ...]`."""
        shape = self.shape(x)
        assert shape is not None
        if start == 0 and shape[dim] == str(end):
            return x
        cut = (*shape[:dim], str(end - start), *shape[dim + 1 :])
        return self.make("Slice", x, dim, start, end, shape=cut)

    def cat(self, dim: int, parts: Sequence[Id]) -> Id:
        """Return the parts side by side, nested to the right."""
        first, *rest = parts
        if not rest:
            return first
        other = self.cat(dim, rest)
        return self.make("Cat", dim, first, other, shape=self._cat_shape(dim, first, other))

    def _cat_shape(self, dim: int, x: Id, y: Id) -> Dims | None:
        a, b = self.shape(x), self.shape(y)
        if a is None or b is None or not (a[dim].isdecimal() and b[dim].isdecimal()):
            return None
        return (*a[:dim], str(int(a[dim]) + int(b[dim])), *a[dim + 1 :])


def program_lines(arena: Arena) -> Iterator[str]:
    """Yield the arena as commands of egglog: term i is bound to `$ti`."""
    for number, (head, arguments) in enumerate(arena.terms):
        words = " ".join(_word(argument) for argument in arguments)
        yield f"(let $t{number} ({head} {words}))"
        if (shape := arena.shapes.get(number)) is not None:
            yield f"(set (shape $t{number}) {_word(shape)})"
    for name in sorted(arena.linear):
        yield f"(linear {_quoted(name)})"
    for a, b in arena.definitions:
        yield f"(union $t{a.number} $t{b.number})"


def _word(leaf: Leaf) -> str:
    if isinstance(leaf, Id):
        return f"$t{leaf.number}"
    if isinstance(leaf, Context):
        return f"(At {_word(leaf.new)} {_word(leaf.context)})"
    if isinstance(leaf, Terms):
        text = "(Nil)"
        for item in reversed(leaf.items):
            text = f"(Cons {_word(item)} {text})"
        return text
    if isinstance(leaf, Fraction):
        parts = (leaf.numerator, leaf.denominator)
        return f"(bigrat {_integer(parts[0])} {_integer(parts[1])})"
    return _vector(leaf) if isinstance(leaf, Order | tuple) else _plain(leaf)


def _vector(leaf: Order | Dims) -> str:
    words = map(str, leaf.dims) if isinstance(leaf, Order) else map(_quoted, leaf)
    text = " ".join(words)
    return f"(vec-of {text})" if text else "(vec-empty)"


def _plain(leaf: str | int) -> str:
    return _quoted(leaf) if isinstance(leaf, str) else str(leaf)


def _integer(value: int) -> str:
    return f'(from-string "{value}")'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
