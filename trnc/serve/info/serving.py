"""What operators ask a server: is it well, what is it, what has it done."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

import trnc
from trnc.errors import EngineError
from trnc.serve.access import Admission
from trnc.serve.engine_client import EngineClient
from trnc.serve.metrics import Metrics

STATS_SECONDS = 2.0  # how long /metrics waits for an engine that is in a long step


class Health(msgspec.Struct, frozen=True):
    """The body of a healthy answer."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    """The body of /version."""

    version: str


class InfoServing:
    """Health, version and metrics."""

    def __init__(self, *, engine: EngineClient, metrics: Metrics, admission: Admission) -> None:
        self._engine = engine
        self._metrics = metrics
        self._admission = admission

    def health(self) -> Health:
        """Return if requests can be answered; raises EngineUnavailableError with the reason.

        A server that drains is not well: that is how a load balancer learns of it.
        """
        self._admission.check_ready()
        _ = self._engine.info
        return Health()

    def version(self) -> Version:
        """Return the version of trnc."""
        return Version(trnc.__version__)

    async def metrics(self) -> bytes:
        """Return the metrics, with the engine's counters of now, or its last ones if it is gone."""
        with suppress(EngineError, TimeoutError):  # then the page shows what was known last
            await asyncio.wait_for(self._engine.stats(), STATS_SECONDS)
        return self._metrics.render()
