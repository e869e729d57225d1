"""`trnc bench`: a quick look at the speed of this machine, without HTTP and without peers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trnc.cli.arguments import EngineArguments
from trnc.cli.console import say
from trnc.cli.engine_command import start
from trnc.core import Executor, SamplingParams
from trnc.engine.messages import Submit
from trnc.engine.scheduler import Scheduler
from trnc.presets import load_preset


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: seconds of all prefill and all decode steps, and of the host beside the device."""

    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    host_seconds: float


def run_bench(
    arguments: EngineArguments, *, prompt_tokens: int, output_tokens: int, rounds: int
) -> None:
    """Print a table of prefill and decode throughput for each number of sequences."""
    console = Console()
    executor, timings, _ = start(arguments, say(console, "dim"))
    table = Table(title=f"{prompt_tokens} prompt tokens, {output_tokens} output tokens, medians")
    columns = ("sequences", "prefill tok/s", "decode tok/s", "ms a step", "of it host ms")
    for column in columns:
        table.add_column(column, justify="right")
    try:
        for rows in load_preset(arguments.preset).decode_rows:
            measured = [
                _measure(executor, _requests(executor, rows, prompt_tokens, output_tokens, round_))
                for round_ in range(rounds)
            ]
            table.add_row(*_summary(rows, prompt_tokens, measured))
    finally:
        executor.close()
    console.print(table)
    say(console)("start: " + ", ".join(f"{part} {took:.2f} s" for part, took in timings.items()))


def _requests(
    executor: Executor, rows: int, prompt_tokens: int, output_tokens: int, seed: int
) -> list[Submit]:
    """Random prompts, different in each round so that no prefix is cached."""
    pick = random.Random(seed * 1000 + rows)
    vocab = executor.info.vocab_size
    return [
        Submit(
            request_id=f"bench-{row}",
            prompt_ids=tuple(pick.randrange(vocab) for _ in range(prompt_tokens)),
            sampling=SamplingParams(),
            max_tokens=output_tokens,
        )
        for row in range(rows)
    ]


def _measure(executor: Executor, requests: list[Submit]) -> Measured:
    scheduler = Scheduler(info=executor.info)
    for request in requests:
        scheduler.submit(request)
    seconds = {"prefill": 0.0, "decode": 0.0}
    device, steps, begun = 0.0, 0, time.perf_counter()
    for step, total, waited in _steps(executor, scheduler):
        seconds[step] += total
        device += waited
        steps += step == "decode"
    host = time.perf_counter() - begun - device
    return Measured(seconds["prefill"], seconds["decode"], steps, host)


def _steps(executor: Executor, scheduler: Scheduler) -> Iterator[tuple[str, float, float]]:
    """Run the plain loop; yield each step with its seconds, in all and of the device alone."""
    begun = time.perf_counter()
    while (plan := scheduler.plan()) is not None:
        submitted = executor.submit(plan)
        waiting = time.perf_counter()
        result = submitted.result()
        landed = time.perf_counter()
        scheduler.commit(plan, result)
        done = time.perf_counter()
        yield plan.step, done - begun, landed - waiting
        begun = done


def _summary(rows: int, prompt_tokens: int, measured: list[Measured]) -> tuple[str, ...]:
    prefill = statistics.median(rows * prompt_tokens / m.prefill_seconds for m in measured)
    step = statistics.median(m.decode_seconds / m.decode_steps for m in measured)
    host = statistics.median(m.host_seconds / m.decode_steps for m in measured)
    return (
        str(rows),
        f"{prefill:.0f}",
        f"{rows / step:.1f}",
        f"{step * 1000:.2f}",
        f"{host * 1000:.2f}",
    )
