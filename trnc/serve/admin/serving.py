"""Aborting requests and flushing the prefix cache."""

from __future__ import annotations

import asyncio

import msgspec

from trnc.errors import RequestError
from trnc.serve.body import BodyRules, Inert
from trnc.serve.engine_client import EngineClient

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting"
    " requests, the operation will not be performed.)\n"
)


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_request: the requests whose ids start with `rid`, or all."""

    rid: str | None = None
    abort_all: bool | None = None


ABORT_RULES = BodyRules(
    AbortRequest, {"abort_message": Inert(str, "a reason for the caller's own records")}, {}
)


class AdminServing:
    """Aborts requests and flushes the prefix cache."""

    def __init__(self, *, engine: EngineClient) -> None:
        self._engine = engine

    def abort(self, body: AbortRequest) -> None:
        """Abort requests; each one's client gets the output so far, with finish reason `abort`.

        An id that no request starts with is one that ended before: nothing is done.
        """
        for request_id in list(self._engine.in_flight):
            if body.abort_all or (body.rid and request_id.startswith(body.rid)):
                self._engine.abort(request_id)

    async def flush_cache(self, timeout: float) -> None:
        """Forget all cached prefixes, waiting up to `timeout` seconds for requests to end.

        Raises:
            RequestError: there are still requests; nothing was flushed.
        """
        if await self._engine.flush_cache() is not None:
            return
        try:
            async with asyncio.timeout(timeout):
                while True:
                    await self._engine.wait_idle()
                    if await self._engine.flush_cache() is not None:
                        return
        except TimeoutError:
            count = len(self._engine.in_flight)
            raise RequestError(
                f"Flush cache failed: {count} requests are running or waiting. Wait for them with"
                " ?timeout=SECONDS, or end them with /abort_request.",
                code="not_idle",
            ) from None


def flush_timeout(query: dict[str, str]) -> float:
    """Return the seconds that a query asks to wait, 0 without; raises RequestError."""
    for name in query:
        if name != "timeout":
            raise RequestError(f"Unknown query parameter '{name[:64]}'. There is 'timeout'.")
    try:
        seconds = float(query.get("timeout", 0))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise RequestError(
            f"'timeout' must be a number of seconds, got {query['timeout'][:40]!r}.",
            param="timeout",
        )
    return seconds
