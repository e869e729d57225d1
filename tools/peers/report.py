"""From measurements to tables: medians, the best peer of each line, the ratio to it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.registry import LINES, Line


@dataclass(slots=True)
class Results:
    """What was measured, of which engines (ours is `ours`) and how."""

    ours: str
    threads: int
    rounds: int
    versions: dict[str, str] = field(default_factory=dict)  # engine -> version
    skipped: dict[str, str] = field(default_factory=dict)  # engine -> reason
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, engine: str, line: Line, value: float) -> None:
        """Append the value of one round."""
        self.values.setdefault((engine, line.title), []).append(value)

    def lines(self) -> list[Line]:
        """Return the lines that have any value, in the order of the table."""
        measured = {title for _, title in self.values}
        return [line for line in LINES if line.title in measured]

    def engines(self) -> list[str]:
        """Return the engines that have any value, in the order of the registry."""
        measured = {engine for engine, _ in self.values}
        return [engine for engine in self.versions if engine in measured]

    def median(self, engine: str, line: Line) -> float | None:
        """Return an engine's median on a line, None if it has no value."""
        values = self.values.get((engine, line.title))
        return statistics.median(values) if values else None

    def save(self, path: Path) -> None:
        """Write the raw results as JSON."""
        rows = [
            {"engine": engine, "line": line, "values": values}
            for (engine, line), values in self.values.items()
        ]
        path.write_text(json.dumps(_fields(self) | {"results": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote."""
        stored = json.loads(path.read_text())
        rows = stored.pop("results")
        return cls(**stored, values={(r["engine"], r["line"]): r["values"] for r in rows})


def _fields(results: Results) -> dict[str, Any]:
    names = ("ours", "threads", "rounds", "versions", "skipped")
    return {name: getattr(results, name) for name in names}


def best_peer(results: Results, line: Line) -> tuple[str, float] | None:
    """Return the peer (not ours) with the best median on a line, and that median."""
    medians = [
        (engine, value)
        for engine in results.engines()
        if engine != results.ours and (value := results.median(engine, line)) is not None
    ]
    if not medians:
        return None
    pick = max if line.more_is_better else min
    return pick(medians, key=lambda entry: entry[1])


def ratio(line: Line, ours: float, theirs: float) -> float:
    """Return how many times better ours is; below 1 it is worse."""
    return ours / theirs if line.more_is_better else theirs / ours


def summary(results: Results) -> Iterator[str]:
    """Yield a Markdown table: ours, the best peer and the ratio of their medians, line by line."""
    yield f"| median | {results.ours} | best peer | ratio |"
    yield "|---|---|---|---|"
    for line in results.lines():
        ours, best = results.median(results.ours, line), best_peer(results, line)
        title = f"{line.title}, {line.unit}"
        theirs = f"{number(best[1])} ({best[0]})" if best else "-"
        times = f"**{ratio(line, ours, best[1]):.2f}**" if ours and best else "-"
        yield f"| {title} | {number(ours) if ours else '-'} | {theirs} | {times} |"


def details(results: Results) -> Iterator[str]:
    """Yield a Markdown table: every engine's median with its range, line by line."""
    lines = results.lines()
    yield f"| median (min-max) | {' | '.join(f'{line.title}, {line.unit}' for line in lines)} |"
    yield "|---" * (len(lines) + 1) + "|"
    for engine in results.engines():
        cells = (_range(results.values.get((engine, line.title), [])) for line in lines)
        yield f"| {engine} | {' | '.join(cells)} |"


def notes(results: Results) -> Iterator[str]:
    """Yield what a reader must know beside the tables: versions, and who did not take part."""
    yield f"{results.threads} threads, {results.rounds} interleaved rounds."
    versions = dict.fromkeys(results.versions[engine] for engine in results.engines())
    yield f"Versions: {'; '.join(versions)}."
    for engine, reason in results.skipped.items():
        yield f"{engine}: {reason}"


def number(value: float) -> str:
    """Return a value with the digits that mean something."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = number(min(values)), number(max(values))
    return f"{number(statistics.median(values))} ({low}-{high})"
