"""`trnc bench`: a quick look at the speed of this machine, without HTTP and without peers.

Every round runs the same requests in both loops. In the plain one the device waits while the host
works, so the host's time of a step is what the step took outside the device call. In the overlapped
one the host works meanwhile, and what is left is the gap between two device calls.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trnc.cli.arguments import EngineArguments
from trnc.cli.console import say
from trnc.cli.engine_command import start
from trnc.core import SamplingParams, Step
from trnc.engine.loops import Engine, NoGrammars, overlapped_loop
from trnc.engine.messages import Shutdown, Submit, ToEngine
from trnc.engine.scheduler import Scheduler
from trnc.engine.trace import discard

if TYPE_CHECKING:
    from trnc.runtime.executor import ProgramExecutor

COLUMNS = ("sequences", "prefill tok/s", "decode tok/s", "ms a step", "host us", "gap us")
CAPTION = (
    "host: a decode step outside the device call, plain loop; "
    "gap: between two device calls, overlapped loop"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of the plain loop: seconds in all, and of them in the device call."""

    step: Step
    seconds: float
    device: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: seconds of all prefill steps, the decode steps, and the gaps between calls."""

    prefill_seconds: float
    decodes: list[Timed]
    gaps: list[float]


def run_bench(
    arguments: EngineArguments, *, prompt_tokens: int, output_tokens: int, rounds: int
) -> None:
    """Print a table of prefill and decode throughput for each number of sequences."""
    console = Console()
    executor, timings, _ = start(arguments, say(console, "dim"))
    title = f"{prompt_tokens} prompt tokens, {output_tokens} output tokens, medians"
    table = Table(title=title, caption=CAPTION)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    try:
        for rows in arguments.load_preset().decode_rows:
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
    executor: ProgramExecutor, rows: int, prompt_tokens: int, output_tokens: int, seed: int
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


def _measure(executor: ProgramExecutor, requests: list[Submit]) -> Measured:
    scheduler = Scheduler(info=executor.info)
    for request in requests:
        scheduler.submit(request)
    steps = list(_plain(executor, scheduler))
    return Measured(
        prefill_seconds=sum(timed.seconds for timed in steps if timed.step == "prefill"),
        decodes=[timed for timed in steps if timed.step == "decode"],
        gaps=_overlapped_gaps(executor, scheduler, requests),
    )


def _plain(executor: ProgramExecutor, scheduler: Scheduler) -> Iterator[Timed]:
    """Run the plain loop without its messages."""
    begun = time.perf_counter()
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, executor.submit(plan).result())
        done = time.perf_counter()
        call_began, call_ended = executor.recent_calls[-1]
        yield Timed(plan.step, done - begun, call_ended - call_began)
        begun = done


def _overlapped_gaps(
    executor: ProgramExecutor, scheduler: Scheduler, requests: list[Submit]
) -> list[float]:
    """Run the requests again, their prompts in the prefix cache, in the overlapped loop."""
    inbox: list[ToEngine] = [*requests]

    def receive(_wait: bool) -> list[ToEngine]:
        arrived, inbox[:] = inbox[:], []
        return arrived or ([] if scheduler.has_work else [Shutdown()])

    executor.recent_calls.clear()
    overlapped_loop(
        Engine(
            scheduler=scheduler,
            executor=executor,
            grammars=NoGrammars(),
            receive=receive,
            send=lambda _: None,
            trace=discard,
            clock=time.perf_counter,
        )
    )
    calls = executor.recent_calls
    return [later_began - ended for (_, ended), (later_began, _) in pairwise(calls)]


def _summary(rows: int, prompt_tokens: int, measured: list[Measured]) -> tuple[str, ...]:
    prefill = statistics.median(rows * prompt_tokens / m.prefill_seconds for m in measured)
    step = statistics.median(timed.seconds for m in measured for timed in m.decodes)
    host = statistics.median(timed.seconds - timed.device for m in measured for timed in m.decodes)
    gap = statistics.median(gap for m in measured for gap in m.gaps)
    return (
        str(rows),
        f"{prefill:.0f}",
        f"{rows / step:.1f}",
        f"{step * 1000:.2f}",
        f"{host * 1e6:.0f}",
        f"{gap * 1e6:.0f}",
    )
