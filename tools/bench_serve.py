"""Load on an OpenAI-compatible server, and what HTTP costs trnc: Markdown tables.

    python tools/bench_serve.py load --preset batch8            # starts `trnc serve` itself
    python tools/bench_serve.py load --url http://HOST:PORT     # any server that runs
    python tools/bench_serve.py efficiency                      # trnc through HTTP and without it

`load` sweeps over numbers of streams (each sends its next request when the last one is answered),
or with --rate over rates of random arrivals. Times are counted from the moment a request is sent.
`efficiency` gives the same prompts to an engine in a process of its own and to `trnc serve`, in
interleaved rounds, so that a noisy machine is noisy for both.

The client shares the cores with the server: what it takes of them is in the tables.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import typer
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from load_client import (
    Exchange,
    Reply,
    Server,
    Shape,
    closed_loop,
    parse_url,
    poisson,
    reply_of,
    request_bytes,
)

START_SECONDS = 900  # a start that compiles takes minutes

app = typer.Typer(add_completion=False, help=__doc__)

Model = Annotated[str, typer.Option(help="What `trnc serve` is started with.")]
PresetName = Annotated[str, typer.Option(help="What `trnc serve` is started with.")]
Loop = Annotated[str, typer.Option(help="The engine's loop: overlapped or plain.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Length of each prompt.")]
OutputTokens = Annotated[int, typer.Option(min=2, help="Tokens that each request asks for.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")]


@dataclass(frozen=True, slots=True)
class Running:
    """A server, and the process of it if this tool started it."""

    server: Server
    pid: int | None = None

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of this process, of the API process and of the engine so far."""
        spent = {"client": time.process_time()}
        if self.pid is not None:
            spent["API"] = _cpu_seconds(self.pid)
            spent["engine"] = sum(map(_cpu_seconds, _children(self.pid)))
        return spent


@dataclass(frozen=True, slots=True)
class Level:
    """What one level of load gave. Times are in seconds; each percentile is p50, p90, p99."""

    load: str
    requests: int
    errors: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    time_to_first_token: tuple[float, ...]
    inter_token: tuple[float, ...]
    end_to_end: tuple[float, ...]
    cpu_seconds: dict[str, float]
    first_error: str | None


# --- load -----------------------------------------------------------------------------------------


@app.command()
def load(
    url: Annotated[
        str | None, typer.Option(help="A server that runs; else one is started.")
    ] = None,
    model: Model = "smollm2-135m",
    preset: PresetName = "batch8",
    served_model: Annotated[
        str | None, typer.Option(help="The model's name at --url. Default: the first it lists.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat completions, of random words.")
    ] = False,
    streams: Annotated[
        list[int] | None, typer.Option(help="Requests at once; repeatable. Default: 1, 2, 4, 8.")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Random arrivals instead, so many a second; repeatable."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a level. Default: 4 a stream, or 32.")
    ] = None,
    prompt_tokens: PromptTokens = 256,
    output_tokens: OutputTokens = 64,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="So many tokens at the start are the same in every prompt.")
    ] = 0,
    vocab: Annotated[int, typer.Option(help="Token ids are drawn below this.")] = 30_000,
    seed: int = 0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for every output token; not all servers know the field.")
    ] = True,
    json_file: Json = None,
) -> None:
    """Measure a server under load, at one level after the other."""
    shape = Shape(prompt_tokens, output_tokens, shared_prefix, vocab=vocab, seed=seed)
    with ExitStack() as stack:
        if url is None:
            running = stack.enter_context(trnc_server(model, preset))
        else:
            running = Running(server_at(url, served_model))
        server = replace(running.server, chat=chat, ignore_eos=ignore_eos)
        running = replace(running, server=server)
        measure = _Measure(running, shape)
        measure.closed(max(streams or [4]), max(streams or [4]))  # warms up
        if rate:
            levels = [measure.random(r, requests or 32) for r in rate]
        else:
            levels = [measure.closed(s, requests or 4 * s) for s in streams or (1, 2, 4, 8)]
    for line in _level_table(levels):
        print(line)
    if json_file is not None:
        what = {"shape": asdict(shape), "chat": chat, "levels": [asdict(v) for v in levels]}
        json_file.write_text(json.dumps(what, indent=1) + "\n")


class _Measure:
    """Runs levels one after the other; no two of their requests have the same prompt."""

    def __init__(self, running: Running, shape: Shape) -> None:
        self._running = running
        self._shape = shape
        self._next = 0

    def closed(self, streams: int, count: int) -> Level:
        requests = self._requests(count)
        return self._level(
            f"{streams} streams", lambda: closed_loop(self._running.server, requests, streams)
        )

    def random(self, rate: float, count: int) -> Level:
        requests = self._requests(count)
        seed = self._shape.seed
        return self._level(
            f"{rate:g} a second",
            lambda: poisson(self._running.server, requests, rate=rate, seed=seed),
        )

    def _requests(self, count: int) -> list[bytes]:
        first, self._next = self._next, self._next + count
        return [
            request_bytes(self._running.server, self._shape, index)
            for index in range(first, self._next)
        ]

    def _level(self, name: str, work: Any) -> Level:
        before = self._running.cpu_seconds()
        begun = time.perf_counter()
        exchanges: list[Exchange] = uvloop.run(work())
        seconds = time.perf_counter() - begun
        after = self._running.cpu_seconds()
        print(f"{name}: {seconds:.1f} s", file=sys.stderr)
        cpu = {name: after[name] - before[name] for name in after}
        return level_of(name, [reply_of(e) for e in exchanges], seconds, cpu)


