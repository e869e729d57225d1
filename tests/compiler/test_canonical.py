"""Canonical text: one text for one computation, another text for another one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trnc.compiler.canonical import canonical_text, digest, source_map
from trnc.compiler.sources import recording_sources
from trnc.equiv.text import parse
from trnc.errors import CompileError

LIBRARY = torch.library.Library("canonical_test", "DEF")
LIBRARY.define("linear(Tensor x, Tensor w, Tensor? bias, str format, int width=4) -> Tensor")
LIBRARY.define("best(Tensor x, int top=2) -> (Tensor, Tensor)")
LIBRARY.define("write(Tensor(a!) pages, Tensor rows) -> ()")
LIBRARY.define("notify(Tensor x) -> ()")
LIBRARY.impl("linear", lambda x, w, bias, format, width=4: x @ w.T, "CompositeExplicitAutograd")
LIBRARY.impl("best", lambda x, top=2: torch.topk(x, top), "CompositeExplicitAutograd")
LIBRARY.impl("write", lambda pages, rows: None, "CompositeExplicitAutograd")
LIBRARY.impl("notify", lambda x: None, "CompositeExplicitAutograd")
torch.library.register_fake(
    "canonical_test::linear",
    lambda x, w, bias, format, width=4: x.new_empty(x.shape[0], width),
    lib=LIBRARY,
)
torch.library.register_fake(
    "canonical_test::best",
    lambda x, top=2: (
        x.new_empty(x.shape[0], top),
        x.new_empty(x.shape[0], top, dtype=torch.int64),
    ),
    lib=LIBRARY,
)
torch.library.register_fake("canonical_test::write", lambda pages, rows: None, lib=LIBRARY)
torch.library.register_fake("canonical_test::notify", lambda x: None, lib=LIBRARY)
OPS = torch.ops.canonical_test


class Positional(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def export(function: Callable[..., Any], *args: Tensor, **options: Any) -> ExportedProgram:
    return torch.export.export(Positional(function), args, strict=False, **options)


def text_of(function: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    """The text; it is also parsed, and must be the same after the decompositions' own re-trace."""
    program = export(function, *args, **options)
    text = canonical_text(program)
    assert text.endswith("\n")
    parse(text)
    return text


X, W, Z = torch.ones(2, 4), torch.ones(4, 4), torch.ones(2, 4)

SOURCE = """
def norm(x, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)

def stage(x, w, z):
    hidden = norm(x, 1e-5)
    projected = torch.ops.canonical_test.linear(hidden, w, None, "f32")
    values, ids = torch.ops.canonical_test.best(projected)
    gate = torch.sigmoid(z)
    return values * 2, ids, torch.cat([gate, projected], dim=1)
"""

# Another way to write the same function: renamed, moved, commented, reordered, with dead code,
# repeated subexpressions, defaults spelled out, and views that change nothing.
REWRITTEN = '''
# A comment.
import math


def stage(a, b, c):
    """A docstring."""
    unused = a @ b

    g = torch.sigmoid(c.detach())
    never = torch.ops.canonical_test.best(unused)


    y = torch.ops.canonical_test.linear(rms(a), b, bias=None, format="f32", width=4)
    again = torch.ops.canonical_test.linear(rms(a).view(2, 4), b, None, "f32")
    top = torch.ops.canonical_test.best(again, 2)
    return top[0].to(torch.float32) * 2, top[1], torch.cat((g.contiguous(), y.float()), 1)


def rms(v, eps=1e-5):
    square = v * v
    return v * torch.rsqrt(torch.add(square.mean(-1, keepdim=True), eps, alpha=1))
'''


def stage_from(source: str, path: str = "stage_source.py") -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, path, "exec"), scope)
    stage: Callable[..., Any] = scope["stage"]
    return stage


