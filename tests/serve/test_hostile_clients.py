"""Clients that are broken, slow or gone: no 500, nothing leaked, no one else held up.

Nothing here measures time. `python -m tests.serve.test_hostile_clients 1000` does: how much a
thousand slow readers slow a fast one down.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_requests import CHAT, HELLO, chat
from trnc.engine.messages import Abort, ToEngine, decode_to_engine
from trnc.serve.listening import ServeOptions

BODIES = {
    CHAT: {"model": MODEL, "messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"model": MODEL, "prompt": ["hello", "world"], "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 4},
}
SMALL = 2048  # bytes that a kernel buffers for a slow reader


def request(path: str, body: bytes, *, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


def connect(server: Server, *, buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", server.port))
    return connection


def all_of(connection: socket.socket) -> bytes:
    """Read until the connection ends, in whatever way."""
    text = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            text += chunk
    return text


# --- malformed requests ---------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[str, bytes]:
    """A valid body with some of its values replaced, wherever they are, or cut, or with a typo."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body = json.loads(json.dumps(BODIES[path] | {"stream": draw(st.booleans())}))
    for _ in range(draw(st.integers(0, 2))):
        target = body
        while True:
            key = draw(
                st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target)))
            )
            value = target[key]
            if not isinstance(value, dict | list) or not value or draw(st.booleans()):
                break
            target = value
        target[key] = draw(JSON)
    text = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.integers(0, 2))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
    return path, bytes(text[: draw(st.integers(0, len(text)) | st.just(len(text)))])


@given(near_misses())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_body_that_is_nearly_right_is_answered_or_refused(server, case):
    path, body = case
    with server.http() as http:
        answer = http.post(path, content=body)
    assert answer.status_code in (200, 400, 404), answer.text
    assert "Traceback" not in answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@given(
    raw=st.binary(max_size=64) | st.just(request(CHAT, b"{}")),
    path=st.sampled_from(sorted(BODIES)),
    stream=st.booleans(),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    end=st.sampled_from(["close", "half-close", "reset", "read"]),
)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_connection_may_send_anything_and_end_anyhow(server, raw, path, stream, cut, flips, end):
    whole = bytearray(request(path, json.dumps(BODIES[path] | {"stream": stream}).encode()))
    for position, byte in flips:
        whole[position % len(whole)] = byte
    sent = bytes(whole[: int(len(whole) * cut)]) if cut < 0.9 else bytes(whole) + raw
    with contextlib.closing(connect(server)) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
        if end == "half-close":
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            answer = all_of(connection)  # it ends: a half-closed client counts as gone
            assert b" 500 " not in answer.split(b"\r\n", 1)[0]
        elif end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif end == "read" and cut == 1 and not flips and not raw:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    with server.http() as http:
        assert http.get("/health").status_code == 200


def test_a_body_that_comes_too_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr("trnc.serve.access.BODY_SECONDS", 0.05)
    with running() as server, contextlib.closing(connect(server)) as connection:
        connection.sendall(request(CHAT, b'{"messages"', length=500))
        answer = all_of(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
        assert b"request_timeout" in answer


# --- disconnects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half-close"])
def test_a_client_that_goes_frees_its_row_within_one_step(path, stream, how, monkeypatch):
    """The abort is sent while the engine stands at a gate; read, it costs one step at most."""
    gate = threading.Semaphore(3)
    planned_when_read: list[int] = []

    def decode(frame: bytes) -> ToEngine:
        message = decode_to_engine(frame)
        if isinstance(message, Abort):
            planned_when_read.append(len(server.executor.plans))
        return message

    monkeypatch.setattr("trnc.engine.process.decode_to_engine", decode)
    with running(Setup(gate=gate)) as server:
        body = BODIES[path] | {"stream": stream, "temperature": 0}  # no random end of the text
        body |= {"max_output_tokens": 300} if path == "/v1/responses" else {"max_tokens": 300}
        connection = connect(server)
        connection.sendall(request(path, json.dumps(body).encode()))
        while len(server.executor.plans) < 4:
            pass
        if how == "close":
            connection.close()
        else:
            connection.shutdown(socket.SHUT_WR)
        while server.engine.in_flight:
            pass
        gate.release(10_000)
        server.wait_for(lambda stats: stats.running + stats.waiting == 0)
        assert len(server.executor.plans) <= planned_when_read[-1] + 1
        connection.close()


# --- slow readers ---------------------------------------------------------------------------------


def slow_readers(server: Server, count: int) -> list[socket.socket]:
    """Open streams that nobody reads; return once their answers are computed and stuck."""
    body = BODIES[CHAT] | {"stream": True, "logprobs": True, "top_logprobs": 20, "seed": 1}
    body |= {"max_tokens": 60, "ignore_eos": True}  # more than the server and kernels buffer
    connections = []
    for begun in range(0, count, 50):
        connections += [connect(server, buffer=SMALL) for _ in range(min(50, count - begun))]
        for connection in connections[begun:]:
            connection.sendall(request(CHAT, json.dumps(body).encode()))
        computed = len(connections)
        server.wait_for(lambda stats, computed=computed: stats.finished >= computed)
    return connections


def fast_reader(server: Server) -> None:
    with server.http() as http:
        body = BODIES[CHAT] | {"stream": True, "max_tokens": 30, "ignore_eos": True}
        assert http.post(CHAT, json=body).text.endswith("data: [DONE]\n\n")


def test_slow_readers_hold_their_connections_and_nothing_else():
    with running(Setup(max_rows=8, send_buffer=SMALL)) as server:
        connections = slow_readers(server, 60)
        assert server.admission.open == 60, "they are stuck in the middle of their answers"
        stats = server.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        fast_reader(server)
        for connection in connections[:30]:
            connection.close()
        while server.admission.open > 30:
            pass
        text = b""
        while not text.endswith(b"0\r\n\r\n"):  # one that begins to read gets all of it
            text += connections[-1].recv(65536)
        assert text.count(b'"finish_reason":"length"') == 1
        for connection in connections:
            connection.close()
        server.check_idle()
        assert chat(server).status_code == 200


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a feature of Linux")
def test_a_reader_that_takes_nothing_is_cut_off():
    options = ServeOptions(write_seconds=0.2)
    with running(Setup(send_buffer=SMALL, options=options)) as server:
        [connection] = slow_readers(server, 1)
        while server.admission.open:
            pass
        assert not all_of(connection).endswith(b"0\r\n\r\n")


def measure(count: int) -> None:
    """Print how long a fast stream takes, beside `count` slow readers and alone, in turns."""

    def seconds(server: Server) -> float:
        started = time.perf_counter()
        fast_reader(server)
        return time.perf_counter() - started

    setup = Setup(max_rows=64, num_pages=4000, send_buffer=SMALL)
    with running(setup) as alone, running(setup) as crowded:
        connections = slow_readers(crowded, count)
        print(f"{crowded.admission.open} of {count} streams are stuck")
        times = [(seconds(alone), seconds(crowded)) for _ in range(60)][10:]
        without, beside = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"alone {without * 1e3:.1f} ms, beside them {beside * 1e3:.1f} ms:", end=" ")
        print(f"ratio {beside / without:.2f}")
        for connection in connections:
            connection.close()


if __name__ == "__main__":
    measure(int(sys.argv[1]))
