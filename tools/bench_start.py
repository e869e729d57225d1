"""How long `trnc serve` takes to start when everything is cached: medians over interleaved rounds.

    python tools/bench_start.py --rounds 7
    python tools/bench_start.py --rounds 7 --beside path/to/another/checkout

Both times count from the start of the command's process: until /health answers 200, and until the
first token of a short prompt, streamed, has arrived. The CPU time is that of both processes until
they have stopped; on a machine that does other things too, it says more. Start each checkout once
before: everything must be in the cache.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent.parent
BODY = b'{"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "stream": true}'
HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the process, and CPU seconds of all of it."""

    healthy: float
    first_token: float
    cpu: float


def run(
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    model: Annotated[str, typer.Option("--model", "-m")] = "smollm2-135m",
    preset: Annotated[str, typer.Option("--preset", "-p")] = "default",
    beside: Annotated[
        Path | None, typer.Option(help="Another checkout, started in turns with this one.")
    ] = None,
) -> None:
    """Print a Markdown table of medians and ranges."""
    trees = {"this": HERE} | ({"beside": beside.resolve()} if beside else {})
    starts: dict[str, list[Start]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            starts[name].append(measure(tree, ["--model", model, "--preset", preset]))
    print("| checkout | to /health 200 | to the first token | CPU time |\n|---|---|---|---|")
    for name, measured in starts.items():
        columns = (
            [start.healthy for start in measured],
            [start.first_token for start in measured],
            [start.cpu for start in measured],
        )
        print(f"| {name} | {' | '.join(map(shown, columns))} |")


def shown(seconds: list[float]) -> str:
    """Return `median (min-max)`."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def measure(tree: Path, options: list[str]) -> Start:
    """Start a server, wait for it, ask it for one token, stop it."""
    port = free_port()
    begun, used = time.perf_counter(), children_cpu()
    with serving(tree, ["--port", str(port), *options]) as process:
        wait_until_ready(process)
        check_health(port)
        healthy = time.perf_counter() - begun
        wait_for_token(port)
        first_token = time.perf_counter() - begun
    return Start(healthy, first_token, children_cpu() - used)


def children_cpu() -> float:
    """Return the CPU seconds of children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def serving(tree: Path, options: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run the command of a checkout; it is stopped at the end."""
    main = "import sys; from trnc.cli.main import main; sys.argv[0] = 'trnc'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", main, "serve", "--require-cache", *options],
        cwd=tree,  # before all else in the path of `-c`
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Read what the server prints until it says that it serves; polling would slow it down."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Serving"):
            return
    raise SystemExit(f"the server ended with status {process.wait()}")


def check_health(port: int) -> None:
    """Ask once."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    if status != 200:
        raise SystemExit(f"/health answers {status} though the server is ready")


def wait_for_token(port: int) -> None:
    """Stream a completion until its first chunk."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", body=BODY, headers=HEADERS)
    line = connection.getresponse().readline()
    connection.close()
    if not line.startswith(b"data: {"):
        raise SystemExit(f"no token: {line!r}")


if __name__ == "__main__":
    typer.run(run)
