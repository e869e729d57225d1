"""Canonical text of the real stages: random changes of form keep it, changes of meaning do not."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from tests.compiler.tiny_stages import SPECS
from trnc.compiler.canonical import canonical_text
from trnc.compiler.trace import trace_stage
from trnc.errors import CompileError

KINDS = ("embed", "experts", "int8", "latent")
seeds = st.integers(0, 2**32 - 1)


@dataclass
class Rebuilt:
    """What `canonical_text` reads of an exported program, around another graph."""

    graph: Graph
    graph_signature: Any
    constants: Any
    range_constraints: Any


@cache
def traced(kind: str) -> Any:
    return trace_stage(SPECS[kind])


@cache
def text(kind: str) -> str:
    return canonical_text(traced(kind))


def rebuild(kind: str, order: list[Node], rename: Callable[[Node], str]) -> Rebuilt:
    program = traced(kind)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in order:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = rename(node)
        copies[node].meta = dict(node.meta)
    constants, ranges = program.constants, program.range_constraints
    return Rebuilt(graph, program.graph_signature, constants, ranges)


def copied(kind: str) -> Rebuilt:
    return rebuild(kind, list(traced(kind).graph.nodes), lambda node: node.name)


def shuffled(nodes: list[Node], dice: random.Random) -> list[Node]:
    """Another topological order; the inputs stay in front and the output at the end."""
    order = [n for n in nodes if n.op == "placeholder"]
    waiting = [n for n in nodes if n.op not in ("placeholder", "output")]
    while waiting:
        ready = [n for n in waiting if set(n.all_input_nodes) <= set(order)]
        order.append(dice.choice(ready))
        waiting.remove(order[-1])
    return [*order, nodes[-1]]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_names_and_the_order_of_independent_ops_are_not_in_it(kind: str, seed: int) -> None:
    dice = random.Random(seed)
    nodes = list(traced(kind).graph.nodes)
    names = [f"renamed_{i}" for i in dice.sample(range(1000), len(nodes))]
    fresh = dict(zip(nodes, names, strict=True))
    assert canonical_text(rebuild(kind, shuffled(nodes, dice), fresh.__getitem__)) == text(kind)


def ops_of(graph: Graph) -> list[Node]:
    """The ops that the outputs need: no sizes, and none that stand for their operand."""
    live: set[Node] = {n for n in graph.nodes if n.op == "output"}
    for node in reversed(graph.nodes):
        if node in live:
            live |= set(node.all_input_nodes)
    ops = [n for n in graph.nodes if n in live and isinstance(n.target, torch._ops.OpOverload)]
    return [n for n in ops if n.meta.get("val") is not None and n is strip(n)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_dead_and_repeated_ops_are_not_in_it(kind: str, seed: int) -> None:
    dice = random.Random(seed)
    program = copied(kind)
    repeated, dead = dice.choice(ops_of(program.graph)), dice.choice(ops_of(program.graph))
    with program.graph.inserting_after(repeated):
        twin = program.graph.node_copy(repeated, lambda n: n)
    users = [user for user in repeated.users if user is not twin]
    for user in dice.sample(users, dice.randint(0, len(users))):
        user.replace_input_with(repeated, twin)
    value = dead.meta.get("val")
    if is_tensor(dead):
        with program.graph.inserting_after(dead):
            unused = program.graph.call_function(torch.ops.aten.neg.default, (dead,))
        unused.meta["val"] = value
    assert canonical_text(program) == text(kind)


def constant(program: Rebuilt, dice: random.Random) -> bool:
    """Change one number, word or list of an op's arguments."""
    places = [
        (node, i)
        for node in ops_of(program.graph)
        if node.target is not torch.ops.aten.sym_size.int  # the text has the symbol that it gives
        for i, value in enumerate(node.args)
        if isinstance(value, int | float | str) or (isinstance(value, list) and changed(value))
    ]
    if not places:
        return False
    node, index = dice.choice(places)
    args = list(node.args)
    args[index] = changed(args[index])
    node.args = tuple(args)
    return True


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    is_numbers = all(isinstance(v, int) for v in value)
    return [*value[:-1], value[-1] + 1] if value and is_numbers else None


