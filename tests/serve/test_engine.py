"""The process boundary: a disconnect frees the row, a dead engine is a clear error."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import openai
import pytest
import zmq
import zmq.asyncio

from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_requests import chat, completion, error_of
from trnc.core import SamplingParams
from trnc.engine.messages import (
    Abort,
    Delta,
    Deltas,
    Failed,
    GetStats,
    Ready,
    Submit,
    ToApi,
    decode_to_engine,
    encode,
)
from trnc.errors import EngineError, RequestError
from trnc.serve.engine_client import EngineClient, bind_socket
from trnc.serve.errors import EngineUnavailableError, QueueFullError

HELLO = [{"role": "user", "content": "hello"}]
READY = Ready(
    max_rows=1, max_context=64, page_size=4, num_pages=17, vocab_size=10, timings={"load": 0.5}
)
SUBMIT = Submit("r", (1, 2), SamplingParams(), 8)


# --- through HTTP ---------------------------------------------------------------------------------


def raw_request(server: Server, *, stream: bool) -> socket.socket:
    """Send a request that has no end, by hand, and return its connection."""
    body = (
        f'{{"messages": [{{"role": "user", "content": "hello"}}], "stream": {str(stream).lower()},'
        ' "ignore_eos": true}'
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_token", [False, True])
def test_a_disconnect_frees_the_row(stream, first_token):
    gate = threading.Semaphore(2 if first_token else 0)
    with running(Setup(gate=gate)) as server:
        connection = raw_request(server, stream=stream)
        if stream and first_token:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        while not server.executor.plans:  # a gate that is closed holds the loop, so no Stats
            pass
        connection.close()
        while server.engine.in_flight:
            pass
        gate.release(10_000)
        stats = server.wait_for(lambda stats: stats.running + stats.waiting == 0)
        assert stats.free_pages > 0
        assert stats.output_tokens < 100, "the request went on after its client was gone"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_frees_the_row(stream):
    gate = threading.Semaphore(6)
    with running(Setup(gate=gate)) as server:
        server.say(HELLO, "one two three four five six seven eight nine ten")
        answer = chat(server, max_tokens=400, stop=["o"], ignore_eos=True, stream=stream)
        assert answer.status_code == 200  # while the engine stands at the closed gate
        gate.release(10_000)
        stats = server.wait_for(lambda stats: stats.running == 0)
        assert stats.output_tokens < 100


def test_a_disconnect_of_one_leaves_the_others(server):
    connection = raw_request(server, stream=True)
    connection.recv(100)
    server.say(HELLO, "still here")
    connection.close()
    assert chat(server, max_tokens=10).json()["choices"][0]["message"]["content"] == "still here"
    server.wait_for(lambda stats: stats.running == 0)


def test_before_the_engine_is_ready_everything_is_503():
    with running(Setup(start_engine=False)) as server, server.http() as http:
        for answer in (http.get("/health"), chat(server)):
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (503, "engine_unavailable")
            assert "starting" in error["message"]
        assert http.get("/version").status_code == 200
        assert http.get("/metrics").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_a_dead_engine_is_a_clear_error_everywhere():
    gate = threading.Semaphore(2)
    with running(Setup(gate=gate, die_at=(3,))) as server, server.openai() as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        gate.release(10_000)
        with pytest.raises(openai.APIError) as raised:
            list(stream)
        assert "engine" in str(raised.value)
        with server.http() as http:
            while http.get("/health").status_code == 200:
                pass
            answer = http.get("/health")
            assert answer.status_code == 503
            assert "engine" in error_of(answer)["message"]
            answer = chat(server)
            assert answer.status_code == 503
            assert error_of(answer)["type"] == "service_unavailable_error"
            assert http.get("/metrics").status_code == 200
            assert not server.engine.in_flight


def test_a_failed_step_is_a_500_and_the_engine_goes_on():
    with running(Setup(fail_at=(0,))) as server:
        answer = chat(server)
        error = error_of(answer)
        assert (answer.status_code, error["type"]) == (500, "server_error")
        assert chat(server).status_code == 200


def test_an_error_of_one_prompt_is_the_error_of_the_answer():
    with running(Setup(fail_at=(0,))) as server:
        answer = completion(server, prompt=["a", "b", "c"])
        assert answer.status_code == 500
        assert "step 0 failed" in error_of(answer)["message"]
        server.wait_for(lambda stats: stats.running + stats.waiting == 0)
        assert completion(server, prompt=["a", "b", "c"]).status_code == 200


def test_an_unexpected_error_says_nothing_of_its_inside(monkeypatch):
    with running() as server:

        def fail(*_args: object, **_options: object) -> str:
            raise ValueError("a secret")

        monkeypatch.setattr(server.template, "render", fail)
        answer = chat(server)
        assert answer.status_code == 500
        assert "secret" not in str(error_of(answer))
        assert answer.headers.get("connection") != "close"
        assert completion(server).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_503(stream):
    setup = Setup(max_rows=1, max_waiting=0, max_context=20_000, num_pages=2_000)
    with running(setup) as server:
        endless = raw_request(server, stream=True)
        endless.recv(100)  # it has the only row, and keeps it
        answer = chat(server, stream=stream)
        error = error_of(answer)
        assert answer.status_code == 503
        assert (error["type"], error["code"]) == ("service_unavailable_error", "queue_full")
        endless.close()


def test_an_error_in_a_stream_is_an_event():
    with running(Setup(fail_at=(4,))) as server, server.http() as http:
        body = {"messages": HELLO, "stream": True, "ignore_eos": True}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        *_, error, done, _ = answer.text.split("\n\n")
        assert error.startswith('data: {"error":{"message":')
        assert done == "data: [DONE]"


# --- the client alone, against an engine that the test plays --------------------------------------


class Engine:
    """The other end of the socket."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.connect(endpoint)

    async def send(self, *messages: ToApi | Delta) -> None:
        for message in messages:
            whole = Deltas((message,)) if isinstance(message, Delta) else message
            await self.socket.send(encode(whole))

    async def receive(self) -> object:
        return decode_to_engine(await self.socket.recv())


