"""The prover: rules and definitions certified, mutations told apart, rewrites not refuted."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from trnc.equiv import trial as trial_module
from trnc.equiv.calls import Ref, parse_call, parse_types
from trnc.equiv.certify import _HEADS, agree, certify, context_at, proved_by_smt
from trnc.equiv.draw import attempts, draw_inputs
from trnc.equiv.egraph import Limits
from trnc.equiv.evaluate import evaluate
from trnc.equiv.lock import read_lock
from trnc.equiv.lower import ROW_COUNTS, graph_inputs, lower
from trnc.equiv.prove import Proof, prove
from trnc.equiv.rewrites import REWRITES
from trnc.equiv.rules import RULES, Rule
from trnc.equiv.terms import Arena, Context, Id, Order, Terms
from trnc.equiv.text import Graph, parse
from trnc.equiv.trial import format_trial, run_trial
from trnc.equiv.variations import vary, written

LOCK = {preset.name: preset for preset in read_lock(Path(__file__).parents[2] / "graphs")}
STAGES = {stage.kind: stage.text for stage in LOCK["tiny-glm/default"].stages.values()}
SPECULATING = {  # every kind of stage, and the caches in int8, too
    stage.label: stage.text
    for name in ("tiny-glm/default", "tiny-glm/mtp-throughput")
    for stage in LOCK[name].stages.values()
}
VARIED = ("embed", "layer", "moe_layer", "head")


def graph_text(*lines: str, inputs: tuple[str, ...] = ("f32[3, 4]", "f32[3, 4]")) -> str:
    head = ["trnc-graph 1", "# torch 2", *(f"input ${i}: {t}" for i, t in enumerate(inputs))]
    return "\n".join([*head, *lines]) + "\n"


def same(left: str, right: str, **options: Any) -> Proof:
    """Compare two expressions of two tensors [3, 4]."""
    a, b = (graph_text(f"%0: f32[3, 4] = {e}", "output %0") for e in (left, right))
    return prove(a, b, **options)


# The rules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_holds_on_random_tensors_and_where_it_is_arithmetic_by_smt(rule: Rule) -> None:
    assert certify(rule, seeds=8) is None
    assert proved_by_smt(rule) is not False


def test_most_rules_of_arithmetic_are_proved_by_smt() -> None:
    assert sum(proved_by_smt(rule) is True for rule in RULES) >= 25


@pytest.mark.parametrize(
    "rule",
    [
        Rule("sign", '(Zip "add" x y)', '(Zip "add" x (Zip "mul" (Lit MINUS) y))', "x:f[A] y:f[A]"),
        Rule("order", "(Permute x p)", "x", "x:f[A,B] p:o[1,0]"),
        Rule("row", "(Row (Slice x d a b))", "(Row x)", "x:f[T,B] d:i[1] a:i[1] b:i[B]"),
        Rule("position", "(Row (Attend o q n c))", "(Attend o (Row q) (Rows n) c)", "attention"),
    ],
    ids=lambda rule: rule.name,
)
def test_a_wrong_rule_is_not_certified(rule: Rule) -> None:
    with suppress(RuntimeError):  # the sides may not even have shapes that go together
        assert certify(rule) is not None


@pytest.mark.parametrize(
    "name", ["row of a slice", "row of a cat", "row of a sum", "zip of a reshape and a scalar"]
)
def test_a_rule_without_its_condition_is_not_certified(name: str) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    with suppress(RuntimeError, IndexError):
        assert certify(replace(rule, when=()), seeds=16) is not None


def test_a_wrong_rule_of_arithmetic_is_refuted_by_smt() -> None:
    wrong = Rule("wrong", '(Zip "max" x y)', "(Where c x y)", "x:f[A] y:f[A] c:b[A]")
    assert proved_by_smt(wrong) is False


# What ops are taken for


def term_values(arena: Arena, inputs: tuple[Any, ...]) -> list[Any]:
    """The value of every term, each computed from its operands' by what the head stands for."""
    values: list[Any] = []

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Id):
            return values[leaf.number]
        if isinstance(leaf, Terms):
            return [value(item) for item in leaf.items]
        if isinstance(leaf, Context):
            return context_at(value(leaf.new), value(leaf.context), 0)
        return leaf.dims if isinstance(leaf, Order) else leaf

    for head, arguments in arena.terms:
        if head == "In":
            values.append(inputs[arguments[0]])  # type: ignore[index]
        elif head == "Op" and arguments[0] == "take":
            values.append(value(arguments[2])[0][value(arguments[1])[0].long()])
        else:
            values.append(_HEADS[head](*map(value, arguments)))
    return values


