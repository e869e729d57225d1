"""From a canonical text to terms of the prover: every op it knows becomes core terms.

An op that is not known stays whole, with its constants in its name: two calls of it are equal where
their operands are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

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
from trnc.equiv.terms import Arena, Dims, Id, Order, Terms
from trnc.equiv.text import Graph, Value

_REALS = ("f32", "f64")
_FLOATS = (*_REALS, "f16", "bf16")
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Site:
    """One call: its operands as terms, their types, and the type of its result."""

    arena: Arena
    call: Call
    values: Mapping[str, tuple[Id, ...]]
    types: Mapping[str, tuple[Type, ...]]
    result: tuple[Type, ...]

    @property
    def shape(self) -> Dims:
        """The shape of the only result."""
        return self.result[0].shape

    def term(self, argument: Argument) -> Id:
        """Return an operand, or a number as a scalar."""
        if isinstance(argument, Ref):
            return self.values[argument.name][argument.item or 0]
        if isinstance(argument, bool | int | float):
            return self.arena.literal(argument)
        raise KeyError(argument)

    def type(self, argument: Argument) -> Type:
        """Return an operand's type; a number is a real scalar."""
        if isinstance(argument, Ref):
            return self.types[argument.name][argument.item or 0]
        return Type("i64" if isinstance(argument, int) else "f32", ())

    def operand(self, position: int) -> Id:
        """Return the term of one argument."""
        return self.term(self.call.arguments[position])

    def operand_type(self, position: int) -> Type:
        """Return the type of one argument."""
        return self.type(self.call.arguments[position])

    def dim(self, value: Argument, rank: int | None = None) -> int:
        """Return a dimension, counted from the front."""
        assert isinstance(value, int)
        return value % (self.operand_type(0).rank if rank is None else rank)


Rule = Callable[[Site], "Id | tuple[Id, ...] | None"]


def lower(graph: Graph, arena: Arena, inputs: Sequence[Id]) -> tuple[Id, ...]:
    """Return the outputs of a graph as terms over `inputs`."""
    _, outputs = lower_all(graph, arena, inputs)
    return outputs


def lower_all(
    graph: Graph, arena: Arena, inputs: Sequence[Id]
) -> tuple[dict[str, tuple[Id, ...]], tuple[Id, ...]]:
    """Return every value by its name, and the outputs."""
    types = {v.name: parse_types(v.type) for v in (*graph.inputs, *graph.nodes)}
    values: dict[str, tuple[Id, ...]] = {}
    for value, term in zip(graph.inputs, inputs, strict=True):
        values[value.name] = (term,)
        arena.shapes.setdefault(term.number, types[value.name][0].shape)
    for node in graph.nodes:
        values[node.name] = _lower_node(node, arena, values, types)
    outputs = []
    for output in graph.outputs:
        ref = parse_argument(output.render({}))
        assert isinstance(ref, Ref)
        outputs.append(values[ref.name][ref.item or 0])
    return values, tuple(outputs)


def graph_inputs(graph: Graph, arena: Arena) -> tuple[Id, ...]:
    """Return a term for each input of a graph."""
    shapes = (parse_types(value.type)[0].shape for value in graph.inputs)
    return tuple(arena.make("In", i, shape=shape) for i, shape in enumerate(shapes))


def _lower_node(
    node: Value,
    arena: Arena,
    values: Mapping[str, tuple[Id, ...]],
    types: Mapping[str, tuple[Type, ...]],
) -> tuple[Id, ...]:
    assert node.expression is not None
    call = parse_call(node.expression.render({}))
    site = Site(arena, call, values, types, types[node.name])
    rule = _RULES.get(call.op)
    result = rule(site) if rule else None
    if result is None:
        result = _opaque(site)
    terms = result if isinstance(result, tuple) else (result,)
    for term, type_ in zip(terms, site.result, strict=True):
        arena.shapes.setdefault(term.number, type_.shape)
    return terms


# Ops that stay whole

# How many leading operands are token rows; see `Op` in trnc.equiv.terms.
ROW_COUNTS = {
    "trnc.linear.default": 1,
    "trnc.head_linear.default": 1,
    "trnc.embedding.default": 1,
    "trnc.route.default": 1,
    "trnc.experts.default": 3,
    "trnc.quantize_kv.default": 1,
    "trnc.apply_mask.default": 2,
    "trnc.logit_bias.default": 3,
    "trnc.penalize.default": 6,
    "trnc.sample_greedy.default": 1,
    "trnc.sample.default": 7,
    "trnc.logprobs.default": 2,
}


