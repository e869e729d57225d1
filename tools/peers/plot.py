"""The results as bars: one panel for each line of the table, ours highlighted, the best on top."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.registry import Line
from peers.report import Results, best_peer, number, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, THEIRS, INK, FAINT = "#0b7a75", "#c3ccd5", "#1f2933", "#7b8794"
COLUMNS = 2
PANEL_INCHES = (5.2, 2.5)
LONGEST = 3.0  # a bar of so many times the median bar is cut off


def draw(results: Results, path: Path) -> None:
    """Write a PNG; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    lines = results.lines()
    columns = min(COLUMNS, len(lines))
    rows = -(-len(lines) // columns)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.7)
    style: Any = {"font.family": "sans-serif", "font.size": 9, "text.color": INK}
    with plt.rc_context(style):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
        for panel in axes.flat[len(lines) :]:
            panel.set_axis_off()
        for panel, line in zip(axes.flat, lines, strict=False):
            _panel(panel, results, line)
        figure.suptitle(
            f"SmolLM2-135M-Instruct, {results.threads} CPU threads: median and range of "
            f"{results.rounds} interleaved rounds",
            x=0.01,
            ha="left",
            fontsize=11.5,
            fontweight="bold",
        )
        figure.tight_layout(rect=(0, 0, 1, 0.99), h_pad=1.8, w_pad=2.0)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _panel(panel: Axes, results: Results, line: Line) -> None:
    """Draw one line of the table, best engine first."""
    medians = {e: m for e in results.engines() if (m := results.median(e, line)) is not None}
    engines = sorted(medians, key=lambda e: medians[e], reverse=line.more_is_better)
    most = max(max(results.values[engine, line.title]) for engine in engines)
    edge = min(most, LONGEST * statistics.median(medians.values()))
    for place, engine in enumerate(engines):
        _bar(panel, place, results.values[engine, line.title], edge, ours=engine == results.ours)
    _labels(panel, results, line, engines)
    panel.set_xlim(0, 1.15 * edge)


def _bar(panel: Axes, place: int, values: Sequence[float], edge: float, *, ours: bool) -> None:
    """Draw the median with its range, cut off at `edge`, and its number at the end."""
    median = statistics.median(values)
    panel.barh(place, min(median, edge), color=OURS if ours else THEIRS, height=0.74)
    if max(values) <= edge:
        panel.hlines(place, min(values), max(values), color=INK, linewidth=0.9)
    panel.text(
        min(max(values), edge) + 0.015 * edge,
        place,
        number(median) if median <= edge else f"\u2192 {number(median)}",
        va="center",
        color=OURS if ours else INK,
        fontweight="bold" if ours else "normal",
    )


def _labels(panel: Axes, results: Results, line: Line, engines: list[str]) -> None:
    panel.set_yticks(range(len(engines)), engines)
    panel.invert_yaxis()
    panel.tick_params(axis="both", length=0)
    panel.set_xticks([])
    for side in panel.spines.values():
        side.set_visible(False)
    for label in panel.get_yticklabels():
        ours = label.get_text() == results.ours
        label.set_color(OURS if ours else INK)
        label.set_fontweight("bold" if ours else "normal")
    _title(panel, results, line)


def _title(panel: Axes, results: Results, line: Line) -> None:
    """Write what the panel shows, and how ours compares with the best peer."""
    better = "more is better" if line.more_is_better else "less is better"
    panel.set_title(line.title, loc="left", fontsize=10, fontweight="bold", pad=18)
    ours, best = results.median(results.ours, line), best_peer(results, line)
    versus = (
        f"; {ratio(line, ours, best[1]):.2f}\u00d7 as good as the best peer"
        if ours and best
        else ""
    )
    panel.text(
        0,
        1.03,
        f"{line.unit}, {better}{versus}",
        transform=panel.transAxes,
        color=FAINT,
        fontsize=8,
    )