@asynccontextmanager
async def pair(path: Path) -> AsyncIterator[tuple[EngineClient, Engine]]:
    endpoint = f"ipc://{path / 'e'}"
    with zmq.asyncio.Context() as context, zmq.Context() as plain:
        client = EngineClient(socket=bind_socket(plain, endpoint))
        engine = Engine(context, endpoint)
        running = asyncio.ensure_future(client.run())
        await engine.send(READY)
        await client.wait_ready()
        yield client, engine
        engine.socket.close(0)
        await running
        context.destroy(0)


def play(tmp_path: Path, scene: object) -> None:
    async def main() -> None:
        async with pair(tmp_path) as (client, engine):
            await scene(client, engine)  # type: ignore[operator]

    asyncio.run(main())


def test_tokens_are_kept_while_a_request_is_in_flight(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        async with aclosing(client.generate(SUBMIT)) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            assert await engine.receive() == SUBMIT
            await engine.send(Delta("r", (5, 6)))
            assert (await first).token_ids == (5, 6)
            await engine.send(Delta("r", (7,)))
            await anext(deltas)
            assert client.in_flight["r"].submit == SUBMIT
            assert client.in_flight["r"].emitted == [5, 6, 7]
            await engine.send(Delta("r", (8,), finish_reason="length"))
            assert [delta.finish_reason async for delta in deltas] == ["length"]
        assert not client.in_flight
        client._send(GetStats())
        assert await engine.receive() == GetStats(), "a request that is over is not aborted"

    play(tmp_path, scene)


def test_closing_a_stream_aborts(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        async with aclosing(client.generate(SUBMIT)) as deltas:
            first = asyncio.ensure_future(anext(deltas))
            await engine.receive()
            await engine.send(Delta("r", (5,)))
            await first
        assert await engine.receive() == Abort("r")
        await engine.send(Delta("r", (6,)))  # what was on its way is dropped
        assert not client.in_flight

    play(tmp_path, scene)


def test_cancelling_while_waiting_aborts(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        first = asyncio.ensure_future(anext(client.generate(SUBMIT)))
        await engine.receive()
        first.cancel()
        assert await engine.receive() == Abort("r")

    play(tmp_path, scene)


def test_abort_by_id_ends_the_stream(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        assert not client.abort("r")
        first = asyncio.ensure_future(anext(client.generate(SUBMIT)))
        await engine.receive()
        assert client.abort("r")
        assert (await first).finish_reason == "abort"
        assert await engine.receive() == Abort("r")

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (Failed("r", "too long", "prompt"), RequestError),
        (Failed("r", "the step failed"), EngineError),
        (Failed("r", "the queue is full", code="queue_full"), QueueFullError),
    ],
)
def test_a_failed_request_raises(tmp_path, failed, kind):
    async def scene(client: EngineClient, engine: Engine) -> None:
        first = asyncio.ensure_future(anext(client.generate(SUBMIT)))
        await engine.receive()
        await engine.send(failed)
        with pytest.raises(kind, match=failed.message):
            await first
        assert not client.in_flight

    play(tmp_path, scene)


def test_a_consumer_that_does_not_read_holds_up_no_one(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        slow = client.generate(SUBMIT)
        first = asyncio.ensure_future(anext(slow))
        await engine.receive()
        await engine.send(*(Delta("r", (1,)) for _ in range(5000)))
        await first
        fast = asyncio.ensure_future(anext(client.generate(Submit("s", (1,), SamplingParams(), 1))))
        await engine.receive()
        await engine.send(Delta("s", (3,), finish_reason="length"))
        assert (await fast).token_ids == (3,)
        await slow.aclose()

    play(tmp_path, scene)


def test_a_lost_engine_ends_every_stream_and_waiter(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        streams = [
            asyncio.ensure_future(anext(client.generate(Submit(name, (1,), SamplingParams(), 1))))
            for name in "ab"
        ]
        stats = asyncio.ensure_future(client.stats())
        for _ in range(3):
            await engine.receive()
        engine.socket.close(0)
        for waiting in (*streams, stats):
            with pytest.raises(EngineUnavailableError, match="closed its connection"):
                await waiting
        with pytest.raises(EngineUnavailableError):
            await anext(client.generate(SUBMIT))

    play(tmp_path, scene)


def test_an_unreadable_frame_is_dropped(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        await engine.socket.send(b"\xc1 no message")
        first = asyncio.ensure_future(anext(client.generate(SUBMIT)))
        await engine.receive()
        await engine.send(Delta("r", (5,), finish_reason="length"))
        assert (await first).token_ids == (5,)

    play(tmp_path, scene)


def test_a_request_id_cannot_be_used_twice(tmp_path):
    async def scene(client: EngineClient, engine: Engine) -> None:
        first = asyncio.ensure_future(anext(client.generate(SUBMIT)))
        await engine.receive()
        with pytest.raises(RequestError, match="in use"):
            await anext(client.generate(SUBMIT))
        assert "r" in client.in_flight
        first.cancel()

    play(tmp_path, scene)
