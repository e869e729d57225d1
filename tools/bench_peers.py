"""trnc and other engines on the same model, the same cores and in the same run.

    python tools/bench_peers.py run --python llama.cpp=PYTHON --json results.json
    python tools/bench_peers.py show results.json --plot docs/benchmarks.png

Every engine is a process of its own that waits between its turns, and the rounds are interleaved,
so that a noisy machine is noisy for all; the first round warms up and is dropped. All pick tokens
greedily, from random prompts that are new each time. What an engine needs is converted once from
the GGUF file of the default model, in a folder beside it; an engine that its Python lacks is
skipped with a line that says so. `tools/peers/` has a file for each engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers import process, report
from peers.process import Contestant, PeerError, Worker
from peers.protocol import Settings, Task
from peers.registry import LINES, OURS, PEERS, Line, PeerInfo, chosen_peers
from peers.report import Results

REST = 0.3  # seconds between turns, in which threads that spin for work go to sleep
START_CONTEXT = 512  # prompt tokens of the sequence whose process's memory is measured

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)

Pythons = Annotated[
    list[str] | None,
    typer.Option("--python", help="An engine's Python, as NAME=PATH; repeatable."),
]
Plot = Annotated[Path | None, typer.Option(help="Draw the results into this PNG file.")]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: tasks of (rows, context), rounds of them, and rounds of fresh starts."""

    tasks: tuple[tuple[int, int], ...]
    rounds: int
    starts: int


@app.command()
def run(
    python: Pythons = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Only this engine beside trnc, as NAME or NAME:WEIGHTS; repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    starts: Annotated[int, typer.Option(min=0, help="Rounds that start fresh processes.")] = 3,
    rows: Annotated[list[int] | None, typer.Option(help="Sequences at once; repeatable.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = len(os.sched_getaffinity(0)),
    json: Annotated[Path | None, typer.Option(help="Write the raw results to this file.")] = None,
    plot: Plot = None,
) -> None:
    """Measure the engines in interleaved rounds and print Markdown tables."""
    tasks = [
        (line.rows, line.context)
        for line in LINES
        if line.rows and (rows is None or line.rows in rows)
    ]
    plan = Plan(tuple(dict.fromkeys(tasks)), rounds, starts)
    settings = _settings(plan, threads)
    results = Results(OURS.label(OURS.variants[0]), threads, rounds)
    contestants = _contestants(results, parse_pythons(python), chosen_peers(peer))
    contestants = _prepared(results, contestants, settings)
    for _ in _measured(results, contestants, settings, plan):
        if json:
            results.save(json)
    _show(results, plot)


@app.command()
def show(results: Path, plot: Plot = None) -> None:
    """Print the tables of results that `run --json` wrote, and draw them."""
    _show(Results.load(results), plot)


def _show(results: Results, plot: Path | None) -> None:
    for part in (report.summary, report.details, report.notes):
        print("\n".join(part(results)) + "\n")
    if plot:
        from peers.plot import draw

        draw(results, plot)


def _settings(plan: Plan, threads: int) -> Settings:
    from trnc.checkpoint.source import DEFAULT_MODEL, resolve

    model = resolve(DEFAULT_MODEL).path
    rows, contexts = zip(*plan.tasks, strict=True)
    return Settings(model, model.parent / "peers", "", threads, max(rows), max(contexts))


def parse_pythons(options: Sequence[str] | None) -> dict[str, str]:
    """Return the Python of each engine that --python names; raises BadParameter."""
    pythons = {}
    for option in options or ():
        name, equals, path = option.partition("=")
        if not equals or name not in {peer.key for peer in PEERS}:
            known = ", ".join(peer.key for peer in PEERS)
            raise typer.BadParameter(f"--python {option}: must be NAME=PATH, NAME one of {known}")
        pythons[name] = path
    return pythons


def _contestants(
    results: Results, pythons: dict[str, str], wanted: dict[PeerInfo, tuple[str, ...]]
) -> list[Contestant]:
    """Return the engines whose Python has them; note the others."""
    contestants = []
    for peer, variants in wanted.items():
        python = pythons.get(peer.key, sys.executable)
        try:
            version = process.probe(python, peer)
        except PeerError as error:
            _skip(results, peer.title, f"not installed ({error}); {peer.install}")
            continue
        for variant in variants:
            contestants.append(Contestant(peer, variant, python))
            results.versions[peer.label(variant)] = version
    return contestants


def _prepared(
    results: Results, contestants: Sequence[Contestant], settings: Settings
) -> list[Contestant]:
    """Convert the model for each engine; note those that cannot."""
    process.convert(settings.model, settings.folder)
    ready = []
    for contestant in contestants:
        mine = replace(settings, variant=contestant.variant)
        try:
            process.prepare(contestant, mine)
            process.prepare(contestant, _alone(mine))
        except PeerError as error:
            _skip(results, contestant.label, f"cannot prepare the model: {error}")
        else:
            ready.append(contestant)
    return ready


def _measured(
    results: Results, contestants: Sequence[Contestant], settings: Settings, plan: Plan
) -> Iterator[None]:
    """Run all rounds; an engine that fails drops out, and what it has measured stays.

    Yields after each round, so that a run that is cut short has something to show.
    """
    with ExitStack() as stack:
        workers = {
            contestant: stack.enter_context(
                process.worker(contestant, replace(settings, variant=contestant.variant))
            )
            for contestant in contestants
        }
        for round_ in range(plan.rounds + 1):
            for contestant in _turns(list(workers), round_):
                _say(f"round {round_} of {plan.rounds}: {contestant.label}")
                try:
                    _one_turn(results, contestant, workers[contestant], settings, plan, round_)
                except PeerError as error:
                    _skip(results, contestant.label, f"failed in round {round_}: {error}")
                    del workers[contestant]
            yield


def _turns(contestants: Sequence[Contestant], round_: int) -> list[Contestant]:
    """Return the order of a round: everyone is first, second and so on in turn."""
    first = round_ % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _one_turn(
    results: Results,
    contestant: Contestant,
    worker: Worker,
    settings: Settings,
    plan: Plan,
    round_: int,
) -> None:
    measured: list[tuple[Line, float]] = []
    for rows, context in plan.tasks:
        time.sleep(REST)
        speed = worker.measure(Task(rows, context, round_))
        measured += [
            (line, getattr(speed, line.part))
            for line in LINES
            if (line.rows, line.context) == (rows, context)
        ]
    if round_ <= plan.starts and plan.starts:
        time.sleep(REST)
        alone = _alone(replace(settings, variant=contestant.variant))
        started = process.start(contestant, alone)
        parts = {"first token": started.seconds, "peak memory": started.peak_mib}
        measured += [(line, parts[line.part]) for line in LINES if line.part in parts]
    if round_ > 0:  # the first round warms up
        for line, value in measured:
            results.add(contestant.label, line, value)


def _alone(settings: Settings) -> Settings:
    return replace(settings, rows=1, context=START_CONTEXT)


def _skip(results: Results, engine: str, reason: str) -> None:
    results.skipped[engine] = reason
    _say(f"{engine}: {reason}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
