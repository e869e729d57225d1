"""Rewrites that keep a graph's function over the reals: what people write when they refactor."""

from __future__ import annotations

from trnc.equiv.calls import Ref, Type, parse_call
from trnc.equiv.variations import ARITHMETIC, Edit, Place, is_real, two_tensors, written


def commuted(place: Place) -> str | None:
    """a + b is b + a."""
    a, b = (*place.words(), "", "")[:2]
    if not is_real(place, "aten.add.Tensor", "aten.mul.Tensor") or not two_tensors(place):
        return None
    return f"{place.call.op}({b}, {a})" if a != b else None


def reassociated(place: Place) -> str | None:
    """a + (b + c) is (a + b) + c, and the same of products."""
    if not is_real(place, "aten.add.Tensor", "aten.mul.Tensor") or not two_tensors(place):
        return None
    for outer, inner in ((0, 1), (1, 0)):
        nested = _operand(place, inner, place.call.op)
        if nested is not None:
            first, second = nested
            new = place.add(place.type, place.call.op, place.words()[outer], first)
            return f"{place.call.op}({new}, {second})"
    return None


def _operand(place: Place, index: int, *ops: str) -> tuple[str, str] | None:
    """The two operands of an operand that is one of `ops` and has the line's own type."""
    ref = place.call.arguments[index]
    value = next((v for v in place.graph.nodes if v.name == written(ref)), None)
    if value is None or value.expression is None or value.expression.op not in ops:
        return None
    nested = parse_call(value.expression.render({}))
    is_plain = value.type == place.value.type and not nested.keywords
    if not is_plain or not all(isinstance(a, Ref) for a in nested.arguments):
        return None
    first, second = (written(a) for a in nested.arguments)
    return first, second


def scaled_back(place: Place) -> str | None:
    """x is (4 x) / 4, with the factor carried through what is linear."""
    linear = ("trnc.linear.default", "aten.neg.default", "aten.mul.Tensor", "aten.div.Tensor")
    words = place.words()
    if place.call.op not in linear or not isinstance(place.call.arguments[0], Ref):
        return None
    if place.call.op == "trnc.linear.default" and words[2] != "None":
        return None
    source = place.operand_type(0)
    if source.dtype != "f32":
        return None
    words[0] = place.add(_printed(source), "aten.mul.Tensor", words[0], "4.0")
    return f"aten.mul.Tensor({place.add(place.type, place.call.op, *words)}, 0.25)"


def _printed(type_: Type) -> str:
    return f"{type_.dtype}[{', '.join(type_.shape)}]"


def subtracted(place: Place) -> str | None:
    """a + b is a - (-b), and a - b is a + (-b)."""
    if not is_real(place, "aten.add.Tensor", "aten.sub.Tensor") or not two_tensors(place):
        return None
    a, b = place.words()
    other = "aten.sub.Tensor" if place.call.op == "aten.add.Tensor" else "aten.add.Tensor"
    return f"{other}({a}, {place.add(_printed(place.operand_type(1)), 'aten.neg.default', b)})"


def distributed(place: Place) -> str | None:
    """(a + b) c is a c + b c."""
    if not is_real(place, "aten.mul.Tensor") or not two_tensors(place):
        return None
    for inner, outer in ((0, 1), (1, 0)):
        for op in ("aten.add.Tensor", "aten.sub.Tensor"):
            if (nested := _operand(place, inner, op)) is not None:
                factor = place.words()[outer]
                a, b = (place.add(place.type, "aten.mul.Tensor", x, factor) for x in nested)
                return f"{op}({a}, {b})"
    return None


def transposed(place: Place) -> str | None:
    """What is elementwise may be done on the transposes."""
    if not _is_elementwise(place) or len(place.shape) < 2:
        return None
    first, second = place.dice.sample(range(len(place.shape)), 2)
    turned = list(place.shape)
    turned[first], turned[second] = turned[second], turned[first]
    dims = (str(first), str(second))
    return _around(place, tuple(turned), "aten.transpose.int", dims, dims)


