"""tools/graph_equiv.py: exit codes and what a person reads, with a stand-in for the tracer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from trnc.compiler import promises
from trnc.compiler.program import ProgramConfig
from trnc.equiv.corpus import compare_corpora, format_replay, write_graph
from trnc.equiv.lock import PresetGraphs, StageCall, StageText, VariantGraphs, write_lock

TOOL = Path(__file__).parents[2] / "tools" / "graph_equiv.py"


def traced(model: str, preset: str, op: str) -> PresetGraphs:
    text = StageText(
        "layer",
        "trnc-graph 1\n# torch 2.13.0\ninput $0: f32[4]\n"
        f"%0: f32[4] = aten.{op}.default($0)\noutput %0\n",
    )
    calls = (StageCall("layer", text.digest, 30),)
    return PresetGraphs(
        model, preset, (VariantGraphs("decode-1/greedy", calls),), {text.digest: text}
    )


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("graph_equiv", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    trace_with(monkeypatch, "relu")
    return load_tool()


def trace_with(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    graphs = ModuleType("trnc.compiler.graphs")
    graphs.traced_graphs = lambda _, pairs, workers: [traced(*pair, op) for pair in pairs]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trnc.compiler.graphs", graphs)


def run(tool: ModuleType, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(tool.app, list(arguments))
    return result.exit_code, result.output


def test_accept_then_check_is_clean_and_a_change_fails_until_it_is_accepted(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("--graphs", str(tmp_path))
    assert run(tool, "check", *place)[0] == 1
    code, output = run(tool, "accept", *place)
    assert code == 0
    assert "smollm2-135m/batch8: added, 1 variants" in output
    unchanged = f"graphs unchanged: {len(tool.LOCKED)} variants, 1 distinct stages\n"
    assert run(tool, "check", *place) == (0, unchanged)
    trace_with(monkeypatch, "tanh")
    code, output = run(tool, "check", *place)
    assert code == 1
    assert "- %0: f32[4] = aten.relu.default($0)" in output
    assert "+ %0: f32[4] = aten.tanh.default($0)" in output
    assert "graph_equiv.py accept" in output
    assert "aten.tanh" in run(tool, "accept", *place)[1]
    assert run(tool, "check", *place)[0] == 0
    assert run(tool, "accept", *place) == (0, "graphs unchanged\n")
    assert len(list((tmp_path / "stages").iterdir())) == 1


def test_accept_replaces_a_broken_lock(tool: ModuleType, tmp_path: Path) -> None:
    place = ("--graphs", str(tmp_path))
    run(tool, "accept", *place)
    (tmp_path / "smollm2-135m" / "default.toml").write_text("[")
    code, output = run(tool, "accept", *place)
    assert code == 0
    assert "not a graph lock" in output
    assert run(tool, "check", *place)[0] == 0


def test_diff_compares_revisions_and_the_working_tree(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
    command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*command, "init", "-q"], check=True)
    for op in ("relu", "tanh"):
        write_lock(tmp_path / "graphs", [traced("smollm2-135m", "default", op)])
        subprocess.run([*command, "add", "graphs"], check=True)
        subprocess.run([*command, "commit", "-q", "-m", op], check=True)
    assert "+ %0: f32[4] = aten.tanh.default($0)" in run(tool, "diff", "HEAD~1")[1]
    assert "+ %0: f32[4] = aten.relu.default($0)" in run(tool, "diff", "HEAD", "HEAD~1")[1]
    assert run(tool, "diff", "HEAD") == (0, "graphs unchanged\n")


def test_an_error_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "diff", "no-such-revision"],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: git cannot read graphs/ of revision 'no-such-revision'")
    assert "Traceback" not in done.stderr


def graph(expression: str) -> str:
    head = "trnc-graph 1\n# torch 2.13.0\ninput $0: f32[4]\ninput $1: f32[4]\n"
    return f"{head}%0: f32[4] = {expression}\noutput %0\n"


@pytest.mark.parametrize(
    ("expression", "code", "words"),
    [
        (
            "aten.add.Tensor($1, $0)",
            0,
            "are equal over the reals\n  by commute",
        ),
        ("aten.sub.Tensor($1, $0)", 1, "refuted, output 0 differs by"),
        ("aten.logaddexp.default($0, $1)", 1, "refuted"),
    ],
)
def test_prove_answers_about_two_files(
    tool: ModuleType, tmp_path: Path, expression: str, code: int, words: str
) -> None:
    (tmp_path / "a.txt").write_text(graph("aten.add.Tensor($0, $1)"))
    (tmp_path / "b.txt").write_text(graph(expression))
    found, output = run(tool, "prove", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert found == code
    assert words in output


def test_replay_is_an_error_only_for_a_refactor(tool: ModuleType, tmp_path: Path) -> None:
    spec = {"kind": "layer"}
    for name, op in (("a", "relu"), ("b", "tanh")):
        text = traced("m", "p", op).stages
        (stage,) = text.values()
        write_graph(tmp_path / name, "layer", spec, stage.text)
        write_graph(tmp_path / name, "layer", {"only": name}, stage.text)
    result = compare_corpora(tmp_path / "a", tmp_path / "b")
    assert (result.same, len(result.changed), len(result.new), len(result.gone)) == (0, 1, 1, 1)
    shown = format_replay(result)
    assert "0 graphs are the same, 1 changed, 1 are new, 1 gone" in shown
    assert "+ %0: f32[4] = aten.tanh.default($0)" in shown
    assert tool.replay_status(result, "a commit") == 0
    assert tool.replay_status(result, "Move code [graphs-unchanged]") == 1
    assert compare_corpora(tmp_path / "a", tmp_path / "a").changed == ()


def test_a_promise_that_does_not_hold_is_named_and_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = load_tool()
    made = promises.claims

    def few(config: ProgramConfig) -> Iterator[promises.Claim]:
        return (c for c in made(config) if c.statement.startswith("decode-1/greedy"))

    monkeypatch.setattr(tool, "LOCKED", (("tiny-glm", "default"),))
    monkeypatch.setattr(tool, "_workers", lambda: 1)
    monkeypatch.setattr(promises, "claims", few)
    code, output = run(tool, "prove", "--promises")
    assert (code, output.splitlines()[0].split(" (")[0]) == (
        0,
        "tiny-glm/default: 15 of 15 promises proved",
    )
    monkeypatch.setattr(promises, "NEUTRAL", {**promises.NEUTRAL, "mask": -2})
    promises.neutral_ports.cache_clear()
    code, output = run(tool, "prove", "--promises")
    promises.neutral_ports.cache_clear()
    assert code == 1
    assert (
        "refuted: decode-1/greedy+mask with neutral inputs is decode-1/greedy: output 0" in output
    )
