"""Running requests without a process boundary: the plain loop as a generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trnc.engine.executor import Executor
from trnc.engine.messages import Delta, Submit
from trnc.engine.scheduler import Scheduler


def run_requests(executor: Executor, requests: Sequence[Submit]) -> Iterator[Delta]:
    """Submit all requests at once and yield their deltas until every one has ended.

    Raises:
        RequestError: a request is refused; nothing of the others has run.
    """
    scheduler = Scheduler(info=executor.info)
    for request in requests:
        yield from scheduler.submit(request)
    while (plan := scheduler.plan()) is not None:
        yield from scheduler.commit(plan, executor.submit(plan).result())