def test_the_text_reads_as_documented() -> None:
    def stage(x: Tensor, w: Tensor, unused: Tensor) -> Any:
        y = OPS.linear(x, w, None, "f32") + torch.tensor([1.0, -0.0, 0.5, 2.0])
        values, ids = OPS.best(torch.where(y > 0, y, -float("inf")), top=3)
        return ids, values.to(torch.float16).transpose(0, 1), x

    version = torch.__version__.split("+")[0]
    expected = f"""\
        trnc-graph 1
        # torch {version}
        input $0: f32[2, 4]
        input $1: f32[4, 4]
        input $2: f32[2, 4]
        %0: f32[2, 4] = canonical_test.linear.default($0, $1, None, "f32")
        %1: f32[4] = constant([1.0, -0.0, 0.5, 2.0])
        %2: f32[2, 4] = aten.add.Tensor(%0, %1)
        %3: bool[2, 4] = aten.gt.Scalar(%2, 0)
        %4: f32[2, 4] = aten.where.ScalarOther(%3, %2, -inf)
        %5: (f32[2, 3], i64[2, 3]) = canonical_test.best.default(%4, top=3)
        %6: f16[2, 3] = aten.to.dtype(%5[0], f16)
        %7: f16[3, 2]{{1, 3}} = aten.transpose.int(%6, 0, 1)
        output %5[1]
        output %7
        output $0
        """
    assert text_of(stage, X, W, Z) == textwrap.dedent(expected)


def test_names_order_comments_dead_code_and_repeats_do_not_change_the_text() -> None:
    text = text_of(stage_from(SOURCE), X, W, Z)
    assert text_of(stage_from("\n" * 40 + SOURCE, "elsewhere.py"), X, W, Z) == text
    assert text_of(stage_from(REWRITTEN), X, W, Z) == text


def test_another_process_hash_seed_and_folder_give_the_same_text(tmp_path: Path) -> None:
    text = text_of(stage_from(SOURCE), X, W, Z)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_canonical as t;"
        "sys.stdout.write(t.text_of(t.stage_from(t.REWRITTEN), t.X, t.W, t.Z))"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parent)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == text


def test_a_default_that_is_spelled_out_in_the_graph_is_dropped() -> None:
    program = export(base, X, W, Z)
    text = canonical_text(program)
    sub = next(n for n in program.graph.nodes if n.name == "sub")
    sub.kwargs = {"alpha": 1}
    assert canonical_text(program) == text
    sub.kwargs = {"alpha": 2}
    assert "aten.sub.Tensor(%1, $2, alpha=2)" in canonical_text(program)


def base(x: Tensor, w: Tensor, z: Tensor) -> Any:
    y = torch.relu(x * 2.0) - z
    return y @ w, y.sum(-1)


CHANGES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "constant": (lambda x, w, z: ((y := torch.relu(x * 3.0) - z) @ w, y.sum(-1)), (X, W, Z)),
    "constant's type": (lambda x, w, z: ((y := torch.relu(x * 2) - z) @ w, y.sum(-1)), (X, W, Z)),
    "op": (lambda x, w, z: ((y := torch.sigmoid(x * 2.0) - z) @ w, y.sum(-1)), (X, W, Z)),
    "edge": (lambda x, w, z: ((y := torch.relu(z * 2.0) - x) @ w, y.sum(-1)), (X, W, Z)),
    "operands": (lambda x, w, z: ((y := z - torch.relu(x * 2.0)) @ w, y.sum(-1)), (X, W, Z)),
    "keyword": (lambda x, w, z: ((y := torch.relu(x * 2.0) - z) @ w, y.sum(0)), (X, W, Z)),
    "output order": (lambda x, w, z: base(x, w, z)[::-1], (X, W, Z)),
    "one output less": (lambda x, w, z: base(x, w, z)[:1], (X, W, Z)),
    "input order": (lambda x, z, w: base(x, w, z), (X, Z, W)),
    "dtype": (base, (X.double(), W.double(), Z.double())),
    "dtype of an unused input": (lambda x, w, z, u: base(x, w, z), (X, W, Z, X.half())),
    "an unused input": (lambda x, w, z, u: base(x, w, z), (X, W, Z, X)),
    "shape": (base, (torch.ones(3, 4), W, torch.ones(3, 4))),
    "stride of an input": (base, (X, torch.ones(4, 8)[:, ::2], Z)),
    "a copy": (lambda x, w, z: base(x, w, z.clone()), (X, W, Z)),
    "a forced copy": (lambda x, w, z: base(x, w, z.to(torch.float32, copy=True)), (X, W, Z)),
}


