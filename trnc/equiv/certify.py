"""Certifying the prover's rules: both sides on random tensors in f64, and arithmetic by SMT.

What is evaluated is the rule's own text, so a rule cannot be certified as another one than egglog
runs. Sizes, shapes and numbers are drawn anew for each seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trnc.equiv.calls import Ref, parse_call
from trnc.equiv.draw import random_packed, random_sequences
from trnc.equiv.evaluate import find_op
from trnc.equiv.rules import Rule, with_constants
from trnc.ops.library import reference_mode
from trnc.ops.packing import packed_shape

Expression: TypeAlias = "str | list[Expression]"
Environment: TypeAlias = dict[str, Any]

TOLERANCE = 1e-9
_TOKEN = re.compile(r'\(|\)|"(?:[^"\\]|\\.)*"|[^\s()"]+')
_ZIPS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "lt": torch.lt,
    "eq": torch.eq,
    "and": torch.logical_and,
    "or": torch.logical_or,
}
_MAPS: Mapping[str, Callable[[Any], Any]] = {
    "inv": torch.reciprocal,
    "not": torch.logical_not,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "to f16": lambda x: x.half().double(),
    "to bf16": lambda x: x.bfloat16().double(),
    "to f32": lambda x: x.double(),
}
_NAMES = ("add", "mul", "max", "min", "and", "or")
_INTEGERS = {"trnc.apply_mask.default": 1}  # the operand that must be integers; terms are reals


@dataclass(frozen=True, slots=True)
class Failure:
    """A rule whose sides differ, and the values of its variables that show it."""

    rule: Rule
    environment: Environment


def certify(rule: Rule, seeds: int = 8) -> Failure | None:
    """Evaluate both sides at `seeds` random draws; None if they agree wherever `when` holds.

    Raises:
        AssertionError: no draw fulfilled the conditions, so nothing was certified.
    """
    fulfilled = 0
    for seed in range(seeds):
        environment = draw(rule, seed)
        if not _all_hold(rule, environment):
            continue
        fulfilled += 1
        left, right = (
            value_of(parse(with_constants(side)), environment) for side in (rule.left, rule.right)
        )
        if not agree(left, right):
            return Failure(rule, environment)
    assert fulfilled, f"rule '{rule.name}': no draw fulfils {rule.when}"
    return None


def _all_hold(rule: Rule, environment: Environment) -> bool:
    return all(_holds(parse(with_constants(c)), environment) for c in rule.when)


def agree(left: Any, right: Any) -> bool:
    """Whether two values are equal but for f64 rounding; shapes must be equal."""
    if isinstance(left, list):
        return len(left) == len(right) and all(map(agree, left, right))
    if not isinstance(left, Tensor):
        return bool(left == right)
    if left.shape != right.shape:
        return False
    return torch.allclose(left.double(), right.double(), TOLERANCE, TOLERANCE, equal_nan=True)


def parse(text: str) -> Expression:
    """Parse one s-expression."""
    stack: list[list[Expression]] = [[]]
    for token in _TOKEN.findall(text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    return stack[0][0]


# Values


def value_of(expression: Expression, env: Environment) -> Any:
    """Return the value of a side of a rule."""
    if isinstance(expression, str):
        if expression.startswith('"'):
            return expression[1:-1]
        return int(expression) if expression.lstrip("-").isdecimal() else env[expression]
    head, *rest = expression
    assert isinstance(head, str)
    arguments = [value_of(e, env) for e in rest]
    if head == "Row":
        return arguments[0][env["row"] : env["row"] + 1]
    if head == "Rows":
        return [x[env["row"] : env["row"] + 1] for x in arguments[0]]
    if head == "At":
        return context_at(arguments[0], arguments[1], env["row"])
    return _HEADS[head](*arguments)


def _holds(expression: Expression, env: Environment) -> bool:
    assert isinstance(expression, list)
    head, *rest = expression
    values = [value_of(e, env) for e in rest]
    if head == "commutes":
        return values[0] in (*_NAMES, "eq")
    if head == "associates":
        return values[0] in _NAMES
    if head == "linear":
        return str(values[0]).startswith("trnc.linear ")
    a, b = values
    return bool(
        {"=": a == b, "!=": a != b}.get(str(head))
        if head in ("=", "!=")
        else a < b
        if head == "<"
        else a > b
    )


def _norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _reduce(name: str, x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, keepdim=True) if name == "sum" else x.amax(dim, keepdim=True)


def _op(name: str, rows: list[Tensor], others: list[Tensor]) -> Any:
    if name.startswith("trnc.linear "):
        _, format, width = name.split(" ")
        with reference_mode():
            return find_op("trnc.linear.default")(rows[0], others[0], None, format, int(width))
    return _call(name, [*rows, *others])


def _call(name: str, operands: list[Tensor]) -> Any:
    """Run `op(#, #, 0.5)` with operands in the places of `#`."""
    count = iter(range(len(operands)))
    call = parse_call(re.sub("#", lambda _: f"${next(count)}", name))
    if (position := _INTEGERS.get(call.op)) is not None:
        operands[position] = operands[position].to(torch.int32)
    arguments = [operands[int(a.name[1:])] if isinstance(a, Ref) else a for a in call.arguments]
    with reference_mode():
        result = find_op(call.op)(*arguments)
    return list(result) if isinstance(result, tuple) else result


def _attend(name: str, q: Tensor, new: list[Tensor], context: list[Tensor]) -> Tensor:
    result: Tensor = _call(name, [q, *new, *context])
    return result


def context_at(new: list[Tensor], context: list[Tensor], row: int) -> list[Tensor]:
    """The context in which a token row is a step of its own.

    That is the pages after the earlier rows of its sequence were written, the sequence's block
    table, and its position.
    """
    *pages, tables, sequences = (x.clone() for x in context)
    for index, (first, count, start) in enumerate(sequences.tolist()):
        if first <= row < first + count:
            before = torch.tensor([[first, row - first, start]], dtype=torch.int32)
            table = tables[index : index + 1]
            op = "trnc.kv_write.default" if len(pages) == 2 else "trnc.latent_write.default"
            with reference_mode():
                find_op(op)(*pages, *new, table, before)
            own = torch.tensor([[0, 1, start + row - first]], dtype=torch.int32)
            return [*pages, table, own]
    return [*pages, tables[:1], torch.zeros(1, 3, dtype=torch.int32)]


_HEADS: Mapping[str, Callable[..., Any]] = {
    "bigrat": Fraction,
    "from-string": int,
    "Lit": lambda value: torch.tensor(float(value), dtype=torch.float64),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "to-string": str,
    "vec-of": lambda *items: tuple(items),
    "vec-get": lambda vector, index: vector[index],
    "vec-set": lambda vector, index, item: (*vector[:index], item, *vector[index + 1 :]),
    "vec-length": len,
    "shape": lambda x: tuple(str(size) for size in x.shape),
    "Map": lambda name, x: _MAPS[name](x),
    "Zip": lambda name, x, y: _ZIPS[name](x, y),
    "Where": torch.where,
    "Reshape": lambda x, shape: x.reshape([int(size) for size in shape]),
    "Permute": lambda x, order: x.permute(order),
    "Slice": lambda x, dim, start, end: x.narrow(dim, start, end - start),
    "Cat": lambda dim, x, y: torch.cat([x, y], dim),
    "Expand": lambda x, shape: x.expand([int(size) for size in shape]).clone(),
    "Reduce": _reduce,
    "Matmul": torch.matmul,
    "Norm": _norm,
    "Attend": _attend,
    "Op": _op,
    "Get": lambda results, index: results[index],
    "Nil": list,
    "Cons": lambda first, rest: [first, *rest],
    "Item": lambda items, index: items[index],
}


# Draws


def draw(rule: Rule, seed: int) -> Environment:
    """Return random values of a rule's variables."""
    dice = random.Random(f"{rule.name} {seed}")
    generator = torch.Generator().manual_seed(seed)
    sizes = dict(zip("ABCD", dice.sample(range(2, 6), 4), strict=True))
    sizes |= {"E": dice.randint(5, 8), "L": 32, "T": dice.randint(3, 5)}
    env: Environment = {"row": dice.randrange(sizes["T"])}
    if rule.draw == "attention":
        return env | _attention(dice, generator)
    for word in rule.draw.split():
        name, _, kinds = word.partition(":")
        letter, _, inside = dice.choice(kinds.split("|")).partition("[")
        dims = [_size(text, sizes) for text in inside.removesuffix("]").split(",") if text]
        env[name] = _DRAWS[letter](dims, dice, generator)
    return _as_bools(env) if env.get("f") in ("and", "or") else env


