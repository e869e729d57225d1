"""`trnc serve`: starts the engine process, runs the HTTP server, stops both together.

The port is bound first, so that a port in use fails at once and not after the model is loaded; the
server answers from then on, with 503 until the engine is ready. The engine is a child process with
its own session: a Ctrl-C reaches this process only, which lets open streams finish and then stops
the engine. Nothing outlives `serve`.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import uvicorn
import uvloop
import zmq.asyncio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trnc.engine.messages import Ready
from trnc.errors import ConfigError
from trnc.serve.app import MAX_BODY_BYTES, create_app
from trnc.serve.engine_client import EngineClient, bind_socket
from trnc.serve.model import ServedModel

EngineArgv = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to listen, and how long to wait at the end.

    Open requests get `grace_seconds` to finish, then the engine `engine_stop_seconds` for its last
    step.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = MAX_BODY_BYTES
    grace_seconds: int = 30
    engine_stop_seconds: float = 10.0


def serve(
    *,
    engine_argv: EngineArgv,
    model: ServedModel,
    options: ServeOptions,
    console: Console,
    started: float,
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status of the command.

    `engine_argv` returns the command line of the engine for the endpoint that it must connect to.
    `started` is when the process started, by `time.perf_counter`.

    Raises:
        ConfigError: the address cannot be bound.
        EngineError: the engine ended before it was ready.
    """
    with listen(options) as listener:
        return uvloop.run(
            _serve(
                listener=listener,
                engine_argv=engine_argv,
                model=model,
                options=options,
                console=console,
                started=started,
            )
        )


async def _serve(
    *,
    listener: socket.socket,
    engine_argv: EngineArgv,
    model: ServedModel,
    options: ServeOptions,
    console: Console,
    started: float,
) -> int:
    def show(line: str) -> None:
        elapsed = time.perf_counter() - started
        console.print(f"[dim]{elapsed:6.1f} s[/dim]  {escape(line)}", highlight=False)

    async with _engine(engine_argv, show, options.engine_stop_seconds) as engine:
        app = create_app(engine=engine, model=model, max_body_bytes=options.max_body_bytes)
        server = _Server(_uvicorn_config(app, options))
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, server.handle_exit, signum, None)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        ready = asyncio.ensure_future(engine.wait_ready())
        try:
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                url = _url(listener)
                _print_ready(console, ready.result(), model, url, time.perf_counter() - started)
            await serving
        finally:
            server.should_exit = True
            ready.cancel()
            await asyncio.gather(serving, ready, return_exceptions=True)
        console.print("Stopping.", highlight=False)
    return 0


@asynccontextmanager
async def _engine(
    engine_argv: EngineArgv, show: Callable[[str], None], stop_seconds: float
) -> AsyncIterator[EngineClient]:
    """Run an engine process and the client of it; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="trnc-") as folder, zmq.asyncio.Context() as context:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        client = EngineClient(socket=bind_socket(context, endpoint), on_starting=show)
        process = await asyncio.create_subprocess_exec(
            *engine_argv(endpoint), start_new_session=True
        )
        tasks = [
            asyncio.ensure_future(client.run()),
            asyncio.ensure_future(_watch(process, client)),
        ]
        try:
            yield client
        finally:
            client.shutdown()
            await _stop(process, stop_seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(process: asyncio.subprocess.Process, client: EngineClient) -> None:
    status = await process.wait()
    client.lose(f"The engine process ended with status {status}; its log says why.")


async def _stop(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Wait for an engine that was asked to stop; then insist."""
    for insist in (process.terminate, process.kill):
        try:
            await asyncio.wait_for(process.wait(), seconds)
            return
        except TimeoutError:
            with suppress(ProcessLookupError):
                insist()
    await process.wait()


class _Server(uvicorn.Server):
    """A server that leaves signals alone: uvicorn would raise them again before we clean up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing; the caller handles signals."""
        yield


def _uvicorn_config(app: object, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="httptools",
        loop="none",  # the running one
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=options.grace_seconds,
    )


@contextmanager
def listen(options: ServeOptions) -> Iterator[socket.socket]:
    """Bind the address now; raises ConfigError saying what to do about it.

    Connections inherit TCP_NODELAY. Event loops set it only on sockets that they make themselves,
    and without it an answer's body waits 40 ms for the acknowledgement of its headers.
    """
    if not 0 <= options.port < 2**16:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"--port must be between 0 and 65535, got {options.port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {options.host}: {error}") from None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise ConfigError(_bind_error(options, error)) from None
        yield listener


def _bind_error(options: ServeOptions, error: OSError) -> str:
    where = f"--port {options.port}: cannot listen on {options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}, the port is in use. Stop what uses it, or give another --port."
    if error.errno == errno.EACCES:
        return f"{where}, permission denied. Ports below 1024 need rights; give another --port."
    return f"{where}: {error.strerror}."


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _print_ready(
    console: Console, ready: Ready, model: ServedModel, url: str, seconds: float
) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for part, took in ready.timings.items():
        table.add_row(part, f"{took:.2f} s")
    console.print(table)
    tokens = (ready.num_pages - 1) * ready.page_size
    names = escape(", ".join(model.names))
    lines = [
        f"{ready.max_rows} sequences at once, {ready.max_context} tokens each,"
        f" KV pages for {tokens} tokens in all.",
        *_notes(model, url),
        f"Serving [bold]{names}[/bold] on [bold]{url}[/bold] (ready in {seconds:.1f} s)",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _notes(model: ServedModel, url: str) -> Iterator[str]:
    """Yield what the operator should know and might not expect."""
    penalty = model.defaults.repetition_penalty
    if penalty not in (None, 1.0):
        yield (
            f"[yellow]The model's generation config asks for a repetition_penalty of {penalty},"
            " which is not supported yet and not applied.[/yellow]"
        )
    host = url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
    if not ip_address(host.split("%")[0]).is_loopback:
        yield "[yellow]Reachable from other machines, without authentication.[/yellow]"