def test_every_change_of_meaning_changes_the_text() -> None:
    texts = {name: text_of(function, *args) for name, (function, args) in CHANGES.items()}
    texts["base"] = text_of(base, X, W, Z)
    assert len(set(texts.values())) == len(texts)


def test_lifted_constants_are_keyed_by_value_shape_and_dtype() -> None:
    def adding(constant: Tensor) -> Callable[[Tensor], Any]:
        return lambda x: x + constant

    constants = [
        torch.arange(4.0),
        torch.arange(4.0) + 0.0,
        torch.tensor([0.0, 1.0, 2.0, 4.0]),
        torch.tensor([-0.0, 1.0, 2.0, 3.0]),
        torch.arange(4.0).double(),
        torch.arange(4.0).reshape(1, 4),
    ]
    texts = [text_of(adding(c), X) for c in constants]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 5
    large = torch.arange(400.0).reshape(100, 4)
    changed = large.clone()
    changed[99, 3] = 0
    row = torch.ones(1, 4)
    assert "sha256:" in text_of(adding(large), row)
    assert text_of(adding(large), row) == text_of(adding(large.clone()), row)
    assert text_of(adding(large), row) != text_of(adding(changed), row)
    assert "sha256:" in text_of(adding(large.bfloat16()), row)


def test_symbolic_sizes_are_named_by_first_appearance_and_keep_their_range() -> None:
    def stage(pages: Tensor, slots: Tensor) -> Any:
        n = pages.shape[0]
        return pages.reshape(n * 2, -1) + 1, slots[:, :2], slots.new_zeros(n + 1)

    def text(first: str, second: str, minimum: int = 2) -> str:
        a, b = Dim(first, min=minimum), Dim(second, min=2)
        args = (torch.ones(5, 4), torch.ones(7, 3))
        return text_of(stage, *args, dynamic_shapes={"args": ({0: a}, {0: b})})

    assert "input $0: f32[s0, 4]\ninput $1: f32[s1, 3]\nrange s0: 2 .. int_oo" in text("a", "b")
    assert "f32[2*s0, 2] = aten.reshape.default($0, [2*s0, -1])" in text("a", "b")
    assert text("a", "b") == text("zebra", "ant")
    assert text("a", "b") != text("a", "b", minimum=3)
    static = text_of(stage, torch.ones(5, 4), torch.ones(7, 3))
    assert "s0" not in static


def test_sources_name_the_line_that_wrote_each_op_and_are_not_in_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stage_source.py"
    path.write_text("\n" * 100 + SOURCE)
    monkeypatch.chdir(tmp_path)
    stage = stage_from(path.read_text(), str(path))
    with recording_sources():
        program = export(stage, X, W, Z)
    text = canonical_text(program)
    assert text == text_of(stage, X, W, Z)
    sources = source_map(program)
    lines = text.splitlines()
    sigmoid = next(i for i, line in enumerate(lines, start=1) if "aten.sigmoid" in line)
    rsqrt = next(i for i, line in enumerate(lines, start=1) if "aten.rsqrt" in line)
    assert sources[sigmoid] == "stage_source.py:109"
    assert sources[rsqrt] == "stage_source.py:103"
    assert set(sources) == {i for i, line in enumerate(lines, start=1) if line.startswith("%")}
    assert "stage_source" not in text


class WithParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("table")


def writes_pages(pages: Tensor, rows: Tensor) -> Tensor:
    OPS.write(pages, rows)
    return rows + 1


def notifies(x: Tensor) -> Tensor:
    OPS.notify(x)
    return x + 1


