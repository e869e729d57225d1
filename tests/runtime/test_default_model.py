"""The default model, compiled: one request, one answer, in the user's own store."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from tests.runtime.serving import Outcome, alone, compile_missing, outcome, serve
from trnc.core import SamplingParams
from trnc.engine.messages import Submit

GREEDY = SamplingParams(logprobs=3)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, logprobs=3)
PROMPT = tuple(range(400, 525))


def answers() -> tuple[list[str], list[Outcome], list[Outcome]]:
    """Serve two requests alone and in other ways; the ways, and what each request got."""
    from trnc.checkpoint.source import DEFAULT_MODEL
    from trnc.compiler.store import default_root
    from trnc.engine.loops import overlapped_loop
    from trnc.presets import load_preset
    from trnc.runtime.start import StartOptions, start_executor

    options = StartOptions(DEFAULT_MODEL, load_preset("default"), "inductor", default_root())
    executor, _, _ = start_executor(options, compile_missing, print)
    requests = [Submit("greedy", PROMPT, GREEDY, 12), Submit("seeded", PROMPT[92::-1], SEEDED, 12)]
    others = [Submit(f"other {i}", PROMPT[i : 9 + 20 * i], GREEDY, 9) for i in range(2)]
    first = Submit("first", PROMPT[:70], GREEDY, 2)
    served = {
        "with strangers": serve(executor, {0: others, 2: requests}),
        "overlapped": serve(executor, {0: others, 2: requests}, loop=overlapped_loop),
        "chunks of 7": serve(executor, {0: requests}, max_prefill_tokens=7),
        "chunks of 50": serve(executor, {0: requests}, max_prefill_tokens=50),
        "prefix hit": serve(executor, {0: [first], 9: requests}),
    }
    guessing = replace(options, preset=load_preset("mtp-dynamic"))
    speculating, _, _ = start_executor(guessing, compile_missing, print)
    served |= {
        "speculating": serve(speculating, {0: requests}, mtp_always=True),
        "speculating with strangers": serve(
            speculating, {0: others, 2: requests}, loop=overlapped_loop, mtp_always=True
        ),
        "as far as pays": serve(speculating, {0: others, 2: requests}, loop=overlapped_loop),
    }
    assert served["speculating"].scheduler.counters.verify_steps > 0
    assert served["prefix hit"].deltas("greedy")[0].cached_tokens >= 64
    assert executor.compiles_after_ready() == 0
    got = [outcome(driver, r.request_id) for driver in served.values() for r in requests]
    expected = [alone(executor, r) for r in requests] * len(served)
    executor.close()
    speculating.close()
    return list(served), got, expected


@pytest.mark.slow
@pytest.mark.timeout(900)  # it compiles the preset where the store lacks it
def test_one_answer(own_store: None) -> None:
    # In a process of its own: this one may have loaded the kernels of the session's store.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ways, got, expected = pool.submit(answers).result()
    for i, (outcome_got, wanted) in enumerate(zip(got, expected, strict=True)):
        assert len(wanted[0]) == 12
        assert outcome_got == wanted, ways[i // 2]
