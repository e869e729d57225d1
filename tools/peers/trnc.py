"""trnc: its scheduler and executor in one process, with the smallest preset that has the rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from peers.protocol import Peer, Settings, main

PRESETS = {4: "default", 8: "batch8", 16: "batch16"}  # the most sequences of each


class Trnc:
    """One executor; a scheduler for each task."""

    def __init__(self, settings: Settings) -> None:
        """Load what is compiled; `prepare` has seen to it that everything is."""
        from trnc.runtime.start import require_cache

        self._executor = _start(settings, require_cache)
        self.vocab: int = self._executor.info.vocab_size

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Submit a request for each prompt, to a scheduler with an empty cache."""
        from trnc.core import SamplingParams
        from trnc.engine.messages import Submit
        from trnc.engine.scheduler import Scheduler

        self._scheduler = Scheduler(info=self._executor.info)
        for row, prompt in enumerate(prompts):
            self._scheduler.submit(Submit(str(row), tuple(prompt), SamplingParams(), limit))

    def step(self) -> Sequence[int]:
        """Run a step of the scheduler's own choice."""
        plan = self._scheduler.plan()
        assert plan is not None, "requests are left"
        deltas = self._scheduler.commit(plan, self._executor.submit(plan).result())
        return [int(delta.request_id) for delta in deltas for _ in delta.token_ids]

    def end(self) -> None:
        """Drop the scheduler with its requests."""
        del self._scheduler


def _start(settings: Settings, compiler: Callable[..., Any]) -> Any:
    """Return an executor; `compiler` is called if anything is missing from the store."""
    os.environ["TRNC_THREADS"] = str(settings.threads)
    from trnc.compiler.store import default_root
    from trnc.presets import load_preset
    from trnc.runtime.packed_store import packed_root
    from trnc.runtime.start import StartOptions, start_executor

    preset = load_preset(next(name for rows, name in PRESETS.items() if rows >= settings.rows))
    options = StartOptions(str(settings.model), preset, "inductor", default_root(), packed_root())
    executor, _, _ = start_executor(options, compiler, lambda _: None)
    return executor


def prepare(settings: Settings) -> None:
    """Compile what the store lacks."""
    from rich.console import Console

    from trnc.cli.compile_command import compile_missing
    from trnc.cli.options import job_count

    compiler = partial(compile_missing, jobs=job_count(None), console=Console(stderr=True))
    _start(settings, compiler).close()


def logits(settings: Settings, windows: list[list[int]]) -> Any:
    """Return the logits of every position; those of the variant `fp32` are the oracle's.

    The oracle is the eager backend on the dequantised weights. Otherwise the stages run unfused
    over the native kernels, which gives the bits of the compiled ones.
    """
    import numpy as np
    import torch

    from trnc.models.weights import bind_weights
    from trnc.presets import load_preset
    from trnc.runtime.start import open_model, program_config
    from trnc.runtime.state import allocate_state

    exact = settings.variant == "fp32"
    torch.set_num_threads(settings.threads)
    model = open_model(str(settings.model), report=lambda _: None)
    config = program_config(model, load_preset("default"), "eager" if exact else "inductor")
    pages = -(-settings.context // config.preset.page_size)
    with torch.inference_mode():
        weights = bind_weights(
            model.weights, config.model, config.formats, max_context=settings.context
        )
        tensors = dict(weights) | allocate_state(config.model, config.preset, num_pages=pages + 1)
    runner = _runner(config, tensors, exact=exact)
    return np.concatenate([_window(runner, config, ids, pages) for ids in windows])


def _runner(config: Any, tensors: dict[str, Any], *, exact: bool) -> Any:
    from trnc.ops import native
    from trnc.runtime.eager_runner import EagerRunner

    if exact:
        return EagerRunner(config=config, tensors=tensors)
    with tempfile.TemporaryDirectory() as folder:
        native.load_kernels(native.build_kernels(native.detect_target(), Path(folder)))
    return EagerRunner(config=config, tensors=tensors, operators=nullcontext)


def _window(runner: Any, config: Any, ids: list[int], pages: int) -> Any:
    """Return the logits of one window, which is a prefill step with one row a token."""
    import torch

    from trnc.compiler.program import build_program
    from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
    from trnc.runtime.inputs import build_inputs

    key = VariantKey("prefill", len(ids), len(ids))
    whole = SequencePlan(
        0, 0, len(ids), tuple(ids), tuple(range(1, pages + 1)), True, 0, SamplingParams()
    )
    plan = StepPlan("prefill", (whole,))
    preset = config.preset
    inputs = build_inputs(
        plan, key, max_pages=pages, spare_slot=preset.max_rows, vocab_size=config.model.vocab_size
    )
    inputs["sample_rows"] = torch.arange(len(ids))
    return runner.evaluate(build_program(config, key), inputs)["value.logits"].numpy()


def _version() -> str:
    import torch

    import trnc

    return f"trnc {trnc.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    main(Peer(_version, prepare, Trnc, logits))
