"""The engine process: an executor, a loop, and a ZeroMQ socket to the API process.

The API process binds a PAIR socket and the engine connects to it; one message is one frame. The
engine says `Starting` while the executor is built, `Ready` once it serves, and then answers.

One thread owns the socket and all engine state. A second one only watches the parent process, so
that an engine whose parent was killed ends too, even while a step hangs. SIGINT is ignored, because
a Ctrl-C in the terminal reaches both processes and the API process decides. SIGTERM means Shutdown;
while the executor is being built it just kills, for there is nothing to finish yet.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from trnc.core import ExecutorInfo
from trnc.engine.executor import Executor
from trnc.engine.grammar import Grammars
from trnc.engine.grammar_worker import LoadTokenizer
from trnc.engine.loops import Engine, NoGrammars, overlapped_loop, plain_loop
from trnc.engine.messages import (
    Failed,
    Ready,
    Shutdown,
    Starting,
    ToApi,
    ToEngine,
    decode_to_engine,
    encode,
)
from trnc.engine.scheduler import Scheduler
from trnc.engine.trace import Began, TraceEvent, TraceSink, discard, encode_event
from trnc.errors import ConfigError, TrncError

log = logging.getLogger(__name__)

PARENT_POLL_SECONDS = 0.5
LINGER_MS = 2000  # how long the last messages of an engine that ends may take to leave

Report = Callable[[str], None]
Handler = Callable[[int, FrameType | None], object] | signal.Handlers
ExecutorFactory = Callable[[Report], tuple[Executor, dict[str, float], tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to serve. `parent_pid` is the process that started this one; None: nobody is watched.

    `max_waiting` bounds the queue (None: no bound); `trace` is a file for the plan trace.
    `grammars` loads the tokenizer that structured outputs need; None: there are none.
    """

    overlapped: bool = True
    max_waiting: int | None = None
    trace: Path | None = None
    grammars: LoadTokenizer | None = None
    parent_pid: int | None = None


def serve_engine(executor_factory: ExecutorFactory, endpoint: str, options: EngineOptions) -> int:
    """Build the executor, serve until a Shutdown or a SIGTERM, and return the exit code.

    `executor_factory(report)` returns the executor, the seconds of each part of the start, and
    the features of its variants; what it reports goes out as `Starting` lines. The code is 0
    after a Shutdown, 1 if the start failed or the engine could not go on; then every request
    that it had was told so.
    """
    with ExitStack() as stack:
        stack.enter_context(_parent_watched(options.parent_pid))
        stack.enter_context(_handled(signal.SIGINT, signal.SIG_IGN))
        wakeup, waker = stack.enter_context(_wakeup_sockets())
        channel = stack.enter_context(_connected(endpoint, wakeup, waker))
        try:
            trace = stack.enter_context(_trace_sink(options.trace))
            executor, timings, features = executor_factory(
                lambda line: channel.send(Starting(line))
            )
        except Exception as error:
            unforeseen = not isinstance(error, TrncError)
            log.error("the engine could not start: %s", _text(error), exc_info=unforeseen)
            channel.send(Starting(f"failed: {_text(error)}"))
            return 1
        stack.callback(executor.close)
        stack.enter_context(_handled(signal.SIGTERM, lambda *_: channel.terminate()))
        gc.freeze()  # what the start left stays: a full collection would look at it for long
        stack.callback(gc.unfreeze)  # libraries look for leaks when the process ends
        channel.send(_ready(executor.info, timings, features))
        return _serve(executor, channel, trace, options)


def _serve(executor: Executor, channel: Channel, trace: TraceSink, options: EngineOptions) -> int:
    scheduler = Scheduler(info=executor.info, max_waiting=options.max_waiting)
    trace(Began(executor.info, options.max_waiting))
    try:
        with _grammars(options.grammars, executor.info.vocab_size, channel) as grammars:
            engine = Engine(
                scheduler=scheduler,
                executor=executor,
                grammars=grammars,
                receive=channel.receive,
                send=channel.send,
                trace=trace,
                clock=time.monotonic,
            )
            (overlapped_loop if options.overlapped else plain_loop)(engine)
    except Exception as error:
        log.exception("the engine cannot go on")
        for request_id in scheduler.request_ids:
            channel.send(Failed(request_id, f"engine error: {_text(error)}; the engine stopped"))
        return 1
    return 0