def check_lowering(text: str) -> None:
    graph = parse(text)
    inputs, sizes, expected = runnable(graph)
    arena = Arena()
    outputs = lower(graph, arena, graph_inputs(graph, arena))
    # Shapes in terms are text: a symbol would have no number.
    assert not sizes
    values = term_values(arena, inputs)
    for output, wanted in zip(outputs, expected, strict=True):
        assert agree(values[output.number].reshape(wanted.shape), wanted)
    for a, b in arena.definitions:
        assert agree(values[a.number], values[b.number])


def runnable(graph: Graph) -> tuple[Any, Any, Any]:
    for seed, attempt in product(range(3, 20), range(attempts())):
        draw = draw_inputs(graph, seed, attempt)
        inputs = tuple(x.double() if x.dtype == torch.float32 else x for x in draw.inputs)
        with suppress(IndexError, RuntimeError):
            return inputs, draw.sizes, evaluate(graph, inputs, draw.sizes, torch.float64)
    raise AssertionError("no input was accepted")


def static(text: str) -> str:
    """The text with a number for every symbol, as in a static bucket."""
    lines = [line for line in text.splitlines() if not line.startswith("range")]
    numbered = "\n".join(lines).replace("4*s0", "12").replace("2*s0", "6")
    for index, size in enumerate((3, 5, 2, 4)):
        numbered = numbered.replace(f"s{index}", str(size))
    return numbered + "\n"


@pytest.mark.parametrize("kind", VARIED)
def test_the_terms_of_a_stage_have_the_values_of_the_stage(kind: str) -> None:
    text = static(STAGES[kind])
    check_lowering(text)
    for seed in range(3):
        varied = vary(text, REWRITES, random.Random(seed))
        assert varied is not None
        check_lowering(varied[1])


OPS = [
    ("f32[3, 4]", "aten.add.Tensor($0, $1, alpha=3)"),
    ("f32[3, 4]", "aten.sub.Tensor($0, $1, alpha=2)"),
    ("f32[3, 4]", "aten.rsub.Scalar($0, 2.0, alpha=3)"),
    ("f32[3, 4]", "aten.div.Tensor($0, 4.0)"),
    ("f32[3, 4]", "aten.div.Tensor($0, $1)"),
    ("f32[3, 4]", 'aten.div.Tensor_mode($0, $1, rounding_mode="floor")'),
    ("f32[3, 4]", "aten.pow.Tensor_Scalar($0, 3)"),
    ("f32[3, 4]", "aten.pow.Tensor_Scalar($0, -1)"),
    ("f32[3, 4]", "aten.reciprocal.default($0)"),
    ("f32[3, 4]", "aten.silu.default($0)"),
    ("f32[3, 4]", "aten.relu.default($0)"),
    ("f32[3, 4]", "aten.clamp.default($0, -0.5, 0.5)"),
    ("f32[3, 4]", "aten.clamp.default($0, max=0.5)"),
    ("bool[3, 4]", "aten.ge.Tensor($0, $1)"),
    ("bool[3, 4]", "aten.gt.Scalar($0, 0)"),
    ("bool[3, 4]", "aten.le.Tensor($0, $1)"),
    ("bool[3, 4]", "aten.ne.Scalar($0, 0)"),
    ("f32[3, 4]", "aten.where.self($2, $0, $1)"),
    ("f32[3, 4]", "aten.masked_fill.Scalar($0, $2, -1)"),
    ("bool[3, 4]", "aten.logical_not.default($2)"),
    ("f16[3, 4]", "aten._to_copy.default($0, dtype=f16)"),
    ("f32[3, 4]", "aten._to_copy.default($2, dtype=f32)"),
    ("f32[4, 3]", "aten.t.default($0)"),
    ("f32[4, 3]", "aten.permute.default($0, [-1, 0])"),
    ("f32[4, 3]", "aten.transpose.int($0, -2, -1)"),
    ("f32[3, 2]", "aten.slice.Tensor($0, 1, 1, 3)"),
    ("f32[3, 1]", "aten.slice.Tensor($0, dim=-1, start=-1)"),
    ("f32[2, 4]", "aten.slice.Tensor($0, start=1)"),
    ("f32[3]", "aten.select.int($0, 1, -1)"),
    ("f32[3, 8]", "aten.cat.default([$0, $1], dim=-1)"),
    ("f32[6, 4]", "aten.cat.default([$0, $1])"),
    ("f32[3]", "aten.mean.dim($0, [-1])"),
    ("f32[1, 1]", "aten.sum.dim_IntList($0, [0, 1], keepdim=True)"),
    ("f32[4]", "aten.amax.default($0, [0])"),
    ("f32[3, 4]", "aten.full_like.default($0, 2.5)"),
    ("f32[2, 3]", "aten.full.default([2, 3], 2.5)"),
    ("f32[5, 3, 4]", "aten.expand.default($0, [5, 3, 4])"),
    ("f32[3, 3]", "aten.mm.default($0, %0)"),
    ("f32[3, 3]", "aten.addmm.default($3, $0, %0)"),
    ("f32[1]", "constant([2.5])"),
    ("f32[3, 4]", "aten.index.Tensor($0, [$4])"),
]


