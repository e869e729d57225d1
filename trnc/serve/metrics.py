"""Prometheus metrics, in a registry of their own (nothing global).

What the API process sees itself (requests, latencies) is counted here; what the engine counts is
read from its last `Stats` when the page is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trnc.engine.messages import Stats

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
UNKNOWN_ROUTE = "(unknown)"  # a label for each path that is tried would never stop growing

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

_ENGINE_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of the requests that were started"),
    ("cached_tokens", "cached_tokens", "Prompt tokens that were found in the prefix cache"),
    ("generated_tokens", "output_tokens", "Tokens that were generated"),
    ("preemptions", "preemptions", "Requests set aside because the KV pages were used up"),
    ("prefill_steps", "prefill_steps", "Prefill steps"),
    ("decode_steps", "decode_steps", "Decode steps"),
    ("draft_steps", "draft_steps", "Draft steps: the first half of a round of speculation"),
    ("verify_steps", "verify_steps", "Verify steps: the second half"),
    ("device_seconds", "device_seconds", "Time spent in steps"),
    ("host_seconds", "host_seconds", "Time spent planning and reading steps"),
)
_ENGINE_GAUGES = (
    ("requests_running", "running", "Requests that hold a row"),
    ("requests_waiting", "waiting", "Requests that wait for a row"),
    ("free_pages", "free_pages", "KV pages that are free"),
    ("total_pages", "total_pages", "KV pages in all"),
    ("compiles_after_ready", "compiles_after_ready", "Compiles since readiness; must stay 0"),
)


class Metrics:
    """The counters of one server."""

    def __init__(
        self,
        *,
        engine_stats: Callable[[], Stats | None],
        open_requests: Callable[[], int] = int,
    ) -> None:
        self._registry = CollectorRegistry()
        Gauge(
            "trnc_open_requests",
            "HTTP requests that clients have open",
            registry=self._registry,
        ).set_function(open_requests)
        self._registry.register(_EngineCollector(engine_stats))
        self._requests = Counter(
            "trnc_requests",
            "HTTP requests",
            ("route", "status"),
            registry=self._registry,
        )
        self.time_to_first_token = self._histogram(
            "trnc_time_to_first_token_seconds", "From the request to its first token", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "trnc_inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_SECONDS
        )
        self.end_to_end_latency = self._histogram(
            "trnc_request_seconds", "From the request to its last token", _SECONDS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def count_request(self, route: str, status: int) -> None:
        """Count one answered HTTP request."""
        self._requests.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Presents the engine's last `Stats`; nothing before there is one."""

    def __init__(self, engine_stats: Callable[[], Stats | None]) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._engine_stats()
        if stats is None:
            return
        for name, attribute, text in _ENGINE_COUNTERS:
            yield CounterMetricFamily(f"trnc_{name}", text, value=getattr(stats, attribute))
        for name, attribute, text in _ENGINE_GAUGES:
            yield GaugeMetricFamily(f"trnc_{name}", text, value=getattr(stats, attribute))
        yield _by_position("drafted_tokens", "Drafts that were checked", stats.drafted)
        yield _by_position("accepted_tokens", "Drafts that were right", stats.accepted)


def _by_position(name: str, text: str, counts: Sequence[int]) -> Metric:
    family = CounterMetricFamily(f"trnc_{name}", f"{text}, by how far ahead", labels=("position",))
    for position, count in enumerate(counts, start=1):
        family.add_metric((str(position),), count)
    return family


class CountRequests:
    """ASGI middleware: counts each answer by the pattern of its route and its status.

    It sits outside the error handling, so it sees the status that the client sees; an answer that
    never started (the client went first) counts as 499.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            pass  # the server stops and cuts what is open: nothing that a log should explain
        finally:
            route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
            self._metrics.count_request(route, status)
