"""One set of requests through the whole engine, on any backend.

`python -m tests.trainium.serving FOLDER STORE RANKS` prints their tokens as JSON, from as many host
devices: jax counts its devices once in a process, so each number needs one of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.models.tiny import PRESET, VOCAB
from trnc.core import SamplingParams, TokenLogprobs
from trnc.engine.messages import Submit
from trnc.engine.offline import run_requests
from trnc.presets import Preset, TrainiumOptions
from trnc.runtime.start import Backend, StartOptions, start_executor

TEXT = tuple((i * 7919 + i * i * 31) % VOCAB for i in range(96))
SMALL = replace(
    PRESET,
    name="small",
    decode_rows=(4,),
    prefill_tokens=(16,),
    max_context=80,
    logprobs=False,
    logit_bias=False,
)
GREEDY = SamplingParams()
REQUESTS = (
    Submit("short", TEXT[5:14], GREEDY, 20),
    Submit("long", TEXT[:40], GREEDY, 30),
    Submit(
        "filtered",
        TEXT[1:23],
        SamplingParams(temperature=0.9, top_k=60, top_p=0.9, min_p=0.01, seed=77 << 40 | 5),
        16,
    ),
    Submit("seeded", TEXT[2:20], SamplingParams(temperature=1.5, seed=3), 16),
    Submit("late", TEXT[30:47], GREEDY, 12),  # when it comes, the others have taken every row
)

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


def answers(
    folder: Path,
    preset: Preset,
    backend: Backend,
    store: Path,
    requests: tuple[Submit, ...] = REQUESTS,
) -> Answers:
    """Start an engine, serve the requests, and return the tokens and logprobs of each."""
    executor, _, _ = start_executor(StartOptions(str(folder), preset, backend, store), None, print)  # type: ignore[arg-type]
    found: Answers = {request.request_id: ([], []) for request in requests}
    try:
        for delta in run_requests(executor, requests):
            tokens, logprobs = found[delta.request_id]
            tokens += delta.token_ids
            logprobs += delta.logprobs
        assert executor.compiles_after_ready() == 0
    finally:
        executor.close()
    return found


def tokens(found: Answers) -> dict[str, list[int]]:
    """The tokens alone."""
    return {name: picked for name, (picked, _) in found.items()}


def with_ranks(preset: Preset, ranks: int) -> Preset:
    return replace(preset, trainium=TrainiumOptions(ranks=ranks))


if __name__ == "__main__":
    folder, store, ranks = sys.argv[1:]
    preset = with_ranks(SMALL, int(ranks))
    print(json.dumps(tokens(answers(Path(folder), preset, "xla-cpu", Path(store)))))
