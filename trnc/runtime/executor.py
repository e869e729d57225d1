"""The executor: takes step plans, runs their variants one after the other, reads back the picks.

One worker thread runs the steps, in the order of `submit`. With the compiled runner a step holds no
lock of Python, so the caller can plan the next one meanwhile. A step in flight has input tensors of
its own; they are given back when it has ended, so a variant has as many sets as were in flight.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from trnc.core import ExecutorInfo, StepPlan, StepResult, TokenLogprobs, VariantKey
from trnc.runtime.catalog import Catalog
from trnc.runtime.inputs import InputBuffers, Inputs

RECENT_CALLS = 4096


class ProgramRunner(Protocol):
    """Runs the program of one variant over the device state. One module per backend."""

    def run(self, key: VariantKey, inputs: Inputs) -> list[Tensor]:
        """Run one step; return the outputs of its program (`trnc.compiler.program`)."""


class ProgramExecutor:
    """`trnc.engine.executor.Executor` over a catalog and a program runner.

    `info` are the limits that plans must keep.
    `recent_calls` are the last calls of the runner, oldest first: when each began and ended, by
    `time.perf_counter`. All else that a step takes is the host's time.
    """

    def __init__(
        self,
        *,
        info: ExecutorInfo,
        catalog: Catalog,
        runner: ProgramRunner,
        max_pages: int,
        spare_slot: int,
        speculates: bool,
        count_compiles: Callable[[], int],
    ) -> None:
        self.info = info
        self._catalog = catalog
        self._runner = runner
        self._max_pages = max_pages
        self._spare_slot = spare_slot
        self._speculates = speculates
        self._count_compiles = count_compiles
        self.recent_calls: deque[tuple[float, float]] = deque(maxlen=RECENT_CALLS)
        self._unused: defaultdict[VariantKey, list[InputBuffers]] = defaultdict(list)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trnc-step")

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue one step; its inputs are built here, on the caller's thread."""
        key = self._catalog.select(plan)
        buffers = self._take_buffers(key)
        return self._worker.submit(self._run, plan, key, buffers, buffers.fill(plan))

    def compiles_after_ready(self) -> int:
        """Return how many artifacts were built since the executor was; anything but 0 is a bug."""
        return self._count_compiles()

    def close(self) -> None:
        """Wait for the steps in flight and stop the worker."""
        self._worker.shutdown(wait=True)

    def _take_buffers(self, key: VariantKey) -> InputBuffers:
        unused = self._unused[key]
        if unused:
            return unused.pop()
        max_pages = -(-key.context // self.info.page_size) or self._max_pages
        return InputBuffers(
            key,
            max_pages=max_pages,
            spare_slot=self._spare_slot,
            vocab_size=self.info.vocab_size,
            speculates=self._speculates,
        )

    def _run(
        self, plan: StepPlan, key: VariantKey, buffers: InputBuffers, inputs: Inputs
    ) -> StepResult:
        began = time.perf_counter()
        try:
            outputs = self._runner.run(key, inputs)
        finally:
            ended = time.perf_counter()
            self.recent_calls.append((began, ended))
            self._unused[key].append(buffers)
        scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if key.prompt_logprobs:
            *outputs, chosen, ids, values = outputs
            scores = _read_scores(plan, chosen, ids, values)
        result = read_result(plan, outputs, micros=round((ended - began) * 1e6))
        return replace(result, prompt_logprobs=scores)


def read_result(plan: StepPlan, outputs: list[Tensor], *, micros: int) -> StepResult:
    """Read back what a program returned for the sequences of its plan."""
    nothing = ((),) * len(plan.sequences)
    if plan.step == "draft":
        drafts = zip(*(output.tolist() for output in outputs), strict=True)
        picked = tuple(row for row, _ in zip(drafts, plan.sequences, strict=False))
        return StepResult(picked, nothing, micros)
    tokens, *rest = (output.tolist() for output in outputs)
    accepted = rest.pop(0) if plan.step == "verify" else None
    rows = [
        _picked_rows(plan, index, accepted) if sequence.sample else range(0)
        for index, sequence in enumerate(plan.sequences)
    ]
    return StepResult(
        tokens=tuple(tuple(tokens[row] for row in picked) for picked in rows),
        logprobs=_read_logprobs(plan, rows, rest) if rest else nothing,
        micros=micros,
    )


def _picked_rows(plan: StepPlan, index: int, accepted: list[int] | None) -> range:
    """The rows of logits whose picks count."""
    if accepted is None:
        return range(index, index + 1)
    first = index * (plan.depth + 1)
    return range(first, first + accepted[index] + 1)


def _read_logprobs(
    plan: StepPlan, rows: list[range], outputs: list[list[Any]]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Cut each row's logprobs to what its request asked for."""
    chosen, ids, values = outputs

    def read(row: int, wanted: int) -> TokenLogprobs:
        top = tuple(zip(ids[row][:wanted], values[row][:wanted], strict=True))
        return TokenLogprobs(logprob=chosen[row], top=top)

    return tuple(
        ()
        if (wanted := sequence.sampling.logprobs) is None
        else tuple(read(row, wanted) for row in picked)
        for sequence, picked in zip(plan.sequences, rows, strict=True)
    )


def _read_scores(
    plan: StepPlan, chosen: Tensor, ids: Tensor, values: Tensor
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Return each sequence's logprobs of the targets that it asked for."""
    read: list[tuple[TokenLogprobs, ...]] = []
    first = 0
    for sequence in plan.sequences:
        wanted = sequence.sampling.prompt_logprobs or 0
        rows = [first + i for i, target in enumerate(sequence.targets) if target >= 0]
        first += sequence.count
        tops = zip(ids[rows, :wanted].tolist(), values[rows, :wanted].tolist(), strict=True)
        entries = zip(chosen[rows].tolist(), tops, strict=True)
        read.append(
            tuple(TokenLogprobs(one, tuple(zip(*top, strict=True))) for one, top in entries)
        )
    return tuple(read)
