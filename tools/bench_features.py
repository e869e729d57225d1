"""What masks and penalties cost: decode steps of one engine, with and without them, in turns.

    python tools/bench_features.py
    python tools/bench_features.py --rows 1 --rows 8 --context 512 --rounds 200

Each round runs a step of every case, so that what the machine does besides falls on all of them
alike. A step is timed from its plan to its result. "Neutral" steps run the variant of a feature on
inputs that change nothing, as a request does whose neighbour uses the feature; "used" steps have a
mask that forbids half of the vocabulary, or penalties on 200 tokens. How the host comes by a mask
or a count is not in it.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from trnc.cli.arguments import EngineArguments, FeatureArguments
from trnc.cli.engine_command import start
from trnc.cli.options import job_count, store_root
from trnc.core import ExecutorInfo, SamplingParams, SequencePlan, StepPlan
from trnc.engine.executor import Executor

PENALIZED = 200  # distinct tokens
NEUTRAL = SamplingParams()
STRONG = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of decode step: its name, and what each of its sequences has beside a plain one."""

    name: str
    changes: Mapping[str, Any]


def main(
    rows: Annotated[
        list[int] | None, typer.Option(help="Sequences of a step. Default: 1 and 8.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the one computed.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each case.")] = 200,
    model: Annotated[str, typer.Option("--model", "-m")] = "smollm2-135m",
    preset: Annotated[
        str, typer.Option("--preset", "-p", help="Its largest decode bucket holds all rows.")
    ] = "batch8",
) -> None:
    """Print a Markdown table: the median of each case's steps, and of its ratio to the plain one.

    The first run compiles what the features add to the preset.
    """
    executor = _start(model, preset)
    print("| rows | step | ms | to plain (quartiles) |")
    print("|---|---|---|---|")
    for count in rows or [1, 8]:
        plans = {
            case.name: _plan(case, count, context, executor.info)
            for case in cases(executor.info.vocab_size)
        }
        for name, times in _measure(executor, plans, rounds, f"{count} rows").items():
            print(f"| {count} | {name} | {_summary(times)} |")
    executor.close()


def cases(vocab_size: int) -> list[Case]:
    """Return the plain step and those of the features."""
    words = -(-vocab_size // 32)
    half, everything = b"\x55" * (4 * words), b"\xff" * (4 * words)
    return [
        Case("plain", {}),
        Case("mask, neutral", {"masks": (everything,)}),
        Case("mask, used", {"masks": (half,)}),
        Case("penalties, neutral", {"counts": (_counts(1),)}),
        Case("penalties, used", {"counts": (_counts(PENALIZED),), "sampling": STRONG}),
    ]


def _counts(distinct: int) -> bytes:
    """Return `SequencePlan.counts` of so many tokens, each of which was output once."""
    return array("i", [*range(distinct), *(1,) * distinct]).tobytes()


def _plan(case: Case, rows: int, context: int, info: ExecutorInfo) -> StepPlan:
    pages = -(-(context + 1) // info.page_size)
    if rows > info.max_rows or context >= info.max_context or rows * pages >= info.num_pages:
        raise SystemExit(
            f"error: {rows} rows with a context of {context} do not fit: the preset has"
            f" {info.max_rows} rows, {info.max_context} tokens and {info.num_pages - 1} pages"
        )
    sequences = (
        SequencePlan(
            slot=row,
            start=context,
            count=1,
            token_ids=(row + 1,),
            pages=tuple(range(1 + row * pages, 1 + (row + 1) * pages)),
            sample=True,
            output_index=0,
            sampling=NEUTRAL,
        )
        for row in range(rows)
    )
    return StepPlan("decode", tuple(replace(each, **case.changes) for each in sequences))


def _measure(
    executor: Executor, plans: Mapping[str, StepPlan], rounds: int, title: str
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each case's steps and their ratios to the plain step of the round."""
    for plan in plans.values():
        executor.submit(plan).result()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for index in track(range(rounds), title, console=console):
        names = list(plans) if index % 2 == 0 else list(plans)[::-1]
        taken = {name: _seconds(executor, plans[name]) for name in names}
        for name, seconds in taken.items():
            times[name].append((seconds, seconds / taken["plain"]))
    return times


def _seconds(executor: Executor, plan: StepPlan) -> float:
    began = time.perf_counter()
    executor.submit(plan).result()
    return time.perf_counter() - began


def _summary(times: list[tuple[float, float]]) -> str:
    seconds, ratios = zip(*times, strict=True)
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{1e3 * statistics.median(seconds):.2f} | {middle:.3f} ({low:.3f} to {high:.3f})"


def _start(model: str, preset: str) -> Executor:
    switched = {"token_masks": True, "penalties": True}
    arguments = EngineArguments(
        model=model,
        preset=preset,
        features=FeatureArguments(switched=switched),
        backend="inductor",
        store=str(store_root(None)),
        jobs=job_count(None),
        require_cache=False,
    )
    return start(arguments, lambda line: console.print(line, style="dim"))[0]


if __name__ == "__main__":
    typer.run(main)
