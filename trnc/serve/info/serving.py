"""What operators ask a server: is it well, what is it, what has it done."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing, suppress

import msgspec

import trnc
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.errors import EngineError
from trnc.serve.access import Admission
from trnc.serve.engine_client import EngineClient
from trnc.serve.errors import EngineUnavailableError, QueueFullError
from trnc.serve.metrics import Metrics

STATS_SECONDS = 2.0  # how long /metrics waits for an engine that is in a long step
PROBE_SECONDS = 20.0  # how long /health_generate waits for a sign of life; SGLang's


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

    async def health_generate(self, seconds: float = PROBE_SECONDS) -> None:
        """Return once the engine has generated a token, or has shown that it is alive.

        A busy engine is well: one that is full, or has answered others while this waited.

        Raises:
            EngineUnavailableError: it is not ready, gone, or silent for `seconds`.
        """
        self.health()
        heard = self._engine.messages_received
        probe = Submit(f"health-{uuid.uuid4().hex}", (0,), SamplingParams(), 1)
        try:
            async with asyncio.timeout(seconds), aclosing(self._engine.generate(probe)) as deltas:
                async for _ in deltas:
                    pass
        except QueueFullError:
            return
        except TimeoutError:
            if self._engine.messages_received == heard:
                raise EngineUnavailableError(
                    f"The engine gave no sign of life for {seconds:g} seconds."
                ) from None

    def version(self) -> Version:
        """Return the version of trnc."""
        return Version(trnc.__version__)

    async def metrics(self) -> bytes:
        """Return the metrics, with the engine's counters of now, or its last ones if it is gone."""
        with suppress(EngineError, TimeoutError):  # then the page shows what was known last
            await asyncio.wait_for(self._engine.stats(), STATS_SECONDS)
        return self._metrics.render()
