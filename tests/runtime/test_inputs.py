"""Input tensors are filled again and again: nothing of an earlier step may be left in them."""

from __future__ import annotations

import random

import numpy as np
import torch

from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
from trnc.runtime.inputs import InputBuffers, build_inputs

ROWS, MAX_PAGES, PAGE, VOCAB = 4, 8, 4, 50
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.5, seed=7),
    SamplingParams(temperature=2.0, seed=-1, logit_bias=((3, 1.5), (9, -2.0))),
    SamplingParams(logit_bias=((1, -100.0),), repetition_penalty=1.5),
    SamplingParams(frequency_penalty=0.5, presence_penalty=-0.5),
)
MASKS = ((), (bytes(range(8)),), (bytes(8),))
COUNTS = tuple(np.array([range(n), range(7, 7 + n)], np.int32).tobytes() for n in (0, 3, 12, 5, 12))


def random_plan(pick: random.Random, key: VariantKey, tables: list[tuple[int, ...]]) -> StepPlan:
    """Return a plan that fits the variant; some of its page tables are objects of earlier plans."""
    sequences, room = [], key.tokens
    for slot in pick.sample(range(ROWS), pick.randint(1, ROWS)):
        count = 1 if key.step == "decode" else pick.randint(1, max(1, room // 2))
        pages = pick.choice(tables)
        start = pick.randint(0, len(pages) * PAGE - count) if len(pages) * PAGE > count else 0
        on_device = count == 1 and pick.random() < 0.5
        token_ids = None if on_device else tuple(pick.randrange(VOCAB) for _ in range(count))
        sample = key.step == "decode" or pick.random() < 0.5
        features = {
            "masks": pick.choice(MASKS),
            "counts": (pick.choice(COUNTS),),
            "targets": pick.choice([(), tuple(pick.randrange(-1, VOCAB) for _ in range(count))]),
        }
        index, params = pick.randrange(9), pick.choice(PARAMS)
        sequences.append(
            SequencePlan(slot, start, count, token_ids, pages, sample, index, params, **features)
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
        VariantKey("decode", ROWS, ROWS, mask=True, penalties=12),
        VariantKey("prefill", 32, ROWS, mask=True, penalties=12, prompt_logprobs=True),
    ):
        buffers = InputBuffers(key, max_pages=MAX_PAGES, spare_slot=ROWS, vocab_size=VOCAB)
        for _ in range(200):
            plan = random_plan(pick, key, tables)
            filled = buffers.fill(plan)
            new = build_inputs(plan, key, max_pages=MAX_PAGES, spare_slot=ROWS, vocab_size=VOCAB)
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
    inputs = build_inputs(plan, key, max_pages=3, spare_slot=3, vocab_size=VOCAB)
    assert inputs["token_ids"].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert inputs["token_slots"].tolist() == [-1, -1, -1, 0, -1, -1, -1, -1]
    assert inputs["positions"].tolist() == [4, 5, 6, 6, 0, 0, 0, 0]
    assert inputs["block_tables"].tolist() == [[9, 8, 0], [3, 4, 0], [0, 0, 0]]
    assert inputs["sequences"].tolist() == [[0, 3, 4], [3, 1, 6], [0, 0, 0]]
    assert inputs["sample_rows"].tolist() == [2, 3, 0]
    assert inputs["sample_slots"].tolist() == [3, 0, 3]


def test_features_fill_the_rows_of_their_sequences():
    key = VariantKey("prefill", 6, 3, mask=True, penalties=4, prompt_logprobs=True)
    counts = np.array([[7, 9], [0, 2]], np.int32).tobytes()
    penalized = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25)
    greedy = SamplingParams()
    plan = StepPlan(
        "prefill",
        (
            SequencePlan(0, 0, 2, (5, 6), (9,), False, 0, greedy, targets=(6, -1)),
            SequencePlan(
                1,
                0,
                2,
                (1, 2),
                (8,),
                True,
                0,
                penalized,
                masks=(b"\1\0\0\0" * 2,),
                counts=(counts,),
            ),
        ),
    )
    inputs = build_inputs(plan, key, max_pages=1, spare_slot=3, vocab_size=VOCAB)
    assert inputs["mask"].tolist() == [[-1, -1], [1, 1], [-1, -1]]
    assert inputs["penalty_ids"].tolist() == [[-1] * 4, [7, 9, -1, -1], [-1] * 4]
    assert inputs["penalty_counts"].tolist() == [[0] * 4, [0, 2, 0, 0], [0] * 4]
    assert inputs["repetition"].tolist() == [1, 2, 1]
    assert inputs["frequency"].tolist() == [0, 0, 0]
    assert inputs["presence"].tolist() == [0, 0.25, 0]
    assert inputs["prompt_rows"].tolist() == [0, 1, 2, 3, 4, 5]
    assert inputs["targets"].tolist() == [6, 0, 0, 0, 0, 0]


def test_each_row_of_a_verify_has_its_own_mask_and_counts():
    key = VariantKey("verify", 6, 2, mask=True, penalties=3, depth=2)
    counts = tuple(np.array([range(n), range(n)], np.int32).tobytes() for n in (1, 2, 3))
    masks = tuple(bytes([n]) + bytes(7) for n in (1, 2, 4))
    penalized = SamplingParams(presence_penalty=0.5)
    short = SequencePlan(
        1, 3, 2, (7,), (9,), True, 0, penalized, masks=masks[:2], counts=counts[:2]
    )
    whole = SequencePlan(0, 5, 3, (8,), (4, 5), True, 2, penalized, masks=masks, counts=counts)
    plan = StepPlan("verify", (short, whole), 2)
    inputs = build_inputs(plan, key, max_pages=2, spare_slot=2, vocab_size=VOCAB)
    assert inputs["mask"][:, 0].tolist() == [1, 2, -1, 1, 2, 4]
    listed = [[i for i in row if i >= 0] for row in inputs["penalty_ids"].tolist()]
    assert listed == [[0], [0, 1], [], [0], [0, 1], [0, 1, 2]]
    assert inputs["presence"].tolist() == [0.5, 0.5, 0, 0.5, 0.5, 0.5]
