"""What every API needs of HTTP: bounded bodies, JSON answers, event streams, disconnects.

Invariant: when a client goes away, whatever was being computed for it is cancelled at once, so
that its row in the engine is freed. That holds before the first byte (`while_connected`) and
during a stream (`EventStream`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trnc.serve.errors import BodyTooLargeError, describe, describe_to_anthropic

T = TypeVar("T")
Events = AsyncGenerator[msgspec.Struct, None]
Body = msgspec.Struct | Sequence[msgspec.Struct] | Mapping[str, Any]
Answer = Body | Events

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _data_event(event: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def named_event(event: msgspec.Struct) -> bytes:
    """Return an event with the name that its `type` says."""
    name: str = event.type  # type: ignore[attr-defined]
    return b"event: " + name.encode() + b"\n" + _data_event(event)


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How an API writes its events, an error on the way, and the end of a stream."""

    encode: Callable[[msgspec.Struct], bytes]
    describe: Callable[[BaseException], tuple[int, msgspec.Struct]]
    end: bytes


OPENAI_STREAM = StreamStyle(_data_event, describe, b"data: [DONE]\n\n")
ANTHROPIC_STREAM = StreamStyle(named_event, describe_to_anthropic, b"")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, of at most `limit` bytes; raises BodyTooLargeError before reading more."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLargeError(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def json_response(body: Body, status: int = 200) -> Response:
    """Return a struct, or several, as a JSON answer."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def respond(
    request: Request, answer: Awaitable[Answer], style: StreamStyle = OPENAI_STREAM
) -> Response:
    """Return the HTTP answer for what a serving class gives: a struct, several, or a stream.

    A stream's first event is awaited here, so that an error before it is an HTTP error and not
    an event in a stream that started with 200.
    """
    return await while_connected(request, _respond(answer, style))


async def _respond(answer: Awaitable[Answer], style: StreamStyle) -> Response:
    result = await answer
    if isinstance(result, AsyncGenerator):
        return EventStream(await anext(result), result, style)
    return json_response(result)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelled if the client disconnects first (then raises ClientDisconnect).

    The body must have been read: whatever else the client sends is dropped.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Server-sent events: one for each struct, written in an API's style.

    An error on the way becomes an event with an `error` object, and the stream ends.
    """

    def __init__(self, first: msgspec.Struct, rest: Events, style: StreamStyle) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._rest = rest
        self._style = style

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; close its source as soon as the client is gone."""
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(pump, gone)
            await self._rest.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await self._send_event(send, self._first)
        try:
            async with aclosing(self._rest):
                async for event in self._rest:
                    await self._send_event(send, event)
        except Exception as error:  # the status is sent: an event is all that is left
            await self._send_event(send, self._style.describe(error)[1])
        await send({"type": "http.response.body", "body": self._style.end, "more_body": False})

    async def _send_event(self, send: Send, event: msgspec.Struct) -> None:
        data = self._style.encode(event)
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait, so that no cleanup is left running when this returns."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
