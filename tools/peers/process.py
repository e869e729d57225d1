"""Engines from outside: each is a process in its own Python, spoken to in JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.protocol import Settings, Speed, Task
from peers.registry import PeerInfo

TOOLS = Path(__file__).resolve().parent.parent
LAST_LINES = 5


class PeerError(Exception):
    """An engine could not do what it was asked; says what it printed last."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One engine with one form of the weights."""

    peer: PeerInfo
    variant: str
    python: str

    @property
    def label(self) -> str:
        """The name in the table."""
        return self.peer.label(self.variant)


@dataclass(frozen=True, slots=True)
class Start:
    """A fresh process: seconds to its first token, and the peak memory of its whole life."""

    seconds: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that waits for tasks."""

    label: str
    process: subprocess.Popen[str]
    log: Path

    def measure(self, task: Task) -> Speed:
        """Let it run one task; raises PeerError if it died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asdict(task)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below says so
        return Speed(**_answer(self.process, self.label, self.log))


def probe(python: str, peer: PeerInfo) -> str:
    """Return the version of an engine; raises PeerError if this Python lacks it."""
    command = [python, "-m", f"peers.{peer.module}", "probe", "{}"]
    try:
        done = subprocess.run(
            command, cwd=TOOLS, env=_environment(1), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise PeerError(str(error)) from None
    if done.returncode:
        raise PeerError(_tail(done.stderr, 1))
    version: str = json.loads(done.stdout)["version"]
    return version


def convert(model: Path, folder: Path) -> None:
    """Write the Hugging Face folders that other engines convert from; needs trnc, so runs here."""
    command = [sys.executable, "-m", "peers.checkpoint", str(model), str(folder)]
    _run(command, folder / "logs" / "checkpoint.log", threads=1)


def prepare(contestant: Contestant, settings: Settings) -> None:
    """Let an engine convert the model in its own way, once; raises PeerError."""
    log = _log(contestant, settings)
    _run(_command(contestant, "prepare", settings), log, threads=settings.threads)


def logits(contestant: Contestant, settings: Settings, windows: list[list[int]], out: Path) -> None:
    """Write an engine's logits for windows of token ids to a file; raises PeerError."""
    command = [*_command(contestant, "logits", settings), str(out)]
    log = _log(contestant, settings)
    _run(command, log, threads=settings.threads, text=json.dumps(windows))


@contextmanager
def worker(contestant: Contestant, settings: Settings) -> Iterator[Worker]:
    """Start an engine that waits for tasks, and end it afterwards."""
    process, log = _start(contestant, "serve", settings)
    try:
        yield Worker(contestant.label, process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start(contestant: Contestant, settings: Settings) -> Start:
    """Time a fresh process up to its first token; raises PeerError."""
    begun = time.perf_counter()
    process, log = _start(contestant, "start", settings)
    _answer(process, contestant.label, log)
    seconds = time.perf_counter() - begun
    peak = _answer(process, contestant.label, log)["peak_mib"]
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    return Start(seconds, peak)


def _start(
    contestant: Contestant, mode: str, settings: Settings
) -> tuple[subprocess.Popen[str], Path]:
    log = _log(contestant, settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            _command(contestant, mode, settings),
            cwd=TOOLS,
            env=_environment(settings.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    return process, log


def _answer(process: subprocess.Popen[str], label: str, log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        status = process.wait()
        said = _tail(log.read_text(errors="replace"), LAST_LINES)
        raise PeerError(f"{label} ended with status {status}; its last lines:\n{said}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _run(command: list[str], log: Path, *, threads: int, text: str = "") -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=TOOLS,
            env=_environment(threads),
            input=text,
            text=True,
            stdout=file,
            stderr=file,
            check=False,
        )
    if done.returncode:
        raise PeerError(_tail(log.read_text(errors="replace"), LAST_LINES))


def _command(contestant: Contestant, mode: str, settings: Settings) -> list[str]:
    return [contestant.python, "-m", f"peers.{contestant.peer.module}", mode, settings.dump()]


def _environment(threads: int) -> dict[str, str]:
    """Return what every engine gets: this checkout of trnc, its threads, and no network."""
    return os.environ | {
        "PYTHONPATH": str(TOOLS.parent),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _log(contestant: Contestant, settings: Settings) -> Path:
    return settings.folder / "logs" / f"{contestant.peer.key}-{contestant.variant}.log"


def _tail(text: str, count: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])