@pytest.mark.parametrize(("type_", "expression"), OPS, ids=lambda v: v)
def test_an_op_is_taken_for_what_it_computes(type_: str, expression: str) -> None:
    inputs = ("f32[3, 4]", "f32[3, 4]", "bool[3, 4]", "f32[3]", "i64[3]")
    transpose = "%0: f32[4, 3] = aten.t.default($1)"
    if "Tensor_mode" in expression:  # an op that stays whole has no value here
        graph = parse(graph_text(f"%0: {type_} = {expression}", "output %0", inputs=inputs))
        arena = Arena()
        (output,) = lower(graph, arena, graph_inputs(graph, arena))
        assert arena.terms[output.number][0] == "Op"
        return
    check_lowering(graph_text(transpose, f"%1: {type_} = {expression}", "output %1", inputs=inputs))


ROW_OPS = {  # what no stage of the lock calls
    "trnc.apply_mask.default": ("($0, $1)", ("f32[3, 40]", "i32[3, 2]")),
    "trnc.penalize.default": (
        "($0, $1, $2, $3, $4, $5)",
        ("f32[3, 40]", "i32[3, 5]", "i32[3, 5]", "f32[3]", "f32[3]", "f32[3]"),
    ),
    "trnc.head_linear.default": ('($0, $1, "f32", 3)', ("f32[3, 2, 8]", "u8[2, 1, 512]")),
}


def lone_call(op: str) -> str:
    """A graph of one call of an op, as a stage of the lock has it."""
    if op in ROW_OPS:
        words, inputs = ROW_OPS[op]
        kind = "f32[3, 2, 3]" if "head" in op else inputs[0]
        return graph_text(f"%0: {kind} = {op}{words}", "output %0", inputs=inputs)
    graphs = [parse(static(text)) for text in SPECULATING.values()]
    graph, node = next((g, n) for g in graphs for n in g.nodes if n.expression.op == op)
    call = parse_call(node.expression.render({}))
    types = {value.name: parse_types(value.type) for value in (*graph.inputs, *graph.nodes)}
    refs = [argument for argument in call.arguments if isinstance(argument, Ref)]
    taken = (types[ref.name][ref.item or 0] for ref in refs)
    inputs = tuple(f"{type_.dtype}[{', '.join(type_.shape)}]" for type_ in taken)
    words = [f"${refs.index(a)}" if isinstance(a, Ref) else written(a) for a in call.arguments]
    first = "%0[0]" if len(types[node.name]) > 1 else "%0"
    line = f"%0: {node.type} = {op}({', '.join(words)})"
    return graph_text(line, f"output {first}", inputs=inputs)


