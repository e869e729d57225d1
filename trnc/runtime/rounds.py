"""What rounds of speculation cost on this machine, measured before the first request comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trnc.core import SamplingParams, SequencePlan, Step, StepPlan
from trnc.runtime.executor import ProgramExecutor

TRIES = 3  # rounds of each kind, of which the fastest counts: the first warms up
_GREEDY = SamplingParams(temperature=0.0)


def measure_rounds(
    executor: ProgramExecutor, decode_rows: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield sequences, depth and microseconds of rounds of each depth, for `decode_rows` sequences.

    The steps write to page 0 and to slots that nobody has yet. Depths take turns, so that what else
    the machine does falls on all of them alike.
    """
    for rows in decode_rows:
        least: dict[int, int] = {}
        for _ in range(TRIES):
            for depth in (0, *executor.info.mtp_depths):
                micros = _round(executor, rows, depth)
                least[depth] = min(micros, least.get(depth, micros))
        yield from ((rows, depth, micros) for depth, micros in least.items())


def _round(executor: ProgramExecutor, rows: int, depth: int) -> int:
    """The decode before a draft is not part of the round: it says where the draft stands."""
    steps: tuple[Step, ...] = ("decode", "draft", "verify") if depth else ("decode",)
    took = [executor.submit(_plan(step, rows, depth)).result().micros for step in steps]
    return sum(took[-2:])


def _plan(step: Step, rows: int, depth: int) -> StepPlan:
    count = depth + 1 if step == "verify" else 1
    sequences = (
        SequencePlan(
            slot=slot,
            start=0,
            count=count,
            token_ids=None,
            pages=(),
            sample=True,
            output_index=0,
            sampling=_GREEDY,
        )
        for slot in range(rows)
    )
    return StepPlan(step, tuple(sequences), 0 if step == "decode" else depth)