def _opaque(site: Site) -> tuple[Id, ...]:
    refs, name = _refs_and_name(site.call)
    operands = tuple(site.term(ref) for ref in refs)
    count = ROW_COUNTS.get(site.call.op, 0)
    return _results(site, name, operands[:count], operands[count:])


def _results(site: Site, name: str, rows: Sequence[Id], others: Sequence[Id]) -> tuple[Id, ...]:
    op = site.arena.make("Op", name, Terms(tuple(rows)), Terms(tuple(others)))
    if len(site.result) == 1:
        return (op,)
    return tuple(site.arena.make("Get", op, i) for i in range(len(site.result)))


def _refs_and_name(call: Call) -> tuple[list[Ref], str]:
    """The operands in order, and the call with `#` in their places."""
    refs: list[Ref] = []

    def text(argument: Argument) -> str:
        if isinstance(argument, Ref):
            refs.append(argument)
            return "#"
        if isinstance(argument, tuple):
            return f"[{', '.join(map(text, argument))}]"
        if isinstance(argument, str):
            return json.dumps(argument)
        return argument.text if isinstance(argument, Word) else repr(argument)

    words = [text(a) for a in call.arguments]
    words += [f"{name}={text(value)}" for name, value in call.keywords]
    return refs, f"{call.op}({', '.join(words)})"


# Arithmetic


def _add(site: Site, sign: int = 1) -> Id | None:
    if "bool" in (site.operand_type(0).dtype, site.operand_type(1).dtype):
        return None
    alpha = site.call.keyword("alpha", 1)
    assert isinstance(alpha, int | float)
    return _sum(site, site.operand(0), site.operand(1), sign * Fraction(alpha))


def _sum(site: Site, x: Id, y: Id, factor: Fraction) -> Id:
    """x + factor * y."""
    arena = site.arena
    scaled = y if factor == 1 else arena.zip("mul", arena.literal(factor), y)
    return arena.zip("add", x, scaled, site.shape)


def _sub(site: Site) -> Id | None:
    return _add(site, -1)


def _rsub(site: Site) -> Id:
    alpha = site.call.keyword("alpha", 1)
    assert isinstance(alpha, int | float)
    return _sum(site, site.operand(1), site.operand(0), -Fraction(alpha))


def _mul(site: Site) -> Id | None:
    if site.result[0].dtype == "bool":
        return None
    return site.arena.zip("mul", site.operand(0), site.operand(1), site.shape)


def _div(site: Site) -> Id | None:
    if site.call.keywords:
        return None
    inverse = _inverse(site, site.operand(1))
    return site.arena.zip("mul", site.operand(0), inverse, site.shape)


def _inverse(site: Site, x: Id) -> Id:
    head, arguments = site.arena.terms[x.number]
    if head == "Lit" and isinstance(arguments[0], Fraction) and arguments[0]:
        return site.arena.literal(1 / arguments[0])
    return site.arena.map("inv", x)


def _negative(site: Site) -> Id:
    return site.arena.zip("mul", site.arena.literal(-1), site.operand(0))


def _pow(site: Site) -> Id | None:
    x, exponent = site.operand(0), site.call.arguments[1]
    arena = site.arena
    if site.operand_type(0).dtype not in _FLOATS:
        return None
    powers: dict[float, Callable[[], Id]] = {
        1: lambda: x,
        2: lambda: arena.zip("mul", x, x),
        3: lambda: arena.zip("mul", x, arena.zip("mul", x, x)),
        0.5: lambda: arena.map("sqrt", x),
        -0.5: lambda: arena.map("inv", arena.map("sqrt", x)),
        -1: lambda: arena.map("inv", x),
    }
    return powers[exponent]() if isinstance(exponent, int | float) and exponent in powers else None


def _silu(site: Site) -> Id:
    x = site.operand(0)
    return site.arena.zip("mul", x, site.arena.map("sigmoid", x))


def _silu_mul(site: Site) -> Id | None:
    x, arena = site.operand(0), site.arena
    width = site.operand_type(0).shape[-1]
    if not width.isdecimal():
        return None
    half, dim = int(width) // 2, site.operand_type(0).rank - 1
    gate, up = arena.slice(x, dim, 0, half), arena.slice(x, dim, half, 2 * half)
    return arena.zip("mul", arena.zip("mul", gate, arena.map("sigmoid", gate)), up)


