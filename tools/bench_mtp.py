"""What speculation gives: the answers to held-out prompts with and without it, in turns.

    python tools/bench_mtp.py --domain chat --streams 1 --streams 4
    python tools/bench_mtp.py --preset mtp-always --preset mtp-dynamic --temperature 0.8
    python tools/bench_mtp.py --fixed   # and each depth by itself: where time goes

Each preset has a process of its own. They take turns, one batch of prompts after the other, so that
what the machine does besides falls on all of them alike. Prompts are those that the training of the
MTP block never saw (tools/mtp/prompts.py). Every answer is compared with the one of the first
preset: it must be equal.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Annotated

import typer
from mtp.generation import encode
from mtp.prompts import DOMAINS, compose
from rich.console import Console
from rich.progress import track

from trnc.checkpoint.source import quiet, resolve
from trnc.checkpoint.tokenizer import load_tokenizer
from trnc.cli.arguments import EngineArguments
from trnc.cli.engine_command import start
from trnc.cli.options import job_count, store_root
from trnc.core import ExecutorInfo, SamplingParams, StepPlan
from trnc.engine.executor import Executor, StepHandle
from trnc.engine.loops import Engine, NoGrammars, overlapped_loop
from trnc.engine.messages import Deltas, Shutdown, Submit, ToApi, ToEngine
from trnc.engine.scheduler import Scheduler
from trnc.engine.trace import discard

PROMPTS = 200  # held-out prompts in all; there are hardly more

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Limited:
    """An executor that claims to have fewer rows, so that so many streams run at once."""

    executor: Executor
    info: ExecutorInfo

    def submit(self, plan: StepPlan) -> StepHandle:
        return self.executor.submit(plan)

    def compiles_after_ready(self) -> int:
        return self.executor.compiles_after_ready()

    def close(self) -> None:
        self.executor.close()


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch of prompts gave: each answer, how long all took, and drafts by position."""

    answers: dict[str, list[int]]
    seconds: float
    drafted: list[int]
    accepted: list[int]

    @property
    def rate(self) -> float:
        """Output tokens a second, prefill included."""
        return sum(map(len, self.answers.values())) / self.seconds


class Served:
    """One preset with so many streams; the policy of depths learns from batch to batch.

    With a `depth` every round has it: 0 is plain decoding by a preset that could speculate.
    """

    def __init__(self, executor: Executor, streams: int, depth: int | None) -> None:
        info = replace(executor.info, max_rows=streams)
        if depth is not None:
            info = replace(info, mtp_depths=(depth,) if depth else (), mtp_always=depth > 0)
        self._executor = Limited(executor, info)
        self._scheduler = Scheduler(info=self._executor.info)

    def run(self, requests: list[Submit]) -> Batch:
        """Serve a batch through the overlapped loop, as a server does."""
        inbox: list[ToEngine] = [*requests]
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._scheduler.flush()  # meanwhile its pages were those of others on the same executor
        counters = self._scheduler.counters
        counters.drafted, counters.accepted = [], []

        def receive(_wait: bool) -> list[ToEngine]:
            arrived, inbox[:] = inbox[:], []
            return arrived or ([] if self._scheduler.has_work else [Shutdown()])

        def send(message: ToApi) -> None:
            if isinstance(message, Deltas):
                for delta in message.deltas:
                    answers[delta.request_id] += delta.token_ids

        began = time.perf_counter()
        overlapped_loop(
            Engine(
                scheduler=self._scheduler,
                executor=self._executor,
                grammars=NoGrammars(),
                receive=receive,
                send=send,
                trace=discard,
                clock=time.perf_counter,
            )
        )
        seconds = time.perf_counter() - began
        return Batch(answers, seconds, counters.drafted, counters.accepted)


class Preset:
    """A preset in a process of its own, which waits between its turns."""

    def __init__(self, model: str, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, model, name), daemon=True).start()
        theirs.close()  # so that its death ends a `recv`
        self.depths: tuple[int, ...] = self._connection.recv()

    def run(self, streams: int, depth: int | None, requests: list[Submit]) -> Batch:
        """Serve a batch; see `Served`."""
        self._connection.send((streams, depth, requests))
        batch: Batch = self._connection.recv()
        return batch