def edge(program: Rebuilt, dice: random.Random) -> bool:
    """Let an op read another tensor that exists by then."""
    nodes = [n for n in program.graph.nodes if n.op != "output"]
    node = dice.choice([n for n in computing(program) if n.all_input_nodes])
    old = dice.choice(node.all_input_nodes)
    earlier = [n for n in nodes[: nodes.index(node)] if n is not old and is_tensor(n)]
    # Two nodes can be one value: a dropped conversion is its operand, and an op may come twice.
    others = [n for n in earlier if not same_value(n, old)]
    if not is_tensor(old) or not others:
        return False
    node.replace_input_with(old, dice.choice(others))
    return True


def computing(program: Rebuilt) -> list[Node]:
    """The ops but those that ask for a size: it is a symbol, whichever tensor is asked, and how."""
    return [n for n in ops_of(program.graph) if n.target is not torch.ops.aten.sym_size.int]


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def same_value(a: object, b: object) -> bool:
    """Whether two arguments are one value: a node, or the same op of the same arguments."""
    if not (isinstance(a, Node) and isinstance(b, Node)):
        return a == b
    a, b = strip(a), strip(b)
    if a is b or a.op != "call_function" or (a.target, a.kwargs) != (b.target, b.kwargs):
        return a is b
    return len(a.args) == len(b.args) and all(map(same_value, a.args, b.args))


def strip(node: Node) -> Node:
    passing = ("aten.alias", "aten.detach", "aten._to_copy", "aten.view", "aten.slice")
    while str(node.target).startswith(passing):
        node = node.all_input_nodes[0]
    return node


def op(program: Rebuilt, dice: random.Random) -> bool:
    """Call another op in place of one."""
    node = dice.choice([n for n in computing(program) if n.target is not operator.getitem])
    others = {
        torch.ops.aten.add.Tensor: torch.ops.aten.sub.Tensor,
        torch.ops.aten.mul.Tensor: torch.ops.aten.div.Tensor,
        torch.ops.aten.sub.Tensor: torch.ops.aten.add.Tensor,
    }
    node.target = others.get(node.target, torch.ops.aten.special_i0.default)
    if node.target is torch.ops.aten.special_i0.default:
        node.args, node.kwargs = node.args[:1], {}
    return True


def dtype(program: Rebuilt, dice: random.Random) -> bool:
    """Give a value another dtype."""
    node = dice.choice([n for n in program.graph.nodes if is_typed(n)])
    value = node.meta["val"]
    node.meta["val"] = value.to(torch.float64)
    return True


def shape(program: Rebuilt, dice: random.Random) -> bool:
    """Give a value one dimension more."""
    node = dice.choice([n for n in program.graph.nodes if is_typed(n)])
    node.meta["val"] = node.meta["val"].unsqueeze(0)
    return True


def is_typed(node: Node) -> bool:
    """Whether the node's type is its own: an item has the type that its op gave it."""
    return is_tensor(node) and node.target is not operator.getitem


def output(program: Rebuilt, dice: random.Random) -> bool:
    """Leave an output out, or add one."""
    node = next(n for n in program.graph.nodes if n.op == "output")
    results = list(node.args[0])
    node.args = (tuple(results[:-1] if len(results) > 1 and dice.random() < 0.5 else results * 2),)
    return True


MUTATIONS = (constant, edge, op, dtype, shape, output)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_one_change_of_meaning_is_in_it(kind: str, mutation: Any, seed: int) -> None:
    program = copied(kind)
    if not mutation(program, random.Random(seed)):
        return
    with suppress(CompileError):  # a refusal is also a way of not being taken for the same
        assert canonical_text(program) != text(kind)
