"""An HTTP client for load: streams completions from OpenAI-compatible servers as cheaply as it can.

It shares the cores with the server that it measures, so while requests run it only notes when
bytes came; what the bytes say is read by `reply_of` when the measurement is over.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

_LAST_CHUNK = b"\n0\r\n\r\n"
_WORDS = ("time", "river", "house", "stone", "light", "water", "hand", "world", "road", "night")


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send requests, and what they are called there."""

    host: str
    port: int
    model: str
    base: str = ""
    chat: bool = False
    ignore_eos: bool = True
    usage: bool = True

    @property
    def path(self) -> str:
        return f"{self.base}/v1/{'chat/' if self.chat else ''}completions"


@dataclass(frozen=True, slots=True)
class Shape:
    """The requests of a run: `shared_prefix` of the `prompt_tokens` are the same in all of them.

    Prompts are random token ids from `lowest` (those below may be special) to below `vocab`; those
    of a chat are random words instead, about a token each.
    """

    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0
    lowest: int = 1000
    vocab: int = 30_000
    seed: int = 0

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of one request."""
        shared = random.Random(self.seed)
        own = random.Random(f"{self.seed}/{index}")
        return [
            (shared if i < self.shared_prefix else own).randrange(self.lowest, self.vocab)
            for i in range(self.prompt_tokens)
        ]


@dataclass(slots=True)
class Exchange:
    """One request and every piece of its answer, with the second at which it came."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What an answer was: the times of the events that had text, counted from `sent`."""

    sent: float
    times: tuple[float, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None


def request_bytes(server: Server, shape: Shape, index: int) -> bytes:
    """Return the whole HTTP request of number `index`."""
    prompt = shape.prompt(index)
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "stream": True,
    }
    if server.chat:
        text = " ".join(_WORDS[i % len(_WORDS)] for i in prompt)
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = prompt
    if server.usage:
        body["stream_options"] = {"include_usage": True}
    if server.ignore_eos:
        body["ignore_eos"] = True
    data = json.dumps(body).encode()
    head = (
        f"POST {server.path} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Connection(asyncio.Protocol):
    """A connection that is kept alive and carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._over: asyncio.Future[None] | None = None
        self._tail = b""
        self._left: int | None = None  # of a body with a length

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is a class of its own

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        exchange.pieces.append((time.perf_counter(), data))
        if len(exchange.pieces) == 1:
            self._left = _length(data)
        elif self._left is not None:
            self._left -= len(data)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK or (self._left is not None and self._left <= 0):
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the connection was lost: {exc}" if exc else "the connection was closed")
        self._transport = None

    async def exchange(self, request: bytes) -> Exchange:
        """Send a request and wait for the end of its answer."""
        assert self._transport is not None
        self._over = asyncio.get_running_loop().create_future()
        self._tail, self._left = b"", None
        exchange = self._exchange = Exchange(time.perf_counter())
        self._transport.write(request)
        await self._over
        return exchange

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _finish(self, failure: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and self._over is not None:
            exchange.failure = failure
            self._over.set_result(None)


def _length(first: bytes) -> int | None:
    """Return how many bytes of a body with a length are left after the first piece."""
    head, _, body = first.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2]) - len(body)
    return None


class Connections:
    """Idle connections to one server, opened when there are not enough."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[Connection] = []

    async def send(self, request: bytes) -> Exchange:
        """Send one request on a connection of its own for as long as it takes."""
        sent = time.perf_counter()
        try:
            connection = await self._take()
        except OSError as error:
            return Exchange(sent, failure=str(error))
        exchange = await connection.exchange(request)
        if connection.usable:
            self._idle.append(connection)
        return exchange

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._server.host, self._server.port
        )
        return connection


async def closed_loop(server: Server, requests: Sequence[bytes], streams: int) -> list[Exchange]:
    """Keep `streams` requests going until all are answered."""
    connections = Connections(server)
    waiting = iter(requests)
    done: list[Exchange] = []

    async def one_stream() -> None:
        for request in waiting:
            exchange = await connections.send(request)
            done.append(exchange)

    await asyncio.gather(*(one_stream() for _ in range(streams)))
    connections.close()
    return done


async def poisson(
    server: Server, requests: Sequence[bytes], *, rate: float, seed: int
) -> list[Exchange]:
    """Send requests at random moments, `rate` a second on average, however many are open."""
    connections = Connections(server)
    pick = random.Random(seed)
    tasks = []
    for request in requests:
        tasks.append(asyncio.ensure_future(connections.send(request)))
        await asyncio.sleep(pick.expovariate(rate))
    done = await asyncio.gather(*tasks)
    connections.close()
    return list(done)


def reply_of(exchange: Exchange) -> Reply:
    """Read what an answer says, and when it said it."""
    if exchange.failure is not None:
        return Reply(exchange.sent, error=exchange.failure)
    status = _status(exchange)
    if status != 200:
        return Reply(exchange.sent, error=f"status {status}: {exchange.pieces[0][1][-300:]!r}")
    times: list[float] = []
    usage: dict[str, Any] = {}
    for when, event in _events(exchange):
        if "error" in event:
            return Reply(exchange.sent, error=str(event["error"]))
        if any(map(_has_text, event.get("choices", ()))):
            times.append(when - exchange.sent)
        usage = event.get("usage") or usage
    return Reply(
        sent=exchange.sent,
        times=tuple(times),
        output_tokens=usage.get("completion_tokens", len(times)),
        prompt_tokens=usage.get("prompt_tokens", 0),
        error=None if times else "an answer without text",
    )


def _status(exchange: Exchange) -> int:
    return int(exchange.pieces[0][1].split(b" ", 2)[1])


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", choice)
    return bool(delta.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _events(exchange: Exchange) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the JSON events of a stream with the time of the piece that completed each."""
    held = b""
    for when, data in _bodies(exchange):
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            text = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and text != b"[DONE]":
                yield when, json.loads(text)


def _bodies(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """Take the head and the chunked coding off the pieces."""
    pieces = iter(exchange.pieces)
    when, data = next(pieces)
    head, _, held = data.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        yield when, held
        yield from pieces
        return
    while True:
        while (line_end := held.find(b"\r\n")) >= 0:
            size = int(held[:line_end].partition(b";")[0], 16)
            start = line_end + 2
            if len(held) < start + size + 2:
                break
            yield when, held[start : start + size]
            held = held[start + size + 2 :]
        piece = next(pieces, None)
        if piece is None:
            return
        when, held = piece[0], held + piece[1]


def parse_url(url: str) -> tuple[str, int, str]:
    """Return host, port and what comes before `/v1` of a server's address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or parts.hostname is None:
        raise SystemExit(f"--url {url}: give http://HOST:PORT")
    return parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1")
