"""The op-level diff: minimal, in the old graph's names, empty exactly for equal texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnc.equiv.diff import changed, diff_texts, format_lines
from trnc.equiv.text import parse, parse_expression
from trnc.errors import TrncError

BEFORE = """\
trnc-graph 1
# torch 2.13.0
input $0: f32[4, 8]
input $1: f32[8]
%0: f32[4, 8] = trnc.rms_norm.default($0, $1, 1e-05)
%1: f32[4, 8] = aten.mul.Tensor(%0, 2)
%2: f32[4, 8] = aten.sigmoid.default(%1)
%3: f32[4, 8] = aten.mul.Tensor(%1, %2)
%4: f32[4, 8] = aten.add.Tensor($0, %3)
output %4
"""


def tagged(before: str, after: str) -> list[str]:
    return [line.tag + line.text for line in changed(diff_texts(before, after))]


def test_equal_texts_have_no_difference() -> None:
    assert tagged(BEFORE, BEFORE) == []


def test_one_constant_is_one_pair_of_lines() -> None:
    assert tagged(BEFORE, BEFORE.replace("1e-05", "1e-06")) == [
        "-%0: f32[4, 8] = trnc.rms_norm.default($0, $1, 1e-05)",
        "+%0: f32[4, 8] = trnc.rms_norm.default($0, $1, 1e-06)",
    ]


def test_one_op_is_one_pair_of_lines() -> None:
    assert tagged(BEFORE, BEFORE.replace("aten.sigmoid", "aten.tanh")) == [
        "-%2: f32[4, 8] = aten.sigmoid.default(%1)",
        "+%2: f32[4, 8] = aten.tanh.default(%1)",
    ]


def test_one_edge_is_one_pair_of_lines() -> None:
    assert tagged(BEFORE, BEFORE.replace("Tensor(%1, %2)", "Tensor(%2, %1)")) == [
        "-%3: f32[4, 8] = aten.mul.Tensor(%1, %2)",
        "+%3: f32[4, 8] = aten.mul.Tensor(%2, %1)",
    ]


def test_two_changes_in_a_row_are_two_pairs_of_lines() -> None:
    after = BEFORE.replace("(%0, 2)", "(%0, 3)").replace("aten.sigmoid", "aten.tanh")
    assert tagged(BEFORE, after) == [
        "-%1: f32[4, 8] = aten.mul.Tensor(%0, 2)",
        "+%1: f32[4, 8] = aten.mul.Tensor(%0, 3)",
        "-%2: f32[4, 8] = aten.sigmoid.default(%1)",
        "+%2: f32[4, 8] = aten.tanh.default(%1)",
    ]


INSERTED = """\
trnc-graph 1
# torch 2.13.0
input $0: f32[4, 8]
input $1: f32[8]
%0: f32[4, 8] = trnc.rms_norm.default($0, $1, 1e-05)
%1: f32[4, 8] = aten.relu.default(%0)
%2: f32[4, 8] = aten.mul.Tensor(%1, 2)
%3: f32[4, 8] = aten.sigmoid.default(%2)
%4: f32[4, 8] = aten.mul.Tensor(%2, %3)
%5: f32[4, 8] = aten.add.Tensor($0, %4)
output %5
"""


def test_an_inserted_op_renames_no_line_below_it() -> None:
    assert tagged(BEFORE, INSERTED) == [
        "+%n0: f32[4, 8] = aten.relu.default(%0)",
        "-%1: f32[4, 8] = aten.mul.Tensor(%0, 2)",
        "+%1: f32[4, 8] = aten.mul.Tensor(%n0, 2)",
    ]


def test_a_removed_op_renames_no_line_below_it() -> None:
    assert tagged(INSERTED, BEFORE) == [
        "-%1: f32[4, 8] = aten.relu.default(%0)",
        "-%2: f32[4, 8] = aten.mul.Tensor(%1, 2)",
        "+%2: f32[4, 8] = aten.mul.Tensor(%0, 2)",
    ]


def test_an_inserted_input_renames_no_other() -> None:
    after = BEFORE.replace("input $1: f32[8]", "input $1: i32[4]\ninput $2: f32[8]")
    after = after.replace("($0, $1, 1e-05)", "($0, $2, 1e-05)")
    assert tagged(BEFORE, after) == ["+input $n0: i32[4]"]


def test_inputs_in_another_order_differ() -> None:
    after = BEFORE.replace("$0: f32[4, 8]", "$9: f32[8]").replace("$1: f32[8]", "$0: f32[4, 8]")
    after = after.replace("$9", "$0", 1).replace("input $0: f32[4, 8]", "input $1: f32[4, 8]")
    after = after.replace("($0, $1, 1e-05)", "($1, $0, 1e-05)").replace("($0, %3)", "($1, %3)")
    assert tagged(BEFORE, after) != []


def test_outputs_torch_and_ranges_are_compared() -> None:
    assert tagged(BEFORE, BEFORE.replace("output %4", "output %4\noutput %3")) == ["+output %3"]
    assert tagged(BEFORE, BEFORE.replace("2.13.0", "2.14.0")) == [
        "-# torch 2.13.0",
        "+# torch 2.14.0",
    ]
    assert tagged(BEFORE, BEFORE.replace("f32[8]\n", "f32[8]\nrange s0: 2 .. 9\n")) == [
        "+range s0: 2 .. 9"
    ]


def test_the_printed_form_has_context_and_source_lines() -> None:
    after = BEFORE.replace("aten.sigmoid", "aten.tanh")
    printed = format_lines(diff_texts(BEFORE, after, {7: "trnc/models/llama.py:12"}))
    assert printed.splitlines() == [
        "  ...",
        "  %0: f32[4, 8] = trnc.rms_norm.default($0, $1, 1e-05)",
        "  %1: f32[4, 8] = aten.mul.Tensor(%0, 2)",
        "- %2: f32[4, 8] = aten.sigmoid.default(%1)",
        "+ %2: f32[4, 8] = aten.tanh.default(%1)    # trnc/models/llama.py:12",
        "  %3: f32[4, 8] = aten.mul.Tensor(%1, %2)",
        "  %4: f32[4, 8] = aten.add.Tensor($0, %3)",
        "  ...",
    ]


def test_operands_inside_quoted_text_are_text() -> None:
    expression = parse_expression('trnc.op.default(%1[0], "%2 \\" $3", [$0, %10])')
    assert expression.operands == ("%1", "$0", "%10")
    assert expression.op == "trnc.op.default"
    assert expression.render({"%1": "%7"}) == 'trnc.op.default(%7[0], "%2 \\" $3", [$0, %10])'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty text"),
        (BEFORE.replace("graph 1", "graph 0"), "trnc-graph 0"),
        (BEFORE + "nonsense\n", "line 11"),
    ],
)
def test_what_is_not_canonical_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(TrncError, match=message):
        parse(text)


# Random graphs in canonical form: values are printed in post-order from the outputs.

Tree = Any
leaves = st.integers(0, 2)
trees = st.recursive(
    leaves,
    lambda children: (
        st.tuples(st.sampled_from("abc"), children)
        | st.tuples(st.sampled_from("xyz"), children, children)
    ),
    max_leaves=12,
)


def canonical(forest: list[Tree]) -> str:
    lines = ["trnc-graph 1", "# torch 2", *(f"input ${i}: f32[{4 + i // 2}]" for i in range(3))]
    names: dict[Tree, str] = {}

    def visit(tree: Tree) -> str:
        if isinstance(tree, int):
            return f"${tree}"
        if tree not in names:
            operands = ", ".join(visit(child) for child in tree[1:])
            names[tree] = f"%{len(names)}"
            lines.append(f"{names[tree]}: f32[4] = op.{tree[0]}({operands})")
        return names[tree]

    outputs = [f"output {visit(tree)}" for tree in forest]
    return "\n".join([*lines, *outputs]) + "\n"


forests = st.lists(trees, min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(forests, forests)
def test_a_diff_is_empty_exactly_when_the_texts_are_equal(a: list[Tree], b: list[Tree]) -> None:
    before, after = canonical(a), canonical(b)
    lines = diff_texts(before, after)
    assert (changed(lines) == ()) == (before == after)
    old = sorted(line.text for line in lines if line.tag != "+")
    assert old == sorted(before.splitlines()[1:])
    assert sum(line.tag != "-" for line in lines) == len(after.splitlines()) - 1
