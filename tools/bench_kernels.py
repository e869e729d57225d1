"""Time the native kernels on the default model's shapes: `python tools/bench_kernels.py`.

Copies of each weight that exceed the caches are cycled through, as a decode step does with its
layers, so that weights are read from memory unless --hot is given. Figures are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trnc.checkpoint.layouts import Dense, Int4Groups, Int8Groups, Layout
from trnc.ops import native
from trnc.ops.linear import embedding, linear
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import pack

ROWS = (1, 2, 4, 8, 16, 64, 256)
WIDTH, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
SHAPES = (
    ("qkv", "i4g32", 960, WIDTH),
    ("out", "i4g32", WIDTH, WIDTH),
    ("gate, up", "i4g32", 2 * INTERMEDIATE, WIDTH),
    ("down", "i4g32", WIDTH, INTERMEDIATE),
    ("gate, up", "i4g32s", 2 * INTERMEDIATE, WIDTH),
    ("gate, up", "i8g32", 2 * INTERMEDIATE, WIDTH),
    ("gate, up", "bf16", 2 * INTERMEDIATE, WIDTH),
    ("gate, up", "f32", 2 * INTERMEDIATE, WIDTH),
    ("head", "i8g32", VOCABULARY, WIDTH),
)
WORKING_SET = 80 << 20  # bytes of weights, about a decode step's


def random_weight(format: str, n: int, k: int) -> Tensor:
    logical: Layout
    groups = (n, k // 32)
    if format == "i8g32":
        logical = Int8Groups(torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(groups))
    elif format.startswith("i4"):
        offset = torch.rand(groups) if format == "i4g32" else None
        q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        logical = Int4Groups(q, torch.rand(groups), offset)
    else:
        logical = Dense(torch.randn(n, k))
    return pack(logical, format)


def median_seconds(call: Callable[[], object], budget: float) -> float:
    call()
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while not times or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_linears(budget: float, hot: bool) -> Table:
    table = Table("weight", "format", "N x K", "rows", "µs", "GB/s", "GOP/s", title="linear")
    for name, format, n, k in SHAPES:
        first = random_weight(format, n, k)
        copies = 1 if hot else max(1, WORKING_SET // first.numel())
        weights = cycle([first, *(first.clone() for _ in range(copies - 1))])
        for rows in ROWS:
            x = torch.randn(rows, k)
            seconds = median_seconds(lambda: linear(x, next(weights), None, format, n), budget)  # noqa: B023
            bandwidth, rate = first.numel() / seconds / 1e9, 2 * rows * n * k / seconds / 1e9
            cells = (f"{seconds * 1e6:.1f}", f"{bandwidth:.1f}", f"{rate:.0f}")
            table.add_row(name, format, f"{n} x {k}", str(rows), *cells)
        table.add_section()
    return table


def bench_rows(budget: float) -> Table:
    table = Table("op", "rows", "µs", "GB/s", title="other ops")
    weight, head = torch.rand(WIDTH), random_weight("i8g32", VOCABULARY, WIDTH)
    for rows in ROWS:
        x, gate_up = torch.randn(rows, WIDTH), torch.randn(rows, 2 * INTERMEDIATE)
        ids = torch.randint(0, VOCABULARY, (rows,))
        calls: tuple[tuple[str, int, Callable[[], object]], ...] = (
            ("rms_norm", 8 * x.numel(), lambda: rms_norm(x, weight, 1e-5)),  # noqa: B023
            ("silu_mul", 6 * gate_up.numel(), lambda: silu_mul(gate_up)),  # noqa: B023
            ("embedding", 5 * x.numel(), lambda: embedding(ids, head, "i8g32", WIDTH)),  # noqa: B023
        )
        for name, size, call in calls:
            seconds = median_seconds(call, budget)
            table.add_row(name, str(rows), f"{seconds * 1e6:.1f}", f"{size / seconds / 1e9:.1f}")
    return table


def main(
    budget: Annotated[float, typer.Option(help="seconds for each line")] = 0.1,
    hot: Annotated[bool, typer.Option(help="reuse one weight, so that caches hold it")] = False,
    threads: Annotated[int, typer.Option(help="0 takes them from the machine")] = 0,
) -> None:
    console = Console()
    target = native.detect_target()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        native.load_kernels(native.build_kernels(target, Path(folder)))
        built = time.perf_counter() - start
    if threads:
        native.set_num_threads(threads)
    console.print(f"{target.name}, {native.num_threads()} threads, built in {built:.1f} s")
    console.print(bench_linears(budget, hot))
    console.print(bench_rows(budget))


if __name__ == "__main__":
    typer.run(main)