def _serve(connection: Connection, model: str, preset: str) -> None:
    executor = _start(model, preset)
    connection.send(executor.info.mtp_depths)
    served: dict[tuple[int, int | None], Served] = {}
    with suppress(EOFError):  # the end
        while True:
            streams, depth, requests = connection.recv()
            one = served.setdefault((streams, depth), Served(executor, streams, depth))
            connection.send(one.run(requests))


def main(
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="The first is what others are set against. Default: default, mtp-dynamic."
        ),
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Sequences at once. Default: 1 and 4.")
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(DOMAINS)}. Default: all.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Output tokens of a prompt, in the mean.")] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    fixed: Annotated[
        bool, typer.Option(help="Measure each depth of the last preset by itself, too.")
    ] = False,
    model: Annotated[str, typer.Option("--model", "-m")] = "smollm2-135m",
) -> None:
    """Print a Markdown table: tokens a second, the ratio, and what was accepted."""
    preset = preset or ["default", "mtp-dynamic"]
    domains = domain or list(DOMAINS)
    presets = {name: Preset(model, name) for name in preset}
    last = preset[-1]
    print(
        "| streams | preset | tokens/s | ratio (range) | tokens a verify | accepted at 1, 2, ... |"
    )
    print("|---|---|---|---|---|---|")
    for count in streams or [1, 4]:
        batch_list = list(_requests(model, domains, batches, count, tokens, temperature))
        turns = {name: partial(one.run, count, None) for name, one in presets.items()}
        if fixed:
            for depth in (0, *presets[last].depths):
                turns[f"{last}, depth {depth}"] = partial(presets[last].run, count, depth)
        for run in turns.values():
            run(batch_list[0])  # warms up, and shows the policy what depths cost
        results: dict[str, list[Batch]] = {name: [] for name in turns}
        for index, requests in enumerate(track(batch_list, f"{count} streams", console=console)):
            for name in list(turns)[:: 1 if index % 2 == 0 else -1]:
                results[name].append(turns[name](requests))
        base = results[preset[0]]
        for name, runs in results.items():
            _check(base, runs, name)
            print(f"| {count} | {name} | {_summary(base, runs)} |")


def _start(model: str, preset: str) -> Executor:
    arguments = EngineArguments(
        model=model,
        preset=preset,
        backend="inductor",
        store=str(store_root(None)),
        jobs=job_count(None),
        require_cache=False,
    )
    return start(arguments, lambda line: console.print(f"{preset}: {line}", style="dim"))[0]


def _requests(
    model: str, domains: list[str], batches: int, streams: int, tokens: int, temperature: float
) -> Iterator[list[Submit]]:
    """Yield batches of prompts, as many a stream as make a batch long enough to time.

    Answers end at different lengths, from half of `tokens` to one and a half times as many: where
    all ended at once, all would begin at once, which no server sees.
    """
    tokenizer = load_tokenizer(resolve(model, report=quiet))
    prompts = [p for p in compose("held_out", PROMPTS, seed=1) if p.domain in domains]
    size = 2 * streams
    sampling = SamplingParams(temperature=temperature)
    eos = tuple(tokenizer.eos_token_ids)
    for first in range(0, min(batches * size, len(prompts) // size * size), size):
        yield [
            Submit(
                request_id=str(index),
                prompt_ids=tuple(encode(tokenizer, prompt)),
                sampling=replace(sampling, seed=first + index),
                max_tokens=tokens // 2 + tokens * (index * 3 % size) // size,
                stop_token_ids=eos,
            )
            for index, prompt in enumerate(prompts[first : first + size])
        ]


def _check(base: list[Batch], runs: list[Batch], name: str) -> None:
    if any(mine.answers != theirs.answers for mine, theirs in zip(runs, base, strict=True)):
        raise SystemExit(f"error: {name} gives other answers than the first preset")


def _summary(base: list[Batch], runs: list[Batch]) -> str:
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(runs, base, strict=True)]
    drafted = _totals([run.drafted for run in runs])
    accepted = _totals([run.accepted for run in runs])
    shares = ", ".join(f"{a / d:.2f}" for a, d in zip(accepted, drafted, strict=True)) or "-"
    per_verify = 1 + sum(accepted) / drafted[0] if drafted else 1.0
    rate = statistics.median(run.rate for run in runs)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{rate:.0f} | {spread} | {per_verify:.2f} | {shares}"


def _totals(counts: list[list[int]]) -> list[int]:
    return [sum(position) for position in zip_longest(*counts, fillvalue=0)]


if __name__ == "__main__":
    typer.run(main)
