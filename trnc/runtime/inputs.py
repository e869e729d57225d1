"""From a step plan to the input tensors of its variant: padding, block tables, sampling inputs.

Padding is data that computes nothing that matters: padded token rows belong to no sequence,
unused sequences have a count of 0 and name page 0, and rows that do not sample name the spare slot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trnc.core import MAX_LOGIT_BIAS, SamplingParams, StepPlan, VariantKey

Inputs = dict[str, Tensor]


def build_inputs(plan: StepPlan, key: VariantKey, *, max_pages: int, spare_slot: int) -> Inputs:
    """Return the tensors of every `input.*` that the variant's program reads, by bare name."""
    arrays = _layout(plan, key, max_pages=max_pages, spare_slot=spare_slot)
    if key.sampling == "sample":
        arrays |= _sampling(plan, key.rows)
    if key.logit_bias:
        arrays |= _logit_bias(plan, key.rows)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _layout(
    plan: StepPlan, key: VariantKey, *, max_pages: int, spare_slot: int
) -> dict[str, np.ndarray]:
    token_ids = np.zeros(key.tokens, np.int64)
    token_slots = np.full(key.tokens, -1, np.int64)
    positions = np.zeros(key.tokens, np.int64)
    block_tables = np.zeros((key.rows, max_pages), np.int32)
    sequences = np.zeros((key.rows, 3), np.int32)
    sample_rows = np.zeros(key.rows, np.int64)
    sample_slots = np.full(key.rows, spare_slot, np.int64)
    first = 0
    for row, sequence in enumerate(plan.sequences):
        rows = slice(first, first + sequence.count)
        if sequence.token_ids is None:
            token_slots[rows] = sequence.slot
        else:
            token_ids[rows] = sequence.token_ids
        positions[rows] = np.arange(sequence.start, sequence.start + sequence.count)
        block_tables[row, : len(sequence.pages)] = sequence.pages
        sequences[row] = (first, sequence.count, sequence.start)
        sample_rows[row] = first + sequence.count - 1
        if sequence.sample:
            sample_slots[row] = sequence.slot
        first += sequence.count
    return {
        "token_ids": token_ids,
        "token_slots": token_slots,
        "positions": positions,
        "block_tables": block_tables,
        "sequences": sequences,
        "sample_rows": sample_rows,
        "sample_slots": sample_slots,
    }


def _sampling(plan: StepPlan, rows: int) -> dict[str, np.ndarray]:
    """Sampling inputs; unused rows and rows that do not sample are greedy."""
    used = [s.sampling if s.sample else SamplingParams() for s in plan.sequences]
    params = used + [SamplingParams()] * (rows - len(used))
    indexes = [s.output_index for s in plan.sequences] + [0] * (rows - len(used))
    return {
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seed": np.array([p.seed for p in params], np.int64),
        "output_index": np.array(indexes, np.int64),
    }


def _logit_bias(plan: StepPlan, rows: int) -> dict[str, np.ndarray]:
    ids = np.full((rows, MAX_LOGIT_BIAS), -1, np.int32)
    values = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
    for row, sequence in enumerate(plan.sequences):
        for i, (token, value) in enumerate(sequence.sampling.logit_bias):
            ids[row, i], values[row, i] = token, value
    return {"bias_ids": ids, "bias_values": values}
