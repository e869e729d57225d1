"""Each Neuron rule: a module that breaks it, and one like it that does not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

from trnc.compiler.backends.stablehlo.lint import RULES, Finding, lint
from trnc.compiler.backends.stablehlo.mlir import canonical_text, ir, split_functions
from trnc.compiler.backends.stablehlo.targets import neuron_target

TRN2 = neuron_target("trn2")


def function(body: str, arguments: str = "", results: str = "") -> str:
    """A module of one function, written out."""
    arrow = f" -> ({results})" if results else ""
    text = f"module {{ func.func public @main({arguments}){arrow} {{ {body} }} }}"
    with mlir.make_ir_context() as context:
        return canonical_text(ir.Module.parse(text, context))


def unary(op: str, type: str, result: str = "", attributes: str = "") -> str:
    result = result or type
    body = f'%0 = "{op}"(%a) {attributes}: ({type}) -> {result} return %0 : {result}'
    return function(body, f"%a: {type}", result)


def binary(op: str, type: str, attributes: str = "", result: str = "") -> str:
    result = result or type
    body = f'%0 = "{op}"(%a, %b) {attributes}: ({type}, {type}) -> {result} return %0 : {result}'
    return function(body, f"%a: {type}, %b: {type}", result)


def lowered(run: Callable[..., object], *arrays: jax.Array) -> str:
    """What jax makes of a function."""
    return canonical_text(jax.jit(run).lower(*arrays).compiler_ir("stablehlo"))


FLOATS, INTS = jnp.ones((4, 8)), jnp.ones((4, 8), jnp.int32)
DOT = (
    "<{dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], "
    "rhs_contracting_dimensions = [0]>}>"
)


def all_reduce(type: str) -> str:
    scalar = f"tensor<{type}>"
    body = (
        f'%0 = "stablehlo.all_reduce"(%a) <{{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}}>'
        f" ({{ ^bb0(%x: {scalar}, %y: {scalar}): %s = stablehlo.add %x, %y : {scalar} "
        f"stablehlo.return %s : {scalar} }}) : (tensor<4x{type}>) -> tensor<4x{type}> "
        f"return %0 : tensor<4x{type}>"
    )
    return function(body, f"%a: tensor<4x{type}>", f"tensor<4x{type}>")


def sort(direction: str) -> str:
    body = (
        '%0 = "stablehlo.sort"(%a) <{dimension = 0 : i64}> ({ ^bb0(%x: tensor<f32>, '
        f"%y: tensor<f32>): %c = stablehlo.compare {direction}, %x, %y : (tensor<f32>, "
        "tensor<f32>) -> tensor<i1> stablehlo.return %c : tensor<i1> }) "
        ": (tensor<4xf32>) -> tensor<4xf32> return %0 : tensor<4xf32>"
    )
    return function(body, "%a: tensor<4xf32>", "tensor<4xf32>")


def gather(indexes: int) -> str:
    """The first rows of a matrix of 4 rows that are longer than there are indexes."""
    i, result = f"tensor<{indexes}xi32>", f"tensor<{indexes}x9xf32>"
    body = (
        f"%i = stablehlo.iota dim = 0 : {i} "
        '%0 = "stablehlo.gather"(%a, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],'
        " collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, "
        f"slice_sizes = array<i64: 1, 9>}}> : (tensor<4x9xf32>, {i}) -> {result} "
        f"return %0 : {result}"
    )
    return function(body, "%a: tensor<4x9xf32>", result)


def alias(parameter: str, result: str) -> str:
    body = f"%0 = stablehlo.convert %a : ({parameter}) -> {result} return %0 : {result}"
    return function(body, f"%a: {parameter} {{tf.aliasing_output = 0 : i32}}", result)


def custom_call(name: str) -> str:
    target = f'<{{call_target_name = "{name}"}}> '
    return unary("stablehlo.custom_call", "tensor<4xf32>", attributes=target)


def while_loop(condition: str) -> str:
    return lowered(
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x))
        if condition == "counted"
        else (lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x)),
        FLOATS,
    )


def donor(name: str) -> str:
    body = "return %a : tensor<4xf32>"
    return function(body, f"%a: tensor<4xf32> {{{name}}}", "tensor<4xf32>")


# rule: (a module that breaks it, one that does not)
CASES: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "static-shapes": (
        lambda: unary("stablehlo.abs", "tensor<?xf32>"),
        lambda: unary("stablehlo.abs", "tensor<4xf32>"),
    ),
    "data-dependent-shape": (
        lambda: function(
            '%0 = "stablehlo.set_dimension_size"(%a, %n) <{dimension = 0 : i64}> : (tensor<4xf32>, '
            "tensor<i32>) -> tensor<4xf32> return %0 : tensor<4xf32>",
            "%a: tensor<4xf32>, %n: tensor<i32>",
            "tensor<4xf32>",
        ),
        lambda: lowered(lambda x: x[:2], FLOATS),
    ),
    "loop": (lambda: while_loop("until"), lambda: while_loop("counted")),
    "branch": (
        lambda: lowered(lambda x: jax.lax.cond(x.sum() > 1, lambda: x, lambda: -x), FLOATS),
        lambda: lowered(lambda x: jnp.where(x.sum() > 1, x, -x), FLOATS),
    ),
    "host-callback": (
        lambda: function(
            '%t = stablehlo.create_token : !stablehlo.token %0 = "stablehlo.outfeed"(%a, %t) '
            '<{outfeed_config = ""}> : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token '
            "return",
            "%a: tensor<4xf32>",
        ),
        lambda: unary("stablehlo.abs", "tensor<4xf32>"),
    ),
    "variadic-reduce": (
        lambda: lowered(lambda x: jnp.argmax(x, axis=1), FLOATS),
        lambda: lowered(lambda x: jnp.max(x, axis=1), FLOATS),
    ),
    "reduce-window": (
        lambda: lowered(
            lambda x: jax.lax.reduce_window(
                x, 0.0, jax.lax.add, (1, 2), (1, 1), "VALID", window_dilation=(1, 2)
            ),
            FLOATS,
        ),
        lambda: lowered(
            lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 1), "VALID"), FLOATS
        ),
    ),
    "cumulative": (
        lambda: lowered(lambda x: jax.lax.cumsum(x, axis=1), FLOATS),
        lambda: lowered(lambda x: x @ jnp.triu(jnp.ones((8, 8))), FLOATS),
    ),
    "sort": (lambda: sort("LT"), lambda: unary("stablehlo.abs", "tensor<4xf32>")),
    "sort-comparator": (lambda: sort("NE"), lambda: sort("GT")),
    "integer-top-k": (
        lambda: lowered(lambda x: jax.lax.top_k(x, 2)[0], INTS),
        lambda: lowered(lambda x: jax.lax.top_k(x, 2)[0], FLOATS),
    ),
    "integer-scatter": (
        lambda: lowered(lambda x: x.at[0].add(1), INTS),
        lambda: lowered(lambda x: x.at[0].set(1), INTS),
    ),
    "integer-dot": (
        lambda: binary("stablehlo.dot_general", "tensor<4x4xi32>", DOT),
        lambda: binary("stablehlo.dot_general", "tensor<4x4xf32>", DOT),
    ),
    "integer-collective": (lambda: all_reduce("i32"), lambda: all_reduce("f32")),
    "integer-power": (
        lambda: binary("stablehlo.power", "tensor<4xi64>"),
        lambda: binary("stablehlo.power", "tensor<4xi32>"),
    ),
    "64-bit-integers": (
        lambda: unary("stablehlo.abs", "tensor<4xi64>"),
        lambda: unary("stablehlo.abs", "tensor<4xi32>"),
    ),
    "complex": (
        lambda: binary("stablehlo.add", "tensor<4xcomplex<f32>>"),
        lambda: binary("stablehlo.add", "tensor<4xf32>"),
    ),
    "f64": (
        lambda: unary("stablehlo.abs", "tensor<4xf64>"),
        lambda: unary("stablehlo.abs", "tensor<4xf32>"),
    ),
    "unusual-fp8": (
        lambda: unary("stablehlo.convert", "tensor<4xf32>", "tensor<4xf8E4M3FNUZ>"),
        lambda: unary("stablehlo.convert", "tensor<4xf32>", "tensor<4xf8E4M3>"),
    ),
    "fp8-e4m3fn": (
        lambda: unary("stablehlo.convert", "tensor<4xf32>", "tensor<4xf8E4M3FN>"),
        lambda: unary("stablehlo.convert", "tensor<4xf32>", "tensor<4xf8E4M3>"),
    ),
    "undocumented-type": (
        lambda: unary("stablehlo.convert", "tensor<4xf32>", "tensor<4xi8>"),
        lambda: unary("stablehlo.convert", "tensor<4xf32>", "tensor<4xui8>"),
    ),
    "narrow-shift": (
        lambda: binary("stablehlo.shift_right_arithmetic", "tensor<4xi16>"),
        lambda: binary("stablehlo.shift_right_arithmetic", "tensor<4xi32>"),
    ),
    "generator": (
        lambda: lowered(lambda k: jax.lax.rng_bit_generator(k, (4,), algorithm=THREEFRY), KEY),
        lambda: lowered(lambda k: jax.lax.rng_bit_generator(k, (4,)), KEY),
    ),
    "index-range": (lambda: gather(5), lambda: gather(4)),
    "custom-call": (lambda: custom_call("mine"), lambda: custom_call("AwsNeuronArgMax")),
    "unsupported-op": (
        lambda: lowered(lambda x: jax.lax.reduce_precision(x, 5, 10), FLOATS),
        lambda: lowered(lambda x: x.astype(jnp.bfloat16), FLOATS),
    ),
    "alias-type": (
        lambda: alias("tensor<4xf32>", "tensor<4xf16>"),
        lambda: alias("tensor<4xf32>", "tensor<4xf32>"),
    ),
    "alias-lost": (
        lambda: donor("jax.buffer_donor = true"),
        lambda: donor("tf.aliasing_output = 0 : i32"),
    ),
}
KEY = jnp.zeros(4, jnp.uint32)
PRIVATE = "  func.func private @"
THREEFRY = jax.lax.RandomAlgorithm.RNG_THREE_FRY


def test_every_rule_has_its_two_cases():
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_trips_where_it_should_and_only_there(name):
    wrong, right = CASES[name]
    rule = next(rule for rule in RULES if rule.name == name)
    found = [finding for finding in lint(wrong(), TRN2) if finding.rule == name]
    assert {(f.code, f.level) for f in found} == {(rule.code, rule.level)}
    assert all(f.count >= 1 for f in found)
    assert found[0].message
    assert name not in [finding.rule for finding in lint(right(), TRN2)]


def test_a_function_that_is_known_is_found_again_in_the_next_module():
    known: dict[str, tuple[Finding, ...]] = {}
    summed = jax.jit(lambda x: jax.lax.cumsum(x, axis=1))
    for number in (1, 2):
        text = lowered(lambda x, n=number: summed(x) + n, FLOATS)
        (found,) = lint(text, TRN2, known)
        assert (found.rule, found.function) == ("cumulative", "cumsum")
        # The step itself, which no other module shares, is not kept.
        private = split_functions(text)[1:]
        assert known == {f: (found,) * f.startswith(f"{PRIVATE}cumsum(") for f in private}


def test_errors_come_first_and_rules_know_their_target():
    text = function(
        "%0 = stablehlo.convert %a : (tensor<4xi64>) -> tensor<4xf8E4M3FN> "
        "return %0 : tensor<4xf8E4M3FN>",
        "%a: tensor<4xi64>",
        "tensor<4xf8E4M3FN>",
    )
    assert [f.level for f in lint(text, TRN2)] == ["error", "warning"]
    integers = binary("stablehlo.dot_general", "tensor<4x4xi32>", DOT)
    assert not lint(integers, neuron_target("trn1"))
