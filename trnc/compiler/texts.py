"""The canonical texts of many stages, traced in parallel processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import torch

from trnc.compiler.canonical import canonical_text, source_map
from trnc.compiler.sources import recording_sources
from trnc.compiler.trace import trace_stage
from trnc.equiv.lock import StageText
from trnc.models.registry import build_stage
from trnc.models.stage import StageSpec


def stage_texts(specs: Iterable[StageSpec], *, workers: int) -> dict[StageSpec, StageText]:
    """Trace each distinct spec once; the texts know where their lines were written.

    Tracing holds the interpreter for about half a second a stage, so `workers` processes share the
    work; 1 is this process.
    """
    distinct = dict.fromkeys(specs)
    if workers == 1:
        return {spec: _traced(spec) for spec in distinct}
    # The largest first, so that no process ends long after the others.
    ordered = sorted(distinct, key=lambda spec: -len(build_stage(spec).inputs))
    # A server that has torch already is forked for each worker; this process may have threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker) as pool:
        return dict(zip(ordered, pool.map(_traced, ordered), strict=True))


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    gc.disable()  # a tenth of tracing, in a process that lives for seconds


def _traced(spec: StageSpec) -> StageText:
    with recording_sources():
        program = trace_stage(spec)
    return StageText(spec.kind, canonical_text(program), source_map(program))