def _rms_norm(site: Site) -> Id:
    x, weight = site.operand(0), site.operand(1)
    arena, eps = site.arena, site.call.arguments[2]
    assert isinstance(eps, int | float)
    norm = arena.make("Norm", x, weight, arena.literal(eps))
    *rest, width = site.shape
    if width.isdecimal():
        row = (*rest, "1")
        mean = arena.make("Reduce", "sum", arena.zip("mul", x, x), len(rest), shape=row)
        mean = arena.zip("mul", arena.literal(Fraction(1, int(width))), mean)
        scale = arena.map("inv", arena.map("sqrt", arena.zip("add", mean, arena.literal(eps))))
        scaled = arena.zip("mul", x, scale, site.shape)
        arena.definitions.append((norm, arena.zip("mul", scaled, weight, site.shape)))
    return norm


def _unary(name: str) -> Rule:
    return lambda site: site.arena.map(name, site.operand(0))


def _binary(name: str) -> Rule:
    return lambda site: site.arena.zip(name, site.operand(0), site.operand(1), site.shape)


def _on_bools(rule: Rule) -> Rule:
    return lambda site: rule(site) if site.operand_type(0).dtype == "bool" else None


def _compare(*, swap: bool, negate: bool) -> Rule:
    """All four orders as `lt`: a > b is b < a, a >= b is not a < b."""

    def rule(site: Site) -> Id:
        a, b = site.operand(0), site.operand(1)
        less = site.arena.zip("lt", *((b, a) if swap else (a, b)), site.shape)
        return site.arena.map("not", less) if negate else less

    return rule


def _not_equal(site: Site) -> Id:
    equal = site.arena.zip("eq", site.operand(0), site.operand(1), site.shape)
    return site.arena.map("not", equal)


def _clamp(site: Site) -> Id | None:
    x = site.operand(0)
    bounds = [*site.call.arguments[1:], None, None][:2]
    low = site.call.keyword("min", bounds[0])
    high = site.call.keyword("max", bounds[1])
    if low is not None:
        x = site.arena.zip("max", x, site.term(low), site.shape)
    if high is not None:
        x = site.arena.zip("min", x, site.term(high), site.shape)
    return x


def _relu(site: Site) -> Id:
    return site.arena.zip("max", site.operand(0), site.arena.literal(0))


def _where(site: Site) -> Id:
    choice = tuple(site.operand(i) for i in range(3))
    return site.arena.make("Where", *choice, shape=site.shape)


def _masked_fill(site: Site) -> Id:
    x, mask, value = (site.operand(i) for i in range(3))
    return site.arena.make("Where", mask, value, x, shape=site.shape)


def _convert(site: Site) -> Id | None:
    """A conversion between reals changes nothing; another one rounds."""
    wanted = site.call.keyword("dtype", site.call.arguments[-1])
    if not isinstance(wanted, Word):
        return None
    before, after = site.operand_type(0).dtype, site.result[0].dtype
    if before == after or (after in _REALS and before in _FLOATS):
        return site.operand(0)
    return site.arena.map(f"to {'f32' if after in _REALS else after}", site.operand(0))


def _same(site: Site) -> Id:
    return site.operand(0)


# Shapes


def _reshape(site: Site) -> Id:
    x, shape = site.operand(0), site.shape
    return x if site.arena.shape(x) == shape else site.arena.make("Reshape", x, shape, shape=shape)


def _permute(site: Site) -> Id:
    order = site.call.arguments[1]
    assert isinstance(order, tuple)
    dims = tuple(site.dim(d) for d in order)
    return site.arena.make("Permute", site.operand(0), Order(dims), shape=site.shape)


def _transpose(site: Site) -> Id:
    rank = site.operand_type(0).rank
    pair = site.call.arguments[1:3] or (rank - 2, rank - 1)
    a, b = (site.dim(d) for d in pair)
    dims = list(range(rank))
    dims[a], dims[b] = dims[b], dims[a]
    return site.arena.make("Permute", site.operand(0), Order(tuple(dims)), shape=site.shape)


def _expand(site: Site) -> Id:
    return site.arena.make("Expand", site.operand(0), site.shape, shape=site.shape)


