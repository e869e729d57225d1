"""Runs an engine loop in this thread on messages that arrive at given turns of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.scripted_executor import ScriptedExecutor
from trnc.core import SamplingParams
from trnc.engine.loops import Engine, Grammars, NoGrammars
from trnc.engine.messages import Delta, Deltas, Failed, Shutdown, Stats, Submit, ToApi, ToEngine
from trnc.engine.scheduler import Scheduler
from trnc.engine.trace import Began, TraceEvent

Loop = Callable[[Engine], None]


def submit(request_id: str, prompt: Iterable[int], max_tokens: int = 4, **fields: object) -> Submit:
    """Return a Submit; greedy unless told otherwise."""
    sampling = fields.pop("sampling", SamplingParams())
    return Submit(request_id, tuple(prompt), sampling, max_tokens, **fields)  # type: ignore[arg-type]


def check_ownership(scheduler: Scheduler) -> None:
    """Assert that each page has one owner, and that requests stand on pages of the tree."""
    kv = scheduler.kv
    owned = list(kv.pool.free_pages()) + [node.page for node in kv.tree.nodes()]
    locks: dict[int, int] = {}
    for request in scheduler.running:
        assert request.node is not None
        assert request.computed <= request.scheduled
        shared = kv.tree.pages(request.node)
        assert request.pages[: len(shared)] == shared
        owned += request.pages[len(shared) :]
        for page in shared:
            locks[page] = locks.get(page, 0) + 1
    assert sorted(owned) == list(range(1, len(owned) + 1)), "a page is lost or has two owners"
    assert all(node.locks == locks.get(node.page, 0) for node in kv.tree.nodes())
    assert kv.tree.evictable == sum(node.locks == 0 for node in kv.tree.nodes())


@dataclass(kw_only=True)
class Driver:
    """One engine with its inbox and outbox. `arrivals` maps a turn of the loop to its messages."""

    executor: ScriptedExecutor
    arrivals: Mapping[int, Sequence[ToEngine]]
    max_waiting: int | None = None
    grammars: Grammars = field(default_factory=NoGrammars)
    sent: list[ToApi | Delta] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)
    turn: int = -1

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(info=self.executor.info, max_waiting=self.max_waiting)
        self.events.append(Began(self.executor.info, self.max_waiting))
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=self.executor,
            grammars=self.grammars,
            receive=self.receive,
            send=self.send,
            trace=self.events.append,
            clock=lambda: float(self.turn),
        )

    def send(self, message: ToApi) -> None:
        self.sent += message.deltas if isinstance(message, Deltas) else [message]

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        check_ownership(self.scheduler)
        assert not (wait and self.executor.busy), "it waits while a step is unread"
        later = [turn for turn in self.arrivals if turn > self.turn]
        if wait and not later:
            return [Shutdown()]
        self.turn = min(later) if wait else self.turn + 1
        return self.arrivals.get(self.turn, [])

    def serve(self, loop: Loop) -> Driver:
        """Run until every request has ended and nothing more arrives."""
        loop(self.engine)
        assert not self.scheduler.request_ids
        assert self.scheduler.kv.available == self.executor.info.num_pages - 1
        return self

    def deltas(self, request_id: str) -> list[Delta]:
        return [m for m in self.sent if isinstance(m, Delta) and m.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas(request_id) for token in delta.token_ids]

    def finish(self, request_id: str) -> str | None:
        """The finish reason; asserts that only the last delta has one."""
        reasons = [delta.finish_reason for delta in self.deltas(request_id)]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1] if reasons else None

    def failures(self) -> dict[str, Failed]:
        return {m.request_id: m for m in self.sent if isinstance(m, Failed)}

    def stats(self) -> list[Stats]:
        return [m for m in self.sent if isinstance(m, Stats)]
