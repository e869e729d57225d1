"""`trnc serve`: runs the HTTP server beside the engine process, stops both together.

The port is bound and the engine started before this module is imported: a port in use fails at
once, and the engine gets ready meanwhile. The server answers with 503 until it is. Nothing outlives
`serve`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from typing import Any

import uvicorn
import uvloop
import zmq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trnc.engine.messages import Ready
from trnc.serve.access import Admission
from trnc.serve.app import create_app
from trnc.serve.engine_client import EngineClient, bind_socket
from trnc.serve.engine_process import EngineProcess
from trnc.serve.errors import EngineUnavailableError
from trnc.serve.listening import ServeOptions, raise_file_limit, tls_context, url_of
from trnc.serve.model import ServedModel


def serve(
    *,
    listener: socket.socket,
    engine: EngineProcess,
    model: ServedModel,
    options: ServeOptions,
    settings: Mapping[str, Any],
    console: Console,
    started: float,
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status of the command.

    `settings` are what `/server_info` tells of the engine's start; `started` is when the process
    started, by `time.perf_counter`.

    Raises:
        EngineError: the engine ended before it was ready.
    """
    return uvloop.run(
        _serve(
            listener=listener,
            process=engine,
            model=model,
            options=options,
            settings=settings,
            console=console,
            started=started,
        )
    )


async def _serve(
    *,
    listener: socket.socket,
    process: EngineProcess,
    model: ServedModel,
    options: ServeOptions,
    settings: Mapping[str, Any],
    console: Console,
    started: float,
) -> int:
    def show(line: str) -> None:
        elapsed = time.perf_counter() - started
        console.print(f"[dim]{elapsed:6.1f} s[/dim]  {escape(line)}", highlight=False)

    tls = tls_context(options)
    raise_file_limit()
    async with _client(process, show, options.engine_stop_seconds) as engine:
        admission = Admission(limit=options.max_concurrent_requests)
        app = create_app(
            engine=engine, model=model, options=options, admission=admission, settings=settings
        )
        server = _Server(uvicorn_config(app, tls))
        stop = _Stop(server, admission, options, show)
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, stop)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        ready = asyncio.ensure_future(engine.wait_ready())
        try:
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                gc.freeze()  # what the start left stays: the collector need not look at it again
                url = url_of(listener, "http" if tls is None else "https")
                seconds = time.perf_counter() - started
                _print_ready(console, ready.result(), model, url, options, seconds)
            await serving
        finally:
            server.should_exit = True
            ready.cancel()
            await asyncio.gather(serving, ready, return_exceptions=True)
        console.print("Stopping.", highlight=False)
    return 0


@asynccontextmanager
async def _client(
    engine: EngineProcess, show: Callable[[str], None], stop_seconds: float
) -> AsyncIterator[EngineClient]:
    """Run the client of an engine process; both are gone afterwards."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        client = EngineClient(socket=bind_socket(context, engine.endpoint), on_starting=show)
        # A thread, for no event loop waits for a process that it did not start.
        exited = asyncio.ensure_future(asyncio.to_thread(engine.process.wait))
        tasks = [
            asyncio.ensure_future(client.run()),
            asyncio.ensure_future(_watch(exited, client)),
        ]
        try:
            yield client
        finally:
            _ask_to_stop(engine, client)
            await _stop(engine, exited, stop_seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(exited: asyncio.Future[int], client: EngineClient) -> None:
    status = await asyncio.shield(exited)
    client.lose(f"The engine process ended with status {status}; its log says why.")


def _ask_to_stop(engine: EngineProcess, client: EngineClient) -> None:
    """Let an engine that serves finish its step; one that still starts reads no messages."""
    try:
        _ = client.info
    except EngineUnavailableError:
        engine.process.terminate()
    else:
        client.shutdown()


async def _stop(engine: EngineProcess, exited: asyncio.Future[int], seconds: float) -> None:
    """Wait for an engine that was asked to stop; then insist."""
    for insist in (engine.process.terminate, engine.process.kill):
        await asyncio.wait([exited], timeout=seconds)
        if exited.done():
            return
        insist()
    await exited


class _Stop:
    """What a signal does: the first one drains the server, the second one ends it at once."""

    def __init__(
        self,
        server: uvicorn.Server,
        admission: Admission,
        options: ServeOptions,
        show: Callable[[str], None],
    ) -> None:
        self._server = server
        self._admission = admission
        self._options = options
        self._show = show
        self._draining: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        if self._draining is not None:
            self._server.should_exit = self._server.force_exit = True
            return
        if self._admission.open:
            self._show(f"Waiting for {self._admission.open} open requests; again to end them now.")
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._admission.drain(
            announce_seconds=self._options.drain_seconds,
            grace_seconds=self._options.grace_seconds,
        )
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """A server that leaves signals alone: uvicorn would raise them again before we clean up."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing; the caller handles signals."""
        yield


def uvicorn_config(app: object, tls: ssl.SSLContext | None) -> uvicorn.Config:
    """Return how uvicorn serves the app, with the requests drained before it is told to stop."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="httptools",
        loop="none",  # the running one
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        ssl_context_factory=None if tls is None else lambda *_: tls,
        timeout_graceful_shutdown=1,
    )


def _print_ready(
    console: Console,
    ready: Ready,
    model: ServedModel,
    url: str,
    options: ServeOptions,
    seconds: float,
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
        *_notes(model, url, options, ready.features),
        f"Serving [bold]{names}[/bold] on [bold]{url}[/bold] (ready in {seconds:.1f} s)",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _notes(
    model: ServedModel, url: str, options: ServeOptions, features: Sequence[str]
) -> Iterator[str]:
    """Yield what the operator should know and might not expect."""
    penalty = model.defaults.repetition_penalty
    if penalty not in (None, 1.0) and "penalties" not in features:
        yield (
            f"[yellow]The model's generation config asks for a repetition_penalty of {penalty},"
            " which is not applied: it needs --penalties.[/yellow]"
        )
    host = url.partition("://")[2].rsplit(":", 1)[0].strip("[]")
    if ip_address(host.split("%")[0]).is_loopback:
        return
    lacks = [
        *(() if options.api_keys else ("without authentication (--api-key)",)),
        *(() if url.startswith("https") else ("without encryption (--ssl-certfile)",)),
    ]
    yield f"[yellow]Reachable from other machines{''.join(f', {lack}' for lack in lacks)}.[/yellow]"
