"""The process boundary: a request out, token deltas in.

One ZeroMQ socket, read from a callback of the event loop. Reading never waits for a consumer: each
request has its own unbounded queue (bounded in fact by its `max_tokens`), so a client that reads
slowly holds up no one else. Sending never waits either, so that an abort can be sent while a
coroutine is being cancelled. This is the hot path of the API process, and it runs on the model's
cores, so the sockets are plain ones: `zmq.asyncio` costs more a message than all the rest here.

Every request that is in flight keeps its `Submit` and the tokens it has been given, which is what
another engine would need to go on with it. When the engine is lost, every stream ends with an
EngineUnavailableError; none is left waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from trnc.engine.messages import (
    QUEUE_FULL,
    Abort,
    Delta,
    Deltas,
    Failed,
    FlushCache,
    Flushed,
    GetStats,
    Ready,
    Shutdown,
    Starting,
    Stats,
    Submit,
    ToApi,
    ToEngine,
    decode_to_api,
    encode,
)
from trnc.errors import EngineError, RequestError
from trnc.serve.errors import EngineUnavailableError, QueueFullError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlight:
    """A request that the engine works on, with every output token that has come so far."""

    submit: Submit
    emitted: list[int] = field(default_factory=list)
    queue: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)


def bind_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return the API process's end, bound to `endpoint`; the engine connects to it.

    No high-water mark: a full pipe would make a send wait, and an abort must not.
    """
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    return socket


class EngineClient:
    """Speaks to one engine. Everything here belongs to one event loop; `run` must be running."""

    def __init__(
        self,
        *,
        socket: zmq.Socket[bytes],
        on_starting: Callable[[str], None] = log.info,
    ) -> None:
        self._socket = socket
        self._on_starting = on_starting
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._lost: str | None = None
        self._stats_waiters: list[asyncio.Future[Stats]] = []
        self._flush_waiters: deque[asyncio.Future[int | None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self.last_stats: Stats | None = None
        self.messages_received = 0
        self.in_flight: dict[str, InFlight] = {}

    async def run(self) -> None:
        """Read the socket until the engine is gone or this is cancelled."""
        loop = asyncio.get_running_loop()
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        disconnected = asyncio.Event()
        loop.add_reader(self._socket.fileno(), self._read)
        loop.add_reader(monitor.fileno(), _note, monitor, disconnected)
        try:
            self._read()
            _note(monitor, disconnected)
            await disconnected.wait()
            self._read()
            self.lose("The engine closed its connection; its log says why.")
        finally:
            loop.remove_reader(self._socket.fileno())
            loop.remove_reader(monitor.fileno())
            self._socket.disable_monitor()
            self.lose("The server is shutting down.")

    @property
    def info(self) -> Ready:
        """What the engine said when it was ready.

        Raises:
            EngineUnavailableError: it is still starting, or gone; the message says which.
        """
        if self._lost is not None:
            raise EngineUnavailableError(self._lost)
        if not self._ready.done():
            raise EngineUnavailableError("The engine is starting.")
        return self._ready.result()

    async def wait_ready(self) -> Ready:
        """Wait for the engine's `Ready`; raises EngineUnavailableError if it is lost before."""
        return await asyncio.shield(self._ready)

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """Start a request and yield its deltas, the last one with a finish reason.

        Closing the generator early aborts the request.

        Raises:
            RequestError: the engine refused it; nothing of it runs.
            EngineUnavailableError: the engine is not ready, or was lost.
        """
        _ = self.info
        if submit.request_id in self.in_flight:
            raise RequestError(f"Request id '{submit.request_id}' is in use.", param="request_id")
        request = self.in_flight[submit.request_id] = InFlight(submit)
        self._idle.clear()
        over = False
        try:
            self._send(submit)
            while not over:
                item = await request.queue.get()
                over = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            del self.in_flight[submit.request_id]
            if not over:
                self._send(Abort(submit.request_id))
            if not self.in_flight:
                self._idle.set()

    def abort(self, request_id: str) -> bool:
        """Stop a request; its stream ends with the finish reason `abort`. False if unknown."""
        request = self.in_flight.get(request_id)
        if request is None:
            return False
        self._send(Abort(request_id))
        request.queue.put_nowait(Delta(request_id, (), finish_reason="abort"))
        return True

    async def stats(self) -> Stats:
        """Ask the engine for its counters; raises EngineUnavailableError if it cannot answer."""
        _ = self.info
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._send(GetStats())
        return await waiter

    async def flush_cache(self) -> int | None:
        """Drop all cached prefixes; return how many pages they had, None if there are requests.

        Raises EngineUnavailableError if the engine cannot answer.
        """
        _ = self.info
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._flush_waiters.append(waiter)
        self._send(FlushCache())
        return await waiter

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def shutdown(self) -> None:
        """Tell the engine to stop after its current step."""
        self._send(Shutdown())

    def lose(self, reason: str) -> None:
        """Declare the engine gone: every stream and every waiter fails now. Idempotent."""
        if self._lost is not None:
            return
        self._lost = reason
        for request in self.in_flight.values():
            request.queue.put_nowait(EngineUnavailableError(reason))
        waiters: list[asyncio.Future[Any]] = [
            *self._stats_waiters,
            *self._flush_waiters,
            self._ready,
        ]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(EngineUnavailableError(reason))
                waiter.exception()  # it may be that no one waits
        self._stats_waiters.clear()
        self._flush_waiters.clear()

    def _read(self) -> None:
        """Take in every frame that is there: the socket's descriptor tells of changes only."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_api(frame)
            except msgspec.DecodeError as error:
                log.error("unreadable message from the engine: %s", error)
                continue
            self._receive(message)

    def _receive(self, message: ToApi) -> None:
        self.messages_received += 1
        match message:
            case Deltas():
                for delta in message.deltas:
                    self._deliver(delta)
            case Failed():
                self._fail(message)
            case Stats():
                self._answer_stats(message)
            case Flushed():
                self._answer_flush(message)
            case Starting():
                self._on_starting(message.line)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)

    def _deliver(self, delta: Delta) -> None:
        request = self.in_flight.get(delta.request_id)
        if request is not None:  # else it was aborted while this was on its way
            request.emitted.extend(delta.token_ids)
            request.queue.put_nowait(delta)

    def _fail(self, failed: Failed) -> None:
        request = self.in_flight.get(failed.request_id)
        if request is None:
            return
        request.queue.put_nowait(_error_of(failed))

    def _answer_stats(self, stats: Stats) -> None:
        self.last_stats = stats
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_result(stats)
        self._stats_waiters.clear()

    def _answer_flush(self, flushed: Flushed) -> None:
        """Answer the one who has waited longest, for answers come in order."""
        if self._flush_waiters:
            waiter = self._flush_waiters.popleft()
            if not waiter.done():
                waiter.set_result(flushed.pages)

    def _send(self, message: ToEngine) -> None:
        """Send without waiting: with no high-water mark only an engine that is not there blocks."""
        if self._lost is None:
            with suppress(zmq.Again):
                self._socket.send(encode(message), zmq.NOBLOCK)
            # A send may take the signal of frames that came meanwhile.
            asyncio.get_running_loop().call_soon(self._read)


def _note(monitor: zmq.Socket[bytes], disconnected: asyncio.Event) -> None:
    if monitor.poll(0):
        disconnected.set()


def _error_of(failed: Failed) -> Exception:
    if failed.code == QUEUE_FULL:
        return QueueFullError(failed.message)
    if failed.param is not None:
        return RequestError(failed.message, param=failed.param, code=failed.code)
    return EngineError(failed.message)
