"""Input tensors are filled again and again: nothing of an earlier step may be left in them."""

from __future__ import annotations

import random

import torch

from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
from trnc.runtime.inputs import InputBuffers, build_inputs

ROWS, MAX_PAGES, PAGE = 4, 8, 4
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.5, seed=7),
    SamplingParams(temperature=2.0, seed=-1, logit_bias=((3, 1.5), (9, -2.0))),
    SamplingParams(logit_bias=((1, -100.0),)),
)


def random_plan(pick: random.Random, key: VariantKey, tables: list[tuple[int, ...]]) -> StepPlan:
    """Return a plan that fits the variant; some of its page tables are objects of earlier plans."""
    sequences, room = [], key.tokens
    for slot in pick.sample(range(ROWS), pick.randint(1, ROWS)):
        count = 1 if key.step == "decode" else pick.randint(1, max(1, room // 2))
        pages = pick.choice(tables)
        start = pick.randint(0, len(pages) * PAGE - count) if len(pages) * PAGE > count else 0
        on_device = count == 1 and pick.random() < 0.5
        token_ids = None if on_device else tuple(pick.randrange(50) for _ in range(count))
        sample = key.step == "decode" or pick.random() < 0.5
        sequences.append(
            SequencePlan(
                slot, start, count, token_ids, pages, sample, pick.randrange(9), pick.choice(PARAMS)
            )
        )
        room -= count
    return StepPlan(key.step, tuple(sequences))


def test_a_step_leaves_nothing_in_the_inputs_of_the_next():
    pick = random.Random(0)
    tables = [tuple(pick.sample(range(1, 99), pick.randint(1, MAX_PAGES))) for _ in range(2 * ROWS)]
    for key in (
        VariantKey("decode", ROWS, ROWS, "sample", logit_bias=True),
        VariantKey("prefill", 32, ROWS, "sample", logit_bias=True),
        VariantKey("prefill", 32, ROWS),
    ):
        buffers = InputBuffers(key, max_pages=MAX_PAGES, spare_slot=ROWS)
        for _ in range(200):
            plan = random_plan(pick, key, tables)
            filled = buffers.fill(plan)
            new = build_inputs(plan, key, max_pages=MAX_PAGES, spare_slot=ROWS)
            assert filled.keys() == new.keys()
            for name, tensor in new.items():
                assert torch.equal(filled[name], tensor), name


def test_the_padding_is_what_it_promises():
    key = VariantKey("prefill", 8, 3)
    plan = StepPlan(
        "prefill",
        (
            SequencePlan(2, 4, 3, (5, 6, 7), (9, 8), False, 0, SamplingParams()),
            SequencePlan(0, 6, 1, None, (3, 4), True, 1, SamplingParams()),
        ),
    )
    inputs = build_inputs(plan, key, max_pages=3, spare_slot=3)
    assert inputs["token_ids"].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert inputs["token_slots"].tolist() == [-1, -1, -1, 0, -1, -1, -1, -1]
    assert inputs["positions"].tolist() == [4, 5, 6, 6, 0, 0, 0, 0]
    assert inputs["block_tables"].tolist() == [[9, 8, 0], [3, 4, 0], [0, 0, 0]]
    assert inputs["sequences"].tolist() == [[0, 3, 4], [3, 1, 6], [0, 0, 0]]
    assert inputs["sample_rows"].tolist() == [2, 3, 0]
    assert inputs["sample_slots"].tolist() == [3, 0, 3]