def level_of(name: str, replies: Sequence[Reply], seconds: float, cpu: dict[str, float]) -> Level:
    """Summarise the answers of one level."""
    good = [reply for reply in replies if reply.error is None]
    gaps = [b - a for reply in good for a, b in zip(reply.times, reply.times[1:], strict=False)]
    return Level(
        load=name,
        requests=len(replies),
        errors=len(replies) - len(good),
        seconds=seconds,
        prompt_tokens=sum(reply.prompt_tokens for reply in good),
        output_tokens=sum(reply.output_tokens for reply in good),
        time_to_first_token=percentiles([reply.times[0] for reply in good]),
        inter_token=percentiles(gaps),
        end_to_end=percentiles([reply.times[-1] for reply in good]),
        cpu_seconds=cpu,
        first_error=next((reply.error for reply in replies if reply.error is not None), None),
    )


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """Return the 50th, 90th and 99th percentile (the nearest rank), or nothing of nothing."""
    ranked = sorted(values)
    return tuple(ranked[-(-len(ranked) * p // 100) - 1] for p in (50, 90, 99) if ranked)


def _level_table(levels: Sequence[Level]) -> Iterator[str]:
    yield (
        "| load | requests | errors | requests/s | output tok/s | first token, ms p50 / p90 / p99 "
        "| between tokens, ms p50 / p90 / p99 | whole, s p50 / p99 | CPU, s a second |"
    )
    yield "|---" * 9 + "|"
    for level in levels:
        cpu = ", ".join(f"{n} {s / level.seconds:.3f}" for n, s in level.cpu_seconds.items())
        whole = " / ".join(f"{level.end_to_end[i]:.2f}" for i in (0, 2) if level.end_to_end)
        yield (
            f"| {level.load} | {level.requests} | {level.errors} "
            f"| {(level.requests - level.errors) / level.seconds:.2f} "
            f"| {level.output_tokens / level.seconds:.1f} | {_ms(level.time_to_first_token)} "
            f"| {_ms(level.inter_token)} | {whole} | {cpu} |"
        )
        if level.first_error is not None:
            print(f"{level.load}: the first error: {level.first_error}", file=sys.stderr)


def _ms(values: Sequence[float]) -> str:
    return " / ".join(f"{value * 1000:.1f}" for value in values)


# --- efficiency -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One batch of requests: seconds from the first one sent to the last token of all.

    `decode` counts from when every request has its first token.
    """

    seconds: float
    decode: float
    cpu_seconds: dict[str, float]


@app.command()
def efficiency(
    model: Model = "smollm2-135m",
    preset: PresetName = "batch8",
    loop: Loop = "overlapped",
    streams: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 64,
    json_file: Json = None,
) -> None:
    """Measure the engine alone and through HTTP, and print the ratio of their throughputs."""
    shape = Shape(prompt_tokens, output_tokens)
    alone: list[Round] = []
    served: list[Round] = []
    with trnc_worker(model, preset, loop) as worker, trnc_server(model, preset, loop) as running:
        for round_ in range(rounds + 1):
            indexes = range(round_ * streams, (round_ + 1) * streams)
            turns = [
                (alone, lambda i=indexes: worker.measure(shape, i)),
                (served, lambda i=indexes: _through_http(running, shape, i)),
            ]
            for results, turn in turns if round_ % 2 else reversed(turns):
                measured = turn()
                if round_ > 0:  # the first round warms up
                    results.append(measured)
            print(f"round {round_} of {rounds}", file=sys.stderr)
    for line in _efficiency_table(shape, streams, alone, served):
        print(line)
    if json_file is not None:
        what = {"alone": [asdict(r) for r in alone], "served": [asdict(r) for r in served]}
        json_file.write_text(json.dumps(what, indent=1) + "\n")


def _through_http(running: Running, shape: Shape, indexes: Sequence[int]) -> Round:
    requests = [request_bytes(running.server, shape, index) for index in indexes]
    before = running.cpu_seconds()
    exchanges = uvloop.run(closed_loop(running.server, requests, len(requests)))
    after = running.cpu_seconds()
    replies = [reply_of(exchange) for exchange in exchanges]
    if error := next((reply.error for reply in replies if reply.error is not None), None):
        raise SystemExit(f"a request failed: {error}")
    assert all(reply.output_tokens == shape.output_tokens for reply in replies)
    ended = max(reply.sent + reply.times[-1] for reply in replies)
    decoding = max(reply.sent + reply.times[0] for reply in replies)
    spent = {name: after[name] - before[name] for name in after}
    return Round(ended - min(reply.sent for reply in replies), ended - decoding, spent)


def _efficiency_table(
    shape: Shape, streams: int, alone: Sequence[Round], served: Sequence[Round]
) -> Iterator[str]:
    output = streams * shape.output_tokens
    total = output + streams * shape.prompt_tokens
    yield "| tok/s, median (min-max) | engine alone | through HTTP | ratio, median of the rounds |"
    yield "|---|---|---|---|"
    for name, tokens, seconds in (
        ("prompt and output", total, "seconds"),
        ("output, once all prompts are done", output, "decode"),
    ):
        ours = [tokens / getattr(r, seconds) for r in alone]
        theirs = [tokens / getattr(r, seconds) for r in served]
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        yield (
            f"| {name} | {_range(ours)} | {_range(theirs)} "
            f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    yield ""
    for name, results in (("engine alone", alone), ("through HTTP", served)):
        cpu = {
            part: statistics.median(r.cpu_seconds[part] for r in results) / output * 1e6
            for part in results[0].cpu_seconds
        }
        parts = ", ".join(f"{part} {us:.0f}" for part, us in cpu.items())
        yield f"CPU a token of output, {name}, us: {parts}"


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def trnc_server(model: str, preset: str, loop: str = "overlapped") -> Iterator[Running]:
    """Run `trnc serve` on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trnc.cli", "serve", "--model", model, "--preset", preset]
    process = subprocess.Popen([*command, "--port", str(port), "--loop", loop], stdout=sys.stderr)
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}")
        yield Running(server_at(f"http://127.0.0.1:{port}", None), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start; its output says why")


def server_at(url: str, name: str | None) -> Server:
    """Return the server at an address; without a name it is asked for its first model."""
    host, port, base = parse_url(url)
    if name is None:
        with urllib.request.urlopen(f"http://{host}:{port}{base}/v1/models") as answer:
            name = json.load(answer)["data"][0]["id"]
    return Server(host, port, name, base)


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine in a process of its own that waits for its turns."""

    stdin: IO[str]
    stdout: IO[str]

    def measure(self, shape: Shape, indexes: Sequence[int]) -> Round:
        """Run one batch of requests, all given at once."""
        task = {"shape": asdict(shape), "indexes": list(indexes)}
        self.stdin.write(json.dumps(task) + "\n")
        self.stdin.flush()
        line = self.stdout.readline()
        if not line:
            raise SystemExit("the engine's process ended")
        return Round(**json.loads(line))


@contextmanager
def trnc_worker(model: str, preset: str, loop: str) -> Iterator[Worker]:
    """Run an engine without a server."""
    command = [sys.executable, __file__, "engine-worker", model, preset, loop]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:
            yield Worker(process.stdin, process.stdout)


@app.command(hidden=True)
def engine_worker(model: str, preset: str, loop: str) -> None:
    """Answer tasks on stdin until it is closed."""
    from trnc.cli.arguments import EngineArguments
    from trnc.cli.engine_command import start
    from trnc.compiler.store import default_root

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr
    executor, _, _ = start(
        EngineArguments(
            model=model,
            preset=preset,
            backend="inductor",
            store=str(default_root()),
            jobs=len(os.sched_getaffinity(0)),
            require_cache=False,
        ),
        lambda line: print(line, file=sys.stderr),
    )
    for line in sys.stdin:
        task = json.loads(line)
        measured = _run_batch(executor, loop, Shape(**task["shape"]), task["indexes"])
        out.write(json.dumps(asdict(measured)) + "\n")
        out.flush()
    executor.close()


def _run_batch(executor: Any, loop: str, shape: Shape, indexes: Sequence[int]) -> Round:
    from trnc.core import SamplingParams
    from trnc.engine.loops import Engine, overlapped_loop, plain_loop
    from trnc.engine.messages import Deltas, Shutdown, Submit
    from trnc.engine.scheduler import Scheduler
    from trnc.engine.trace import discard

    requests = [
        Submit(str(i), tuple(shape.prompt(i)), SamplingParams(), shape.output_tokens)
        for i in indexes
    ]
    first: dict[str, float] = {}
    scheduler = Scheduler(info=executor.info)

    def send(message: Any) -> None:
        if isinstance(message, Deltas):
            now = time.perf_counter()
            for delta in message.deltas:
                first.setdefault(delta.request_id, now)

    def receive(_wait: bool) -> list[Any]:
        arrived, requests[:] = requests[:], []
        return arrived or ([] if scheduler.has_work else [Shutdown()])

    engine = Engine(
        scheduler=scheduler,
        executor=executor,
        receive=receive,
        send=send,
        trace=discard,
        clock=time.monotonic,
    )
    cpu, begun = time.process_time(), time.perf_counter()
    (overlapped_loop if loop == "overlapped" else plain_loop)(engine)
    ended = time.perf_counter()
    spent = {"engine": time.process_time() - cpu}
    return Round(ended - begun, ended - max(first.values()), spent)


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that just ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _cpu_seconds(pid: int) -> float:
    """Return what the threads of a process have run so far."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    app()