@pytest.mark.parametrize("op", sorted(ROW_COUNTS))
def test_a_row_of_an_op_depends_on_that_row_of_its_operands_alone(op: str) -> None:
    graph = parse(lone_call(op))
    inputs, _, (expected,) = runnable(graph)
    for row in range(len(expected)):
        own = [x[row : row + 1] if i < ROW_COUNTS[op] else x for i, x in enumerate(inputs)]
        (result,) = evaluate(graph, own, {}, torch.float64)
        assert agree(result, expected[row : row + 1])


# Answers


def test_equal_texts_are_proved_without_rules_whatever_torch_made_them() -> None:
    text = STAGES["layer"]
    proof = prove(text, text.replace("# torch 2", "# torch 9", 1))
    assert (proof.verdict, proof.rules) == ("proved", ())


def test_a_proof_names_the_rules_that_it_needs_and_no_others() -> None:
    proof = same("aten.add.Tensor($0, $1)", "aten.add.Tensor($1, $0)")
    assert proof.verdict == "proved"
    assert proof.rules == ("commute",)
    assert proof.gate is not None
    assert proof.gate.is_open


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("aten.add.Tensor($0, $1)", "aten.sub.Tensor($0, $1)"),
        ("aten.mul.Tensor($0, 2.0)", "aten.mul.Tensor($0, 2.00001)"),
        ("aten.relu.default($0)", "aten.abs.default($0)"),
        ("aten.exp.default($0)", "aten.exp.default($1)"),
    ],
)
def test_a_difference_is_shown_by_an_input(left: str, right: str) -> None:
    proof = same(left, right)
    assert proof.verdict == "refuted"
    assert "output 0 differs by" in proof.reason
    assert "random input" in proof.reason


def test_other_inputs_outputs_and_bounds_are_refuted() -> None:
    text = STAGES["moe_layer"]
    changes = (
        text.replace("input $0: f32[s0, 64]", "input $0: f32[s0, 32]"),
        text.replace("range s0: 1", "range s0: 2"),
        "\n".join(text.splitlines()[:-1]) + "\n",
    )
    for changed in changes:
        assert prove(text, changed).verdict == "refuted"


def test_what_no_rule_covers_is_unknown_and_says_where_it_stops() -> None:
    before = graph_text("%0: f32[3, 4] = aten.tanh.default($0)", "output %0")
    after = graph_text(  # tanh x = 2 sigmoid(2 x) - 1
        "%1: f32[3, 4] = aten.mul.Tensor($0, 2.0)",
        "%0: f32[3, 4] = aten.sigmoid.default(%1)",
        "%2: f32[3, 4] = aten.mul.Tensor(%0, 2.0)",
        "%3: f32[3, 4] = aten.sub.Tensor(%2, 1.0)",
        "output %3",
    )
    proof = prove(before, after)
    assert proof.verdict == "unknown"
    assert proof.stuck == ("%1: f32[3, 4] = aten.mul.Tensor($0, 2.0)",)


def test_the_limits_hold() -> None:
    inputs = tuple("f32[3]" for _ in range(9))
    sums = ["%0: f32[3] = aten.add.Tensor($0, $1)"]
    sums += [f"%{i}: f32[3] = aten.add.Tensor(%{i - 1}, ${i + 1})" for i in range(1, 8)]
    last = "%12: f32[3] = aten.add.Tensor(%7, {})"
    before = graph_text(
        *sums, "%8: f32[3] = aten.tanh.default(%7)", last.format("%8"), "output %12", inputs=inputs
    )
    after = graph_text(
        *sums,
        "%8: f32[3] = aten.mul.Tensor(%7, 2.0)",
        "%9: f32[3] = aten.sigmoid.default(%8)",
        "%10: f32[3] = aten.mul.Tensor(%9, 2.0)",
        "%11: f32[3] = aten.sub.Tensor(%10, 1.0)",
        last.format("%11"),
        "output %12",
        inputs=inputs,
    )
    proof = prove(before, after, limits=Limits(nodes=300))
    assert proof.verdict == "unknown"
    assert "the limit was reached" in proof.reason
    assert proof.nodes < 20_000


