"""Responses kept for `previous_response_id`: in memory, bounded in number, age and size."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from trnc.serve.responses.protocol import Response

MAX_BYTES = 256 * 2**20


@dataclass(slots=True)
class Stored:
    """A response and the conversation up to its end, without instructions.

    `task` computes it, for one that runs in the background.
    """

    response: Response
    messages: tuple[dict[str, Any], ...]
    task: asyncio.Task[None] | None = None
    expires: float = 0.0
    size: int = 0


class ResponseStore:
    """Maps ids to responses; the oldest go first. `capacity` 0 keeps nothing."""

    def __init__(
        self,
        *,
        capacity: int,
        seconds: float,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._stored)

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of an older state of it, and forget what is too much."""
        self.remove(stored.response.id)
        stored.expires = self._clock() + self._seconds
        stored.size = len(msgspec.json.encode((stored.response, stored.messages)))
        self._stored[stored.response.id] = stored
        self._bytes += stored.size
        self._forget()

    def get(self, response_id: str) -> Stored | None:
        """Return a response that is still kept."""
        self._forget()
        return self._stored.get(response_id)

    def remove(self, response_id: str) -> Stored | None:
        """Forget a response and return it, if it was kept."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
        return stored

    def _forget(self) -> None:
        now = self._clock()
        while self._stored:
            oldest = next(iter(self._stored.values()))
            too_many = len(self._stored) > self.capacity or self._bytes > self._max_bytes
            if not too_many and oldest.expires > now:
                return
            self.remove(oldest.response.id)
            if oldest.task is not None:
                oldest.task.cancel()