def reshaped(place: Place) -> str | None:
    """What is elementwise may be done on another view of the same numbers."""
    if not _is_elementwise(place) or len(place.shape) != 3:
        return None
    if not all(size.isdecimal() for size in place.shape[1:]):
        return None
    flat = (place.shape[0], str(int(place.shape[1]) * int(place.shape[2])))
    there, back = (f"[{', '.join(shape)}]" for shape in (flat, place.shape))
    return _around(place, flat, "aten.reshape.default", (there,), (back,))


def _is_elementwise(place: Place) -> bool:
    """Whether the line is arithmetic of tensors that all have its shape, and numbers."""
    return is_real(place, *ARITHMETIC, "aten.neg.default") and all(
        place.operand_type(i).shape == place.shape and place.operand_type(i).dtype == "f32"
        for i, argument in enumerate(place.call.arguments)
        if isinstance(argument, Ref)
    )


def _around(
    place: Place, shape: tuple[str, ...], op: str, there: tuple[str, ...], back: tuple[str, ...]
) -> str:
    """Change the shape of every operand, compute, and change it back."""
    type_ = f"f32[{', '.join(shape)}]"
    words = [
        place.add(type_, op, word, *there) if isinstance(argument, Ref) else word
        for word, argument in zip(place.words(), place.call.arguments, strict=True)
    ]
    return f"{op}({', '.join((place.add(type_, place.call.op, *words), *back))})"


def halved(place: Place) -> str | None:
    """What is elementwise may be done on two parts."""
    width = place.shape[-1] if len(place.shape) > 1 else ""
    if not _is_elementwise(place) or not width.isdecimal() or int(width) < 2:
        return None
    cut, dim = place.dice.randrange(1, int(width)), len(place.shape) - 1
    parts = []
    for start, end in ((0, cut), (cut, int(width))):
        type_ = f"f32[{', '.join((*place.shape[:-1], str(end - start)))}]"
        ends = (f"dim={dim}", f"start={start}", f"end={end}")
        words = [
            place.add(type_, "aten.slice.Tensor", word, *ends) if isinstance(a, Ref) else word
            for word, a in zip(place.words(), place.call.arguments, strict=True)
        ]
        parts.append(place.add(type_, place.call.op, *words))
    return f"aten.cat.default([{', '.join(parts)}], dim={dim})"


def unfused_norm(place: Place) -> str | None:
    """rms_norm is x rsqrt(mean(x^2) + eps) w."""
    if place.call.op != "trnc.rms_norm.default":
        return None
    (x, weight, eps), type_ = place.words(), place.type
    row = f"f32[{', '.join((*place.shape[:-1], '1'))}]"
    square = place.add(type_, "aten.pow.Tensor_Scalar", x, "2")
    mean = place.add(row, "aten.mean.dim", square, "[-1]", "keepdim=True")
    root = place.add(row, "aten.rsqrt.default", place.add(row, "aten.add.Tensor", mean, eps))
    return f"aten.mul.Tensor({weight}, {place.add(type_, 'aten.mul.Tensor', x, root)})"


def unfused_gate(place: Place) -> str | None:
    """silu_mul is the SiLU of the first half times the second."""
    if place.call.op != "trnc.silu_mul.default":
        return None
    (x,), type_, half = place.words(), place.type, int(place.shape[-1])
    gate = place.add(type_, "aten.slice.Tensor", x, "dim=1", "start=0", f"end={half}")
    up = place.add(type_, "aten.slice.Tensor", x, "dim=1", f"start={half}", f"end={2 * half}")
    sigmoid = place.add(type_, "aten.sigmoid.default", gate)
    product = place.add(type_, "aten.mul.Tensor", up, sigmoid)
    return f"aten.mul.Tensor({product}, {gate})"


def unfused_bias(place: Place) -> str | None:
    """A linear layer's bias is added."""
    words = place.words()
    if place.call.op != "trnc.linear.default" or words[2] == "None":
        return None
    bias, words[2] = words[2], "None"
    return f"aten.add.Tensor({bias}, {place.add(place.type, place.call.op, *words)})"