def adds_in_place(x: Tensor) -> Tensor:
    return x.mul(2).add_(1)


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))


def sizes_by_data(x: Tensor) -> Tensor:
    return x.nonzero() + 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: export(writes_pages, X, Z), r"canonical_test\.write\.default writes to its arg"),
        (lambda: export(writes_pages, X, Z).run_decompositions({}), "mutates"),
        (lambda: export(adds_in_place, X), r"aten\.add_\.Tensor writes.*test_canonical\.py:\d+"),
        (lambda: export(lambda x: x + torch.rand(4), X), "aten.rand.default draws"),
        (lambda: export(notifies, X), "notify.default has no result"),
        (lambda: export(branches, X), "straight line|get_attr"),
        (lambda: export(sizes_by_data, X), "size depends on data"),
        (lambda: torch.export.export(WithParameter(), (X,)), "parameter 'weight'"),
        (lambda: torch.export.export(WithBuffer(), (X,)), "buffer 'table'"),
        (lambda: export(lambda x: x.to_sparse(), X), "layout"),
    ],
)
def test_a_stage_that_is_not_pure_is_refused(
    program: Callable[[], ExportedProgram], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        canonical_text(program())


def test_the_digest_is_the_sha256_of_the_text() -> None:
    assert digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# Random expressions over three inputs: a tree of (op, operands) or a leaf's index.
UNARY = {"neg": torch.neg, "relu": torch.relu, "half": lambda x: x * 0.5, "shift": lambda x: x + 1}
BINARY = {"add": torch.add, "sub": torch.sub, "max": torch.maximum}
Tree = Any

trees = st.recursive(
    st.integers(0, 2),
    lambda children: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), children),
        st.tuples(st.sampled_from(sorted(BINARY)), children, children),
    ),
    max_leaves=6,
)


def evaluate(tree: Tree, inputs: tuple[Tensor, ...], memo: dict[Tree, Tensor] | None) -> Tensor:
    """Apply a tree; with a memo shared subtrees are computed once, without it again each time."""
    if isinstance(tree, int):
        return inputs[tree]
    if memo is not None and tree in memo:
        return memo[tree]
    operands = [evaluate(child, inputs, memo) for child in tree[1:]]
    result = (UNARY | BINARY)[tree[0]](*operands)
    if memo is not None:
        memo[tree] = result
    return result


def mutate(tree: Tree, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Tree:
    """Change one op or one leaf of a tree."""
    if isinstance(tree, int):
        return draw(st.sampled_from([i for i in range(3) if i != tree]))
    if draw(st.booleans()):
        others = UNARY if tree[0] in UNARY else BINARY
        return (draw(st.sampled_from([o for o in sorted(others) if o != tree[0]])), *tree[1:])
    index = draw(st.integers(1, len(tree) - 1))
    return (*tree[:index], mutate(tree[index], draw), *tree[index + 1 :])


def forest_text(forest: list[Tree], order: list[int], *, is_shared: bool) -> str:
    """The text of a stage that returns every tree, computing them in `order`."""

    def stage(*inputs: Tensor) -> tuple[Tensor, ...]:
        memo: dict[Tree, Tensor] | None = {} if is_shared else None
        results = {i: evaluate(forest[i], inputs, memo) for i in order}
        evaluate(("neg", ("shift", forest[0])), inputs, None)  # dead
        return tuple(results[i] for i in range(len(forest)))

    return text_of(stage, X, Z, torch.ones(2, 4))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_graphs_print_alike_exactly_when_they_compute_alike(data: st.DataObject) -> None:
    forest = data.draw(st.lists(trees, min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(forest))))
    text = forest_text(forest, list(range(len(forest))), is_shared=True)
    assert forest_text(forest, order, is_shared=False) == text
    victim = data.draw(st.integers(0, len(forest) - 1))
    changed = [mutate(t, data.draw) if i == victim else t for i, t in enumerate(forest)]
    assert forest_text(changed, order, is_shared=True) != text