def _slice(site: Site) -> Id | None:
    names = ("dim", "start", "end", "step")
    given = dict(zip(names, site.call.arguments[1:], strict=False)) | dict(site.call.keywords)
    dim = site.dim(given.get("dim", 0))
    size = site.operand_type(0).shape[dim]
    start, end = given.get("start") or 0, given.get("end", _LARGEST)
    end = _LARGEST if end is None else end
    is_plain = isinstance(start, int) and isinstance(end, int) and given.get("step", 1) == 1
    if not is_plain or not size.isdecimal():
        return None
    first, last, _ = slice(start, end).indices(int(size))
    return site.arena.slice(site.operand(0), dim, first, max(first, last))


def _select(site: Site) -> Id | None:
    dim, index = site.dim(site.call.arguments[1]), site.call.arguments[2]
    size = site.operand_type(0).shape[dim]
    if not isinstance(index, int) or not size.isdecimal():
        return None
    first = index % int(size)
    row = site.arena.slice(site.operand(0), dim, first, first + 1)
    return site.arena.make("Reshape", row, site.shape, shape=site.shape)


def _split(site: Site) -> tuple[Id, ...] | None:
    dim = site.dim(site.call.keyword("dim", (*site.call.arguments, 0)[2]))
    sizes = [type_.shape[dim] for type_ in site.result]
    if not all(size.isdecimal() for size in sizes):
        return None
    parts, start = [], 0
    for size in map(int, sizes):
        parts.append(site.arena.slice(site.operand(0), dim, start, start + size))
        start += size
    return tuple(parts)


def _cat(site: Site) -> Id:
    parts = site.call.arguments[0]
    assert isinstance(parts, tuple)
    dim = site.call.keyword("dim", (*site.call.arguments, 0)[1])
    return site.arena.cat(site.dim(dim, len(site.shape)), [site.term(part) for part in parts])


def _reduce(name: str) -> Rule:
    def rule(site: Site) -> Id | None:
        x, type_ = site.operand(0), site.operand_type(0)
        dims = site.call.arguments[1]
        dims = dims if isinstance(dims, tuple) else (dims,)
        shape = list(type_.shape)
        if not dims or type_.dtype not in _FLOATS:
            return None
        count = Fraction(1)
        for dim in (site.dim(d) for d in dims):
            if name == "mean" and not shape[dim].isdecimal():
                return None
            count *= int(shape[dim]) if name == "mean" else 1
            shape[dim] = "1"
            kind = "max" if name == "max" else "sum"
            x = site.arena.make("Reduce", kind, x, dim, shape=tuple(shape))
        if count != 1:
            x = site.arena.zip("mul", site.arena.literal(1 / count), x)
        if tuple(shape) != site.shape:
            x = site.arena.make("Reshape", x, site.shape, shape=site.shape)
        return x

    return rule


def _matmul(site: Site) -> Id | None:
    if site.operand_type(0).rank != 2 or site.operand_type(1).rank != 2:
        return None
    return site.arena.make("Matmul", site.operand(0), site.operand(1), shape=site.shape)


def _addmm(site: Site) -> Id | None:
    if site.call.keywords:
        return None
    bias, x, y = (site.operand(i) for i in range(3))
    product = site.arena.make("Matmul", x, y, shape=site.shape)
    return site.arena.zip("add", bias, product, site.shape)


def _full(site: Site) -> Id | None:
    value = (
        site.call.arguments[1]
        if site.call.op != "aten.scalar_tensor.default"
        else site.call.arguments[0]
    )
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return None
    return _filled(site, value)


def _filled(site: Site, value: float) -> Id:
    literal = site.arena.literal(value)
    return site.arena.make("Expand", literal, site.shape, shape=site.shape)


def _constant(site: Site) -> Id | None:
    (content,) = site.call.arguments
    assert isinstance(content, str)
    if "," in content or not content.startswith("[") or site.result[0].dtype == "bool":
        return site.arena.make("Op", f"{site.result[0].dtype} {content}", Terms(()), Terms(()))
    return _filled(site, float(content[1:-1]))


# Ours


def _linear(site: Site) -> Id:
    x, weight, bias, format, width = site.call.arguments
    name = f"trnc.linear {format} {width}"
    site.arena.linear.add(name)
    terms = Terms((site.term(x),)), Terms((site.term(weight),))
    product = site.arena.make("Op", name, *terms, shape=site.shape)
    return product if bias is None else site.arena.zip("add", product, site.term(bias), site.shape)


