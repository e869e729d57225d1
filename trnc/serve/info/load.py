"""How much there is to do, in SGLang's and vLLM's shapes, for whoever spreads requests."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CollectorRegistry, Gauge, generate_latest

import trnc
from trnc.engine.messages import Ready, Stats
from trnc.errors import RequestError, nearest
from trnc.serve.engine_client import EngineClient

SECTIONS = ("core", "memory", "queues")


class OldLoad(msgspec.Struct, frozen=True):
    """An entry of GET /get_load. `num_tokens` is what the KV pages of running requests hold."""

    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    dp_rank: int = 0


class Memory(msgspec.Struct, frozen=True):
    """KV pages: those that no running request holds are free, though they may be cached."""

    total_pages: int
    free_pages: int
    page_size: int


class Queues(msgspec.Struct, frozen=True):
    """Requests by where they are. `open` are those that the API process has not answered."""

    running: int
    waiting: int
    open: int


class Load(msgspec.Struct, frozen=True):
    """The load of the one engine, in tokens. `gen_throughput` is tokens a second of device time,
    `token_usage` and `cache_hit_rate` are shares of 1; both rates are since the start."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    dp_rank: int = 0
    memory: Memory | UnsetType = UNSET
    queues: Queues | UnsetType = UNSET


class Loads(msgspec.Struct, frozen=True):
    """GET /v1/loads. `timestamp` is in seconds since 1970."""

    timestamp: float
    version: str
    loads: list[Load]


class ServerLoad(msgspec.Struct, frozen=True):
    """GET /load, in vLLM's shape: how many requests are open."""

    server_load: int


class LoadServing:
    """Tells the load of the engine; every number is of now."""

    def __init__(self, *, engine: EngineClient) -> None:
        self._engine = engine

    async def get_load(self) -> list[OldLoad]:
        """Return the load in SGLang's older shape; raises EngineUnavailableError."""
        load = _load(self._engine.info, await self._engine.stats())
        total = load.num_running_reqs + load.num_waiting_reqs
        return [OldLoad(total, load.num_waiting_reqs, load.num_used_tokens)]

    async def loads(self, sections: frozenset[str]) -> Loads:
        """Return the load with the sections asked for; raises EngineUnavailableError."""
        info, stats = self._engine.info, await self._engine.stats()
        load = _load(info, stats)
        if "memory" in sections:
            memory = Memory(stats.total_pages, stats.free_pages, info.page_size)
            load = msgspec.structs.replace(load, memory=memory)
        if "queues" in sections:
            queues = Queues(stats.running, stats.waiting, len(self._engine.in_flight))
            load = msgspec.structs.replace(load, queues=queues)
        return Loads(time.time(), trnc.__version__, [load])

    def server_load(self) -> ServerLoad:
        """Return how many requests have not been answered."""
        return ServerLoad(len(self._engine.in_flight))


def prometheus(loads: Loads) -> bytes:
    """Return the numbers of a load as a page for Prometheus."""
    registry = CollectorRegistry()
    for name, value in msgspec.structs.asdict(loads.loads[0]).items():
        if isinstance(value, int | float) and name != "dp_rank":
            Gauge(f"trnc_load_{name}", name.replace("_", " "), registry=registry).set(value)
    return generate_latest(registry)


def loads_query(query: Mapping[str, str]) -> tuple[frozenset[str], bool]:
    """Return the sections that a query asks for, and whether as a page for Prometheus.

    Raises:
        RequestError: a parameter, a section or the format is unknown.
    """
    for name in query:
        if name not in ("include", "format"):
            hint = nearest(name, ("include", "format"))
            raise RequestError(f"Unknown query parameter '{name[:64]}'.{hint}", param=name[:64])
    sections = query.get("include", "core").split(",")
    for section in sections:
        if section not in (*SECTIONS, "all"):
            raise RequestError(
                f"'include' must be made of {', '.join(SECTIONS)} or all, got {section[:40]!r}.",
                param="include",
            )
    form = query.get("format", "json")
    if form not in ("json", "prometheus"):
        raise RequestError(
            f"'format' must be json or prometheus, got {form[:40]!r}.", param="format"
        )
    return frozenset(SECTIONS if "all" in sections else sections), form == "prometheus"


def _load(info: Ready, stats: Stats) -> Load:
    used = (stats.total_pages - stats.free_pages) * info.page_size
    total = stats.total_pages * info.page_size
    return Load(
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total,
        gen_throughput=_share(stats.output_tokens, stats.device_seconds),
        cache_hit_rate=_share(stats.cached_tokens, stats.prompt_tokens),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