def _as_bools(env: Environment) -> Environment:
    """Make the operands of a logical operation what it takes."""
    return {k: v > 0 if isinstance(v, Tensor) else v for k, v in env.items()}


def _size(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate `A*B`, `E-2`, `B+C`, a letter or a number."""
    for sign, apply in (("*", int.__mul__), ("+", int.__add__), ("-", int.__sub__)):
        if sign in text:
            a, b = text.split(sign)
            return int(apply(_size(a, sizes), _size(b, sizes)))
    return sizes[text] if text in sizes else int(text)


def _normal(dims: list[int], dice: random.Random, generator: torch.Generator) -> Tensor:
    del dice
    return torch.randn(dims, generator=generator, dtype=torch.float64)


def _ids(dims: list[int], dice: random.Random, generator: torch.Generator) -> Tensor:
    del dice
    return torch.randint(-1, 5, dims, generator=generator).to(torch.int32)


def _penalties(dims: list[int], dice: random.Random, generator: torch.Generator) -> list[Tensor]:
    """What `trnc.ops.penalize` takes after the ids: counts, and three factors of each row."""
    rows = [_normal(dims[:1], dice, generator) for _ in range(3)]
    return [_ids(dims, dice, generator).abs(), rows[0].abs() + 0.1, *rows[1:]]


_ROUTE = "trnc.route.default(#, #, 1, 1, 2, True, 2.5)"
_DRAWS: Mapping[str, Callable[[list[int], random.Random, torch.Generator], Any]] = {
    "f": _normal,
    "p": lambda dims, dice, g: _normal(dims, dice, g).abs() + 0.1,
    "b": lambda dims, dice, g: _normal(dims, dice, g) > 0,
    "q": lambda dims, dice, g: Fraction(dice.randint(-9, 9), dice.randint(1, 9)),  # noqa: ARG005
    "eps": lambda dims, dice, g: torch.tensor(dice.random(), dtype=torch.float64),  # noqa: ARG005
    "i": lambda dims, dice, g: dims[0],  # noqa: ARG005
    "d": lambda dims, dice, g: tuple(str(size) for size in dims),  # noqa: ARG005
    "o": lambda dims, dice, g: tuple(dims),  # noqa: ARG005
    "name": lambda dims, dice, g: dice.choice(_NAMES),  # noqa: ARG005
    "map": lambda dims, dice, g: dice.choice(("exp", "sigmoid", "tanh", "to f16")),  # noqa: ARG005
    "reduce": lambda dims, dice, g: dice.choice(("sum", "max")),  # noqa: ARG005
    "ids": _ids,
    "linear": lambda dims, dice, g: "trnc.linear f32 7",  # noqa: ARG005
    "weight": lambda dims, dice, g: [random_packed(packed_shape("f32", 7, 32), "f32", g)],  # noqa: ARG005
    "route": lambda dims, dice, g: _ROUTE,  # noqa: ARG005
    "correction": lambda dims, dice, g: [_normal(dims, dice, g)],
    "none": lambda dims, dice, g: [],  # noqa: ARG005
    "penalties": _penalties,
    "list": lambda dims, dice, g: [_normal(dims, dice, g) for _ in range(2)],
    "list3": lambda dims, dice, g: [_normal(dims, dice, g) for _ in range(3)],
    "list4": lambda dims, dice, g: [_normal(dims, dice, g) for _ in range(4)],
}


def _attention(dice: random.Random, generator: torch.Generator) -> Environment:
    """A step over pages that no two sequences share, as in serving; grouped or latent."""
    rows, size, blocks, heads, width = 3, 4, 3, 2, 8
    tokens = dice.randint(3, 6)
    tables = torch.randperm(rows * blocks, generator=generator).to(torch.int32).view(rows, blocks)
    context = [tables, random_sequences(rows, tokens, size * blocks, dice)]
    q = torch.randn(tokens, 4, width, generator=generator, dtype=torch.float64)

    def halves(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half()

    pages = rows * blocks
    if dice.random() < 0.5:
        name = f"trnc.latent_attention.default({'#, ' * 5}0.3, 5)"
        new, cached = [halves(tokens, width)], [halves(pages, size, width)]
    else:
        name = f"trnc.paged_attention.default({'#, ' * 7}0.3)"
        new = [halves(tokens, heads, width) for _ in range(2)]
        cached = [halves(pages, heads, width, size), halves(pages, heads, size, width)]
    return {"o": name, "q": q, "n": new, "c": [*cached, *context], "row": dice.randrange(tokens)}


# SMT


def proved_by_smt(rule: Rule) -> bool | None:
    """Prove a rule of arithmetic for all real numbers; None where it is no such rule.

    Needs z3-solver. A rule over a named operation is proved for each operation it is for.
    """
    import z3

    sides = [parse(with_constants(side)) for side in (rule.left, rule.right)]
    if not all(head in _SCALAR_HEADS for side in sides for head in _heads(side)):
        return None
    kinds = dict(word.split(":") for word in rule.draw.split())
    has_name = "name" in kinds.values()
    for name in _NAMES if has_name else ("",):
        is_logic = name in ("and", "or")
        env = {}
        for variable, kind in kinds.items():
            is_bool = kind.startswith("b") or (is_logic and kind.startswith("f"))
            env[variable] = z3.Bool(variable) if is_bool else z3.Real(variable)
        solver = z3.Solver()
        solver.add(*(env[v] != 0 for v, kind in kinds.items() if kind.startswith("p")))
        solver.add(*(env[c.split()[1]] != 0 for c in rule.when if c.startswith("(!= ")))
        env |= {variable: name for variable, kind in kinds.items() if kind == "name"}
        left, right = (_formula(side, env, z3) for side in sides)
        solver.add(left != right)
        if solver.check() != z3.unsat:
            return False
    return True


_SCALAR_HEADS = {"Zip", "Map", "Where", "Lit", "bigrat", "from-string", "+", "*", "/"}
_SCALAR_MAPS = {'"inv"', '"not"', '"to f32"'}


def _heads(expression: Expression) -> Iterator[str]:
    """The constructors of a term; a function that SMT does not know counts as one of its own."""
    if isinstance(expression, list):
        head = expression[0]
        assert isinstance(head, str)
        yield "function" if head == "Map" and expression[1] not in _SCALAR_MAPS else head
        for item in expression[1:]:
            yield from _heads(item)


def _formula(expression: Expression, env: Mapping[str, Any], z3: Any) -> Any:
    """A term as a formula of its variables."""
    if isinstance(expression, str):
        return expression[1:-1] if expression.startswith('"') else env[expression]
    head, *rest = expression
    if head == "bigrat":
        return z3.RealVal(str(value_of(expression, {})))
    operands = [_formula(e, env, z3) for e in rest]
    if head in ("Zip", "Map"):
        head, *operands = operands
    operations: Mapping[str, Callable[..., Any]] = {
        "Lit": lambda x: x,
        "Where": z3.If,
        "inv": lambda x: 1 / x,
        "not": z3.Not,
        "to f32": lambda x: z3.If(x, 1, 0),
        "add": lambda x, y: x + y,
        "mul": lambda x, y: x * y,
        "max": lambda x, y: z3.If(x < y, y, x),
        "min": lambda x, y: z3.If(x < y, x, y),
        "lt": lambda x, y: x < y,
        "and": z3.And,
        "or": z3.Or,
        "+": lambda x, y: x + y,
        "*": lambda x, y: x * y,
        "/": lambda x, y: x / y,
    }
    return operations[str(head)](*operands)
