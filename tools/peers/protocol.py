"""What every engine's file implements, and how it is measured: the same loop for all of them.

A file is run as `python -m peers.NAME MODE SETTINGS`:

    probe    print the version of the engine; fails if this Python lacks it
    prepare  convert the model, once
    serve    answer one JSON line with another: a `Task` on stdin, its `Speed` on stdout
    start    generate a first token, print it, then run one task and print the peak memory
    logits   read windows of token ids on stdin, write their logits to a file

Standard library only: this runs in every engine's Python.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

OUTPUT = 64  # tokens of a sequence whose time is taken
SHORT_PROMPT = 16  # tokens of the prompt whose first token is waited for
FIRST_ID = 20  # ids below are special tokens


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine is opened: `model` is the GGUF file, `folder` has what was converted from it.

    `rows` sequences of at most `context` prompt tokens will run at once.
    """

    model: Path
    folder: Path
    variant: str
    threads: int
    rows: int
    context: int

    def dump(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def load(cls, text: str) -> Settings:
        """Read what `dump` wrote."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("model", "folder")}
        return cls(**(fields | paths))


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: so many sequences of so many tokens, and a seed that makes them new."""

    rows: int
    context: int
    seed: int

    def prompts(self, vocab: int) -> list[list[int]]:
        """Return random prompts, so that no cache of prefixes has them."""
        pick = random.Random(f"{self.rows} {self.context} {self.seed}")
        return [
            [pick.randrange(FIRST_ID, vocab) for _ in range(self.context)] for _ in range(self.rows)
        ]

    @property
    def limit(self) -> int:
        """The most tokens that a sequence may get: the first ones run on while others prefill."""
        return OUTPUT + 2 * self.rows + 8


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, over all sequences: of the prompts until each has its first token, and
    of the output after that.
    """

    prefill: float
    decode: float


class Engine(Protocol):
    """An open engine. It picks tokens greedily and never stops a sequence at an end token."""

    @property
    def vocab(self) -> int:
        """The number of token ids."""

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Take the prompts of a task, computing nothing yet; each will get at most `limit`."""

    def step(self) -> Sequence[int]:
        """Run a step; return the rows (positions in the prompts) that got a token."""

    def end(self) -> None:
        """Forget the sequences of this task."""


def measure(engine: Engine, task: Task) -> Speed:
    """Run a task: the prompts first, then the decode of all rows together."""
    engine.begin(task.prompts(engine.vocab), task.limit)
    counts = [0] * task.rows
    begun = time.perf_counter()
    while min(counts) == 0:
        _count(counts, engine.step())
    prefilled, before = time.perf_counter(), sum(counts)
    while sum(counts) - before < OUTPUT * task.rows:
        _count(counts, engine.step())
    done = time.perf_counter()
    engine.end()
    prompt_tokens = task.rows * task.context
    return Speed(prompt_tokens / (prefilled - begun), (sum(counts) - before) / (done - prefilled))


def _count(counts: list[int], rows: Sequence[int]) -> None:
    if not rows:
        return
    for row in rows:
        counts[row] += 1


@dataclass(frozen=True, slots=True)
class Peer:
    """The functions of one engine's file. `logits` [tokens, vocabulary] may be absent."""

    version: Callable[[], str]
    prepare: Callable[[Settings], None]
    open: Callable[[Settings], Engine]
    logits: Callable[[Settings, list[list[int]]], Any] | None = None


def main(peer: Peer) -> None:
    """Do what the command line says; stdout is kept for answers alone."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    mode, text, *rest = sys.argv[1:]
    if mode == "probe":
        _write(out, {"version": peer.version()})
        return
    settings = Settings.load(text)
    if mode == "prepare":
        peer.prepare(settings)
    elif mode == "serve":
        _serve(peer.open(settings), out)
    elif mode == "start":
        _start(peer, settings, out)
    elif mode == "logits":
        _logits(peer, settings, Path(rest[0]))
    else:
        raise SystemExit(f"unknown mode {mode}")


def _serve(engine: Engine, out: IO[str]) -> None:
    for line in sys.stdin:
        _write(out, asdict(measure(engine, Task(**json.loads(line)))))


def _start(peer: Peer, settings: Settings, out: IO[str]) -> None:
    engine = peer.open(settings)
    task = Task(rows=1, context=SHORT_PROMPT, seed=time.time_ns())
    engine.begin(task.prompts(engine.vocab), task.limit)
    while not engine.step():
        pass
    _write(out, {"event": "first token"})
    engine.end()
    measure(engine, Task(rows=1, context=settings.context, seed=time.time_ns()))
    _write(out, {"event": "end", "peak_mib": _peak_mib()})


def _peak_mib() -> float:
    """Return the most memory that this process has had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM")


def _logits(peer: Peer, settings: Settings, path: Path) -> None:
    import numpy as np

    if peer.logits is None:
        raise SystemExit("this engine gives no logits")
    np.save(path, peer.logits(settings, json.load(sys.stdin)))


def _write(out: IO[str], message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