def split_linear(place: Place) -> str | None:
    """A linear layer of a sum is the sum of two."""
    words = place.words()
    if place.call.op != "trnc.linear.default" or words[2] != "None":
        return None
    nested = next((v for v in place.graph.nodes if v.name == words[0]), None)
    if nested is None or nested.expression is None or nested.expression.op != "aten.add.Tensor":
        return None
    parts = [written(a) for a in parse_call(nested.expression.render({})).arguments]
    a, b = (place.add(place.type, place.call.op, part, *words[1:]) for part in parts)
    return f"aten.add.Tensor({a}, {b})"


def flipped(place: Place) -> str | None:
    """where(m, a, b) is where(not m, b, a)."""
    if place.call.op != "aten.where.self":
        return None
    mask, a, b = place.words()
    other = place.add(_printed(place.operand_type(0)), "aten.logical_not.default", mask)
    return f"aten.where.self({other}, {b}, {a})"


def masked(place: Place) -> str | None:
    """x is x where m and 0 elsewhere, plus x where not m and 0 elsewhere."""
    if not _is_elementwise(place) or not two_tensors(place):
        return None
    mask_type = "bool" + place.type.removeprefix("f32")
    full = place.add(place.type, place.call.op, *place.words())
    mask = place.add(mask_type, "aten.gt.Tensor", *place.words()[:2])
    other = place.add(mask_type, "aten.logical_not.default", mask)
    a, b = (place.add(place.type, "aten.masked_fill.Scalar", full, m, "0") for m in (mask, other))
    return f"aten.add.Tensor({a}, {b})"


def compared(place: Place) -> str | None:
    """a >= b is not a < b."""
    opposite = {"ge": "lt", "gt": "le", "lt": "ge", "le": "gt"}
    namespace, name, overload = (*place.call.op.split("."), "", "")[:3]
    if namespace != "aten" or name not in opposite:
        return None
    other = f"aten.{opposite[name]}.{overload}"
    return f"aten.logical_not.default({place.add(place.type, other, *place.words())})"


def clamped(place: Place) -> str | None:
    """clamp from below is a choice."""
    low = place.call.keyword("min")
    if place.call.op != "aten.clamp.default" or not isinstance(low, int):
        return None
    (x,) = place.words()
    mask = place.add(f"bool[{', '.join(place.shape)}]", "aten.lt.Scalar", x, str(low))
    return f"aten.masked_fill.Scalar({x}, {mask}, {low})"


def viewed(place: Place) -> str | None:
    """An unsqueeze, a squeeze or a view is a reshape."""
    ops = ("aten.unsqueeze.default", "aten.squeeze.dim", "aten.view.default")
    if place.call.op not in (*ops, "aten._unsafe_view.default"):
        return None
    return f"aten.reshape.default({place.words()[0]}, [{', '.join(place.shape)}])"


def joined_in_turn(place: Place) -> str | None:
    """cat of a, b and c is cat of a and of cat of b and c."""
    parts = place.call.arguments[0]
    dim = place.call.keyword("dim", 0)
    if place.call.op != "aten.cat.default" or not isinstance(parts, tuple) or len(parts) < 3:
        return None
    assert isinstance(dim, int)
    first, *others = (written(part) for part in parts)
    types = [place.types[ref.name][ref.item or 0] for ref in parts if isinstance(ref, Ref)]
    shape = list(place.shape)
    shape[dim] = str(int(shape[dim]) - int(types[0].shape[dim]))
    type_ = f"{types[0].dtype}[{', '.join(shape)}]"
    rest = place.add(type_, "aten.cat.default", f"[{', '.join(others)}]", f"dim={dim}")
    return f"aten.cat.default([{first}, {rest}], dim={dim})"


REWRITES: tuple[Edit, ...] = (
    commuted,
    reassociated,
    scaled_back,
    subtracted,
    distributed,
    transposed,
    reshaped,
    halved,
    unfused_norm,
    unfused_gate,
    unfused_bias,
    split_linear,
    flipped,
    masked,
    compared,
    clamped,
    viewed,
    joined_in_turn,
)
