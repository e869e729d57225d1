"""Runs requests on a real executor, under limits of the test's choice, through the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.engine.driver import Driver, Loop
from trnc.compiler.compile import build, plan_build, write_artifact
from trnc.compiler.manifest import Manifest
from trnc.compiler.program import ProgramConfig
from trnc.compiler.store import Store
from trnc.core import ExecutorInfo, SequencePlan, StepPlan, StepResult, TokenLogprobs
from trnc.engine.executor import Executor
from trnc.engine.loops import plain_loop
from trnc.engine.messages import Submit, ToEngine
from trnc.ops.native import Target

# Tokens, the logprobs of each, and why the text ended.
Outcome = tuple[list[int], list[TokenLogprobs], str | None]


def compile_missing(config: ProgramConfig, target: Target, store: Store) -> Manifest:
    """A compiler for `start_executor` that says nothing.

    It compiles in this process: each of `trnc compile`'s workers imports and probes for seconds.
    """
    plan = plan_build(config, target=target, store=store, report=lambda *_: None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(store.root / "inductor")
    for job in plan.missing:
        store.get_or_build(job.key, partial(write_artifact, job, target))
    return build(replace(plan, missing=()), store=store, workers=1, report=lambda *_: None)


@dataclass(eq=False, kw_only=True)
class Limited:
    """An executor that claims to have less than it has: fewer pages, shorter chunks, fewer rows."""

    executor: Executor
    info: ExecutorInfo
    plans: list[StepPlan] = field(default_factory=list)
    futures: list[Future[StepResult]] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan)
        self.futures.append(self.executor.submit(plan))  # type: ignore[arg-type]
        return self.futures[-1]

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self.futures)

    def compiles_after_ready(self) -> int:
        return self.executor.compiles_after_ready()

    def close(self) -> None:
        raise AssertionError("the executor belongs to the session")


@dataclass(eq=False, kw_only=True)
class Prompted(Limited):
    """Names the drafts of each verify: what the request will pick, or not, as `right` says.

    Drafts of random weights are almost never right. `answers` maps the seeds of requests to their
    tokens; `right` takes the output index of a draft.
    """

    answers: Mapping[int, Sequence[int]]
    right: Callable[[int], bool]

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if plan.step == "verify":
            named = tuple(map(self._name_drafts, plan.sequences))
            plan = replace(plan, sequences=named)
        return super().submit(plan)

    def _name_drafts(self, sequence: SequencePlan) -> SequencePlan:
        assert sequence.token_ids is not None
        seed, first = sequence.sampling.seed, sequence.output_index
        known, *_ = sequence.token_ids
        drafts = self._drafts(seed, first, sequence.count - 1)
        return replace(sequence, token_ids=(known, *drafts))

    def _drafts(self, seed: int, first: int, count: int) -> tuple[int, ...]:
        """Return guesses at the outputs from number `first` on, as many as the answer has."""
        answer = self.answers[seed][first : first + count]
        return tuple(
            token if self.right(index) else (token + 1) % self.info.vocab_size
            for index, token in enumerate(answer, start=first)
        )


def serve(
    executor: Executor,
    arrivals: Mapping[int, Sequence[ToEngine]],
    *,
    loop: Loop = plain_loop,
    **limits: Any,
) -> Driver:
    """Serve messages by the turn of the loop at which they arrive; `limits` are of ExecutorInfo."""
    limited = Limited(executor=executor, info=replace(executor.info, **limits))
    return Driver(executor=limited, arrivals=arrivals).serve(loop)  # type: ignore[arg-type]


def outcome(driver: Driver, request_id: str) -> Outcome:
    """What a client got for a request."""
    logprobs = [entry for delta in driver.deltas(request_id) for entry in delta.logprobs]
    return driver.tokens(request_id), logprobs, driver.finish(request_id)


def alone(executor: Executor, request: Submit) -> Outcome:
    """What a request gets when nothing else runs and nothing is scarce."""
    return outcome(serve(executor, {0: [request]}), request.request_id)
