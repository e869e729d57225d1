"""The engine process from outside: what goes over its socket, and how it ends."""

from __future__ import annotations

import select
import signal
import socket as sockets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from tests.engine.driver import submit
from tests.scripted_executor import ScriptedExecutor, expected_tokens, small_info
from trnc.core import SamplingParams
from trnc.engine.executor import Executor
from trnc.engine.messages import (
    Abort,
    Delta,
    Deltas,
    Failed,
    GetStats,
    Ready,
    Shutdown,
    Starting,
    Stats,
    ToApi,
    ToEngine,
    decode_to_api,
    encode,
)
from trnc.engine.process import Channel, EngineOptions, Report, serve_engine
from trnc.engine.trace import read_trace, replay
from trnc.errors import ConfigError

REPO = Path(__file__).parents[2]
PATIENCE_MS = 60_000  # how long a message may take before the test is called hung
GREEDY = SamplingParams()
Message = TypeVar("Message", bound=ToApi | Delta)


class Api:
    """The API process's end of the socket."""

    def __init__(self, *, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.deltas: deque[Delta] = deque()  # of a message that is being read

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def receive(self) -> ToApi | Delta:
        """Return the next message; those of a step one by one."""
        while not self.deltas:
            assert self.socket.poll(PATIENCE_MS), "the engine says nothing"
            message = decode_to_api(self.socket.recv())
            if not isinstance(message, Deltas):
                return message
            self.deltas += message.deltas
        return self.deltas.popleft()

    def expect(self, kind: type[Message]) -> Message:
        """Return the next message, which must be of this kind; Stats that come by are skipped."""
        message = self.receive()
        while isinstance(message, Stats) and kind is not Stats:
            message = self.receive()
        assert isinstance(message, kind), message
        return message

    def tokens(self, request_id: str) -> list[int]:
        """Read one request to its end, when no other runs."""
        tokens: list[int] = []
        while True:
            delta = self.expect(Delta)
            assert delta.request_id == request_id
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine"


@pytest.fixture
def api(endpoint: str) -> Iterator[Api]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.bind(endpoint)
        yield Api(socket=socket)


class EngineThread(threading.Thread):
    """An engine in a thread of this process; `code` is its exit code."""

    def __init__(self, executor: Executor, endpoint: str, options: EngineOptions) -> None:
        super().__init__(daemon=True)
        self.args = (lambda _: (executor, {"weights": 0.25}, ("logprobs",)), endpoint, options)
        self.code: int | None = None

    def run(self) -> None:
        self.code = serve_engine(*self.args)


@contextmanager
def engine(
    api: Api, endpoint: str, executor: Executor, options: EngineOptions | None = None
) -> Iterator[EngineThread]:
    """A running engine that has said Ready; it must have ended when the block is left."""
    thread = EngineThread(executor, endpoint, options or EngineOptions())
    thread.start()
    assert api.expect(Ready).timings == {"weights": 0.25}
    yield thread
    thread.join(PATIENCE_MS / 1000)
    assert not thread.is_alive(), "the engine did not end"


@contextmanager
def engine_process(endpoint: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.engine.engine_main", endpoint, *args]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_are_answered_and_a_shutdown_ends_it(
    api: Api, endpoint: str, overlapped: bool
) -> None:
    executor = ScriptedExecutor(info=small_info())
    with engine(api, endpoint, executor, EngineOptions(overlapped=overlapped)) as thread:
        for name in ("a", "b"):  # the engine idles between the two
            api.send(submit(name, range(5), 6))
            assert api.tokens(name) == expected_tokens(range(5), 6, GREEDY, executor.info)
        api.send(GetStats())
        assert api.expect(Stats).finished == 2
        api.send(Shutdown())
    assert thread.code == 0
    assert executor.closed


def test_ready_says_what_the_executor_can(api: Api, endpoint: str) -> None:
    thread = EngineThread(ScriptedExecutor(info=small_info()), endpoint, EngineOptions())
    thread.start()
    ready = api.expect(Ready)
    sizes = (ready.max_rows, ready.max_context, ready.page_size, ready.num_pages, ready.vocab_size)
    assert sizes == (4, 64, 4, 65, 97)
    assert ready.features == ("logprobs",)
    api.send(Shutdown())
    thread.join()


def test_an_abort_between_two_steps(api: Api, endpoint: str) -> None:
    gate = threading.Semaphore(0)
    executor = ScriptedExecutor(info=small_info(), gate=gate)
    with engine(api, endpoint, executor):
        api.send(submit("a", range(5), 50))
        gate.release()
        assert api.expect(Delta).request_id == "a"
        api.send(Abort("a"), submit("b", range(4), 2))
        gate.release(100)
        message = api.expect(Delta)
        while message.request_id == "a":  # sent before the abort was read
            message = api.expect(Delta)
        rest = api.tokens("b")
        assert [*message.token_ids, *rest] == expected_tokens(range(4), 2, GREEDY, executor.info)
        api.send(Shutdown())


def test_a_frame_that_is_no_message_is_dropped(
    api: Api, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = ScriptedExecutor(info=small_info())
    with engine(api, endpoint, executor):
        for frame in (b"", b"nonsense", encode(Shutdown())[:-2], encode(Starting("not for you"))):
            api.socket.send(frame)
        api.send(submit("a", range(5), 2))
        assert api.tokens("a") == expected_tokens(range(5), 2, GREEDY, executor.info)
        api.send(Shutdown())
    assert caplog.text.count("dropped a frame") == 4


def test_bad_requests_are_refused_and_the_queue_is_bounded(api: Api, endpoint: str) -> None:
    info = small_info(max_rows=1, max_context=16384, num_pages=4097)
    executor = ScriptedExecutor(info=info)
    with engine(api, endpoint, executor, EngineOptions(max_waiting=0)):
        api.send(submit("empty", []), submit("a", range(5), 10_000))
        assert api.expect(Failed).param == "prompt"
        assert api.expect(Delta).request_id == "a"  # it has the only row, and keeps it
        api.send(submit("b", range(5), 3))
        while isinstance(failed := api.receive(), Delta | Stats):
            pass
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.param, failed.code) == ("b", None, "queue_full")
        assert "queue is full" in failed.message
        api.send(Shutdown())


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(api: Api, endpoint: str) -> None:
    executor = ScriptedExecutor(info=small_info(), fail_at={0})
    with engine(api, endpoint, executor) as thread:
        api.send(submit("a", range(5), 3))
        assert api.expect(Failed) == Failed("a", "engine error: step 0 failed")
        api.send(submit("b", range(5), 3))
        assert api.tokens("b") == expected_tokens(range(5), 3, GREEDY, executor.info)
        api.send(Shutdown())
    assert thread.code == 0


def test_a_broken_device_ends_the_engine_after_everyone_was_told(api: Api, endpoint: str) -> None:
    gate = threading.Semaphore(0)
    info = small_info(max_rows=1, max_context=16384, num_pages=4097)
    die_at: set[int] = set()
    executor = ScriptedExecutor(info=info, gate=gate, die_at=die_at)
    with engine(api, endpoint, executor) as thread:
        api.send(submit("runs", range(5), 10_000), submit("waits", [1], 9), GetStats())
        gate.release()
        while isinstance(message := api.receive(), Delta):
            gate.release()
        assert isinstance(message, Stats)  # so it has read both requests
        die_at.update(range(10_000))
        gate.release(10)
        while isinstance(message := api.receive(), Delta | Stats):
            pass
        for failed, name in ((message, "runs"), (api.receive(), "waits")):
            assert isinstance(failed, Failed)
            assert failed.request_id == name
            assert "RuntimeError: step " in failed.message
    assert thread.code == 1
    assert executor.closed


def test_a_start_that_fails_says_why(api: Api, endpoint: str) -> None:
    def build(report: Report) -> tuple[Executor, dict[str, float], tuple[str, ...]]:
        report("loading 3 artifacts")
        raise ConfigError("--preset huge: not enough memory")

    assert serve_engine(build, endpoint, EngineOptions()) == 1
    assert api.expect(Starting).line == "loading 3 artifacts"
    assert api.expect(Starting).line == "failed: --preset huge: not enough memory"


def test_a_trace_that_cannot_be_written_is_a_start_that_fails(
    api: Api, endpoint: str, tmp_path: Path
) -> None:
    thread = EngineThread(
        ScriptedExecutor(info=small_info()), endpoint, EngineOptions(trace=tmp_path / "no" / "dir")
    )
    thread.start()
    assert "--trace" in api.expect(Starting).line
    thread.join()
    assert thread.code == 1


def test_the_trace_option_writes_a_trace_that_replays(
    api: Api, endpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    with engine(api, endpoint, ScriptedExecutor(info=small_info()), EngineOptions(trace=path)):
        api.send(submit("a", range(5), 6))
        api.tokens("a")
        api.send(Shutdown())
    assert replay(read_trace(path)) >= 6


def test_a_signal_wakes_the_engine_once(api: Api, endpoint: str) -> None:
    reader, writer = sockets.socketpair()
    with reader, writer, zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        channel = Channel(socket=socket, wakeup=reader, waker=writer)
        channel.wake()
        assert list(channel.receive(True)) == []
        assert select.select([reader], [], [], 0)[0] == []  # the next wait will sleep
        channel.terminate()
        assert list(channel.receive(True)) == [Shutdown()]


def test_sigterm_ends_an_idle_engine_and_sigint_does_not(api: Api, endpoint: str) -> None:
    with engine_process(endpoint) as process:
        assert api.expect(Starting).line == "building"
        api.expect(Ready)
        process.send_signal(signal.SIGINT)
        api.send(submit("a", range(5), 2))
        assert len(api.tokens("a")) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_MS / 1000) == 0


def test_sigterm_ends_a_busy_engine(api: Api, endpoint: str) -> None:
    with engine_process(endpoint) as process:
        api.expect(Starting)
        api.expect(Ready)
        api.send(submit("a", range(5), 10_000))
        api.expect(Delta)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_MS / 1000) == 0


def test_an_engine_whose_parent_was_killed_ends(api: Api, endpoint: str) -> None:
    with engine_process(endpoint, "watched") as parent:
        api.expect(Starting)
        api.expect(Ready)
        assert parent.stdout is not None
        parent.kill()
        # The engine has the other end of this pipe, too: it is at its end when both are gone.
        assert parent.stdout.read() == b""


def test_the_host_side_never_imports_torch() -> None:
    modules = sorted(path.stem for path in (REPO / "trnc" / "engine").glob("*.py"))
    imports = "; ".join(f"import trnc.engine.{name}" for name in modules if name != "__init__")
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0
