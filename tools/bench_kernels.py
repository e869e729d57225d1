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
from trnc.ops.attention import kv_write, paged_attention
from trnc.ops.linear import embedding, linear
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import pack
from trnc.ops.sampling import logprobs, sample, sample_greedy

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
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 32
STEPS = (  # sequences x new tokens, after this many cached ones
    (1, 1, 511),
    (4, 1, 511),
    (16, 1, 511),
    (1, 1, 4095),
    (4, 1, 4095),
    (1, 512, 0),
    (1, 512, 3584),
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


def bench_attention(budget: float) -> Table:
    """Time one layer's attention and KV write; its pages stay in the caches if they fit."""
    table = Table("step", "cache", "µs", "GB/s", "GFLOP/s", "kv_write µs", title="attention")
    for rows, count, start in STEPS:
        for dtype in (torch.float16, torch.float32):
            q, new, pages, layout = attention_step(rows, count, start, dtype)
            seconds = median_seconds(
                lambda: paged_attention(q, *new, *pages, *layout, 0.125),  # noqa: B023
                budget,
            )
            write = median_seconds(lambda: kv_write(*pages, *new, *layout), budget)  # noqa: B023
            pairs = rows * count * (start + (count + 1) / 2)
            size = rows * (start + count) * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
            table.add_row(
                f"{rows} x {count} after {start}",
                str(dtype).removeprefix("torch."),
                f"{seconds * 1e6:.1f}",
                f"{size / seconds / 1e9:.1f}",
                f"{4 * pairs * HEADS * HEAD_DIM / seconds / 1e9:.0f}",
                f"{write * 1e6:.1f}",
            )
    return table


def attention_step(
    rows: int, count: int, start: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return q, (k_new, v_new), (k_pages, v_pages) and (block_tables, sequences) of a step."""
    width = -(-(start + count) // PAGE_SIZE)
    pages, tokens = rows * width, rows * count
    new = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).to(dtype)
    keys = torch.randn(pages, KV_HEADS, HEAD_DIM, PAGE_SIZE).to(dtype)
    values = torch.randn(pages, KV_HEADS, PAGE_SIZE, HEAD_DIM).to(dtype)
    tables = torch.randperm(pages).int().view(rows, width)
    sequences = torch.tensor([[r * count, count, start] for r in range(rows)], dtype=torch.int32)
    q = torch.randn(tokens, HEADS, HEAD_DIM)
    return q, (new[0], new[1]), (keys, values), (tables, sequences)


def bench_sampling(budget: float) -> Table:
    """Time picks from logits whose nucleus at 0.95 is about 4,000 tokens: harder than text's."""
    table = Table("op", "rows", "µs", title="sampling")
    for rows in (1, 4, 16):
        logits = torch.randn(rows, VOCABULARY) * 3
        one, seeds = torch.ones(rows), torch.arange(rows)

        def draw(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
            top = torch.full((rows,), top_k, dtype=torch.int32)  # noqa: B023
            return sample(logits, one, top, one * top_p, one * min_p, seeds, seeds)  # noqa: B023

        calls: tuple[tuple[str, Callable[[], object]], ...] = (
            ("greedy", lambda: sample_greedy(logits)),  # noqa: B023
            ("logprobs, top 20", lambda: logprobs(logits, seeds, 20)),  # noqa: B023
            ("sample", draw),
            ("sample, top_p 0.95", lambda: draw(top_p=0.95)),
            ("sample, top_k 40, top_p 0.95", lambda: draw(top_k=40, top_p=0.95)),
            ("sample, min_p 0.05", lambda: draw(min_p=0.05)),
        )
        for name, call in calls:
            table.add_row(name, str(rows), f"{median_seconds(call, budget) * 1e6:.1f}")
        table.add_section()
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
    console.print(bench_attention(budget))
    console.print(bench_sampling(budget))


if __name__ == "__main__":
    typer.run(main)