def _index(site: Site) -> Id | None:
    """Rows of a table by one index."""
    table, indexes = site.call.arguments
    if not isinstance(indexes, tuple) or len(indexes) != 1 or site.type(indexes[0]).rank != 1:
        return None
    terms = Terms((site.term(indexes[0]),)), Terms((site.term(table),))
    return site.arena.make("Op", "take", *terms, shape=site.shape)


def _attend(site: Site) -> Id:
    refs, name = _refs_and_name(site.call)
    count = 3 if site.call.op == "trnc.paged_attention.default" else 2  # q and what is new
    q, *terms = (site.term(ref) for ref in refs)
    new, context = Terms(tuple(terms[: count - 1])), Terms(tuple(terms[count - 1 :]))
    return site.arena.make("Attend", name, q, new, context, shape=site.shape)


_UNARY = ("exp", "log", "sigmoid", "tanh", "sqrt", "abs", "sin", "cos", "erf", "floor", "round")
_RULES: Mapping[str, Rule] = {
    **{f"aten.{name}.default": _unary(name) for name in _UNARY},
    **{
        f"aten.{op}.{o}": rule
        for o in ("Tensor", "Scalar")
        for op, rule in {
            "add": _add,
            "sub": _sub,
            "rsub": _rsub,
            "mul": _mul,
            "div": _div,
            "lt": _compare(swap=False, negate=False),
            "gt": _compare(swap=True, negate=False),
            "ge": _compare(swap=False, negate=True),
            "le": _compare(swap=True, negate=True),
            "eq": _binary("eq"),
            "ne": _not_equal,
            "bitwise_and": _on_bools(_binary("and")),
            "bitwise_or": _on_bools(_binary("or")),
        }.items()
    },
    "aten.neg.default": _negative,
    "aten.reciprocal.default": lambda site: _inverse(site, site.operand(0)),
    "aten.rsqrt.default": lambda s: s.arena.map("inv", s.arena.map("sqrt", s.operand(0))),
    "aten.square.default": lambda s: s.arena.zip("mul", s.operand(0), s.operand(0)),
    "aten.pow.Tensor_Scalar": _pow,
    "aten.silu.default": _silu,
    "aten.relu.default": _relu,
    "aten.maximum.default": _binary("max"),
    "aten.minimum.default": _binary("min"),
    "aten.logical_not.default": _on_bools(_unary("not")),
    "aten.bitwise_not.default": _on_bools(_unary("not")),
    "aten.logical_and.default": _on_bools(_binary("and")),
    "aten.logical_or.default": _on_bools(_binary("or")),
    "aten.clamp.default": _clamp,
    **{f"aten.where.{o}": _where for o in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    **{f"aten.masked_fill.{o}": _masked_fill for o in ("Scalar", "Tensor")},
    **{f"aten.{op}": _convert for op in ("_to_copy.default", "to.dtype")},
    **{f"aten.{op}.default": _same for op in ("clone", "contiguous", "alias", "detach")},
    **{
        f"aten.{op}": _reshape
        for op in (
            "view.default",
            "reshape.default",
            "_unsafe_view.default",
            "flatten.using_ints",
            "unflatten.int",
            "unsqueeze.default",
            "squeeze.dim",
            "squeeze.dims",
            "squeeze.default",
        )
    },
    "aten.permute.default": _permute,
    **{f"aten.{op}": _transpose for op in ("transpose.int", "t.default", "mT.default")},
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    **{
        f"aten.{op}": _split for op in ("split_with_sizes.default", "split.Tensor", "chunk.default")
    },
    "aten.cat.default": _cat,
    "aten.sum.dim_IntList": _reduce("sum"),
    "aten.mean.dim": _reduce("mean"),
    "aten.amax.default": _reduce("max"),
    **{f"aten.{op}.default": _matmul for op in ("mm", "matmul")},
    "aten.addmm.default": _addmm,
    "aten.full.default": _full,
    "aten.full_like.default": _full,
    "aten.scalar_tensor.default": _full,
    "constant": _constant,
    "trnc.silu_mul.default": _silu_mul,
    "trnc.rms_norm.default": _rms_norm,
    "trnc.linear.default": _linear,
    "aten.index.Tensor": _index,
    "trnc.paged_attention.default": _attend,
    "trnc.latent_attention.default": _attend,
}