@contextmanager
def _grammars(
    load: LoadTokenizer | None, vocab_size: int, channel: Channel
) -> Iterator[Grammars | NoGrammars]:
    if load is None:
        yield NoGrammars()
        return
    grammars = Grammars(load=load, vocab_size=vocab_size, wake=channel.wake)
    try:
        yield grammars
    finally:
        grammars.close()


class Channel:
    """The engine's end of the socket. Sending never waits: the pipe has no high-water mark."""

    def __init__(
        self, *, socket: zmq.Socket[bytes], wakeup: sockets.socket, waker: sockets.socket
    ) -> None:
        """Wrap a socket; what is written to `waker` can be read from `wakeup`."""
        self._socket = socket
        self._wakeup = wakeup
        self._waker = waker
        self._terminated = False
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(wakeup, zmq.POLLIN)

    def send(self, message: ToApi) -> None:
        """Queue one message."""
        self._socket.send(encode(message))

    def receive(self, wait: bool) -> Iterator[ToEngine]:
        """Yield what has arrived; if `wait`, sleep until there is something (or a signal)."""
        ready = dict(self._poller.poll(None if wait and not self._terminated else 0))
        if self._wakeup.fileno() in ready:
            self._wakeup.recv(4096)
        if self._terminated:
            yield Shutdown()
        while self._socket.poll(0):
            frame = self._socket.recv()
            try:
                yield decode_to_engine(frame)
            except msgspec.DecodeError as error:
                log.error("dropped a frame of %d bytes that is no message: %s", len(frame), error)

    def wake(self) -> None:
        """Make a `receive` that waits return. For other threads."""
        with suppress(BlockingIOError):  # it is full of reasons to wake up
            self._waker.send(b"\0")

    def terminate(self) -> None:
        """Make `receive` yield a Shutdown, now and from now on. For a signal handler."""
        self._terminated = True


def _ready(info: ExecutorInfo, timings: dict[str, float], features: tuple[str, ...]) -> Ready:
    return Ready(
        max_rows=info.max_rows,
        max_context=info.max_context,
        page_size=info.page_size,
        num_pages=info.num_pages,
        vocab_size=info.vocab_size,
        timings=timings,
        features=features,
    )


def _text(error: Exception) -> str:
    """What a person should read: our errors speak for themselves, others need their type."""
    return str(error) if isinstance(error, TrncError) else f"{type(error).__name__}: {error}"


@contextmanager
def _connected(endpoint: str, wakeup: sockets.socket, waker: sockets.socket) -> Iterator[Channel]:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    try:
        socket.connect(endpoint)
        yield Channel(socket=socket, wakeup=wakeup, waker=waker)
    finally:
        socket.close()
        context.term()


@contextmanager
def _wakeup_sockets() -> Iterator[tuple[sockets.socket, sockets.socket]]:
    """A socket that a signal makes readable: a poll alone would miss one that comes just before.

    The other one is where it is written.
    """
    reader, writer = sockets.socketpair()
    writer.setblocking(False)
    with reader, writer:
        if not _owns_signals():
            yield reader, writer
            return
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader, writer
        finally:
            signal.set_wakeup_fd(before)


@contextmanager
def _handled(number: signal.Signals, handler: Handler) -> Iterator[None]:
    if not _owns_signals():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _owns_signals() -> bool:
    """Only the main thread may set handlers; an engine in another one leaves signals alone."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _parent_watched(parent_pid: int | None) -> Iterator[None]:
    """Kill this process when its parent is gone: there is nobody left to answer."""
    stop = threading.Event()

    def watch(pid: int) -> None:
        while os.getppid() == pid:
            if stop.wait(PARENT_POLL_SECONDS):
                return
        log.error("the process that started this engine (pid %d) is gone: exiting", pid)
        os._exit(1)

    if parent_pid is None:
        yield
        return
    watcher = threading.Thread(target=watch, args=(parent_pid,), name="parent", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


@contextmanager
def _trace_sink(path: Path | None) -> Iterator[TraceSink]:
    if path is None:
        yield discard
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    with file:

        def write(event: TraceEvent) -> None:
            file.write(encode_event(event))

        yield write