def test_a_proved_rewrite_that_loses_digits_does_not_pass_the_gate() -> None:
    before = graph_text("%0: f32[3, 4] = aten.mul.Tensor($0, $1)", "output %0")
    after = graph_text(
        "%0: f32[3, 4] = aten.mul.Tensor($0, 1e5)",
        "%1: f32[3, 4] = aten.mul.Tensor($0, $1)",
        "%2: f32[3, 4] = aten.add.Tensor(%1, %0)",
        "%3: f32[3, 4] = aten.sub.Tensor(%2, %0)",
        "output %3",
    )
    proof = prove(before, after, explain=False)
    assert proof.verdict == "proved"
    assert proof.gate is not None
    assert not proof.gate.is_open


def test_multiples_of_what_is_zero_are_not_collected_without_end() -> None:
    total = "%0: f32[3, 4] = aten.add.Tensor($0, $1)"
    masked = graph_text(
        total,
        "%1: bool[3, 4] = aten.gt.Tensor($0, $1)",
        "%2: bool[3, 4] = aten.logical_not.default(%1)",
        "%3: f32[3, 4] = aten.masked_fill.Scalar(%0, %1, 0)",
        "%4: f32[3, 4] = aten.masked_fill.Scalar(%0, %2, 0)",
        "%5: f32[3, 4] = aten.neg.default(%4)",
        "%6: f32[3, 4] = aten.sub.Tensor(%3, %5)",
        "output %6",
    )
    assert prove(graph_text(total, "output %0"), masked, explain=False).verdict == "proved"


def test_a_round_that_would_grow_out_of_bounds_is_not_begun() -> None:
    zero = "%0: f32[3, 4] = aten.mul.Tensor($0, 0.0)"
    before = graph_text(
        zero,
        "%1: f32[3, 4] = aten.add.Tensor(%0, %0)",
        "%2: f32[3, 4] = aten.add.Tensor(%1, $1)",
        "%3: f32[3, 4] = aten.tanh.default(%2)",
        "output %3",
    )
    after = graph_text(
        zero,
        "%1: f32[3, 4] = aten.add.Tensor(%0, $1)",
        "%2: f32[3, 4] = aten.mul.Tensor(%1, 2.0)",
        "%3: f32[3, 4] = aten.sigmoid.default(%2)",
        "%4: f32[3, 4] = aten.mul.Tensor(%3, 2.0)",
        "%5: f32[3, 4] = aten.sub.Tensor(%4, 1.0)",
        "output %5",
    )
    proof = prove(before, after)
    assert (proof.verdict, proof.nodes < 30_000) == ("unknown", True)
    assert "the limit was reached" in proof.reason


def test_random_mutations_are_never_proved_and_rewrites_never_refuted() -> None:
    """A part of `tools/graph_equiv.py try-prover`: every kind of stage once."""
    trial = run_trial(SPECULATING, range(11), 0, lambda *_: None)
    assert trial.wrong == []
    assert trial.mutations.total() == trial.rewrites.total() == 11
    assert trial.mutations["refuted"] >= 10
    assert trial.rewrites["proved"] >= 10


def test_a_trial_in_parts_is_the_same_trial() -> None:
    parts = [run_trial(SPECULATING, range(n, n + 1), 0, lambda *_: None) for n in (0, 1)]
    whole = run_trial(SPECULATING, range(2), 0, lambda *_: None)
    assert parts[0].rewrites + parts[1].rewrites == whole.rewrites
    assert parts[0].mutations + parts[1].mutations == whole.mutations
    assert "2 mutations: 0 proved, 0 unknown, 2 refuted; 2 told apart" in format_trial(whole)


def test_what_is_wrong_in_a_trial_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Proof("refuted", ""), Proof("proved", "")])
    monkeypatch.setattr(trial_module, "prove", lambda *_, **__: next(answers))
    trial = run_trial(SPECULATING, range(1), 0, lambda *_: None)
    assert not trial.is_sound
    assert format_trial(trial).count("WRONG: embed-") == 2
