"""Who may call which route, and how many may at once.

Every route has an access level. `open` routes tell a load balancer whether to send requests here;
`admin` routes change the server or show its configuration; all others are for `client`s. Without
keys everything is open. Keys are compared in constant time, as digests, and are never logged.

`Admission` counts the requests that clients have open. It is how a server refuses more than it was
told to hold, and how it drains: it takes no new ones and waits for the open ones to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from trnc.serve.errors import (
    AuthenticationError,
    BodyTimeoutError,
    DrainingError,
    OverloadedError,
    PermissionDeniedError,
)

Access = Literal["open", "client", "admin"]

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
ADMIN_PATHS = frozenset({"/server_info", "/get_server_info"})  # they show how it is set up
BODY_SECONDS = 60.0  # for all of a body; 16 MiB in a minute is 2 Mbit/s


class Keys:
    """The keys of a server, as digests."""

    def __init__(self, *, api_keys: Sequence[str] = (), admin_key: str | None = None) -> None:
        self._api = [_digest(key) for key in api_keys]
        self._admin = [] if admin_key is None else [_digest(admin_key)]

    def check(self, headers: Headers, access: Access) -> None:
        """Return if a request may use a route of this level.

        The admin key opens client routes as well. Without an admin key the API keys open admin
        routes; without API keys client routes are open to all.

        Raises:
            AuthenticationError: it has no key, or an unknown one.
            PermissionDeniedError: it has an API key where the admin key is needed.
        """
        needed = self._admin or self._api if access == "admin" else self._api
        if access == "open" or not needed:
            return
        given = _digest(_key_of(headers))
        is_admin, is_api = _among(given, self._admin), _among(given, self._api)
        if is_admin or (is_api and needed is self._api):
            return
        raise PermissionDeniedError if is_api else AuthenticationError


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _among(given: bytes, digests: Sequence[bytes]) -> bool:
    """Compare with all of them: the time taken does not say which one was near."""
    found = False
    for digest in digests:
        found |= hmac.compare_digest(given, digest)
    return found


def _key_of(headers: Headers) -> str:
    """Return the key of `Authorization: Bearer KEY` or, as Anthropic's clients do, `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "")


class Admission:
    """The client requests that are open: at most `limit` (None: any number), none once closed."""

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._idle = asyncio.Event()
        self._idle.set()
        self.open = 0
        self.leaving = False
        self.closed = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold one place; raises DrainingError or OverloadedError where there is none."""
        if self.closed:
            raise DrainingError
        if self._limit is not None and self.open >= self._limit:
            raise OverloadedError(self._limit)
        with self.hold():
            yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count work that was let in before, such as what goes on after its request's answer."""
        self.open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    def check_ready(self) -> None:
        """Raise DrainingError once the server is `leaving`: readiness goes before the server."""
        if self.leaving:
            raise DrainingError

    async def drain(self, *, announce_seconds: float, grace_seconds: float) -> None:
        """Stop being ready, then stop taking requests, then wait for the open ones.

        For `announce_seconds` requests are still taken, so that those who were sent here before
        the load balancer saw the change are answered. Open ones get `grace_seconds`.
        """
        self.leaving = True
        await asyncio.sleep(announce_seconds)
        self.closed = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except TimeoutError:
            return


def guarded(route: Route, access: Access, keys: Keys, admission: Admission) -> Route:
    """Put the checks in front of a route's endpoint: they come before any of its body is read."""
    inner = route.app
    # What clients post is work; what they get is an answer about it, wanted while draining too.
    is_work = access == "client" and "POST" in (route.methods or ())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        keys.check(Headers(scope=scope), access)
        if not is_work:
            await inner(scope, receive, send)
            return
        with admission.enter():
            await inner(scope, _timed(receive), send)

    route.app = app
    return route


def _timed(receive: Receive) -> Receive:
    """Bound the time that a body takes: a client that sends it byte by byte holds a place."""
    deadline = asyncio.get_running_loop().time() + BODY_SECONDS
    complete = False

    async def timed() -> Message:
        nonlocal complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise BodyTimeoutError from None
        complete = not message.get("more_body", False)
        return message

    return timed


def access_of(route: Route, *, admin: bool) -> Access:
    """Return the level of a route; `admin` says that its role is for administrators."""
    if route.path in OPEN_PATHS:
        return "open"
    return "admin" if admin or route.path in ADMIN_PATHS else "client"
