"""From a step plan to the input tensors of its variant: padding, block tables, sampling inputs.

Padding is data that computes nothing that matters: padded token rows belong to no sequence,
unused sequences have a count of 0 and name page 0, and rows that do not sample name the spare slot.

The tensors of a variant are allocated once and filled for each step. What most steps leave as it
was, a row's pages and sampling parameters, is written only where the plan has another object.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trnc.core import MAX_LOGIT_BIAS, SamplingParams, SequencePlan, StepPlan, VariantKey

Inputs = dict[str, Tensor]

_GREEDY = SamplingParams()


def build_inputs(plan: StepPlan, key: VariantKey, *, max_pages: int, spare_slot: int) -> Inputs:
    """Return new tensors of every `input.*` that the variant's program reads, by bare name."""
    return InputBuffers(key, max_pages=max_pages, spare_slot=spare_slot).fill(plan)


class InputBuffers:
    """The input tensors of one variant. They must not be filled while a step reads them."""

    def __init__(self, key: VariantKey, *, max_pages: int, spare_slot: int) -> None:
        self._layout = _Layout(key, max_pages=max_pages, spare_slot=spare_slot)
        self._sampling = _Sampling(key.rows) if key.sampling == "sample" else None
        self._bias = _LogitBias(key.rows) if key.logit_bias else None
        parts = [part for part in (self._layout, self._sampling, self._bias) if part is not None]
        self._tensors = {
            name: torch.from_numpy(array)
            for part in parts
            for name, array in vars(part).items()
            if isinstance(array, np.ndarray)
        }

    def fill(self, plan: StepPlan) -> Inputs:
        """Write the inputs of a plan and return the tensors, the same ones each time."""
        self._layout.fill(plan)
        if self._sampling is not None:
            self._sampling.fill(plan)
        if self._bias is not None:
            self._bias.fill(plan)
        return self._tensors


class _Layout:
    """Which tokens are computed, at which positions, over which pages."""

    def __init__(self, key: VariantKey, *, max_pages: int, spare_slot: int) -> None:
        self.token_ids = np.zeros(key.tokens, np.int64)
        self.token_slots = np.full(key.tokens, -1, np.int64)
        self.positions = np.zeros(key.tokens, np.int64)
        self.block_tables = np.zeros((key.rows, max_pages), np.int32)
        self.sequences = np.zeros((key.rows, 3), np.int32)
        self.sample_rows = np.zeros(key.rows, np.int64)
        self.sample_slots = np.full(key.rows, spare_slot, np.int64)
        self._spare_slot = spare_slot
        self._pages: list[tuple[int, ...]] = [()] * key.rows  # what each row of the tables has

    def fill(self, plan: StepPlan) -> None:
        first = 0
        shapes, rows, slots = [], [], []
        for row, sequence in enumerate(plan.sequences):
            self._fill_tokens(sequence, first)
            self._fill_pages(row, sequence.pages)
            shapes.append((first, sequence.count, sequence.start))
            first += sequence.count
            rows.append(first - 1)
            slots.append(sequence.slot if sequence.sample else self._spare_slot)
        used = len(rows)
        self.sequences[:used], self.sequences[used:] = shapes, 0
        self.sample_rows[:used], self.sample_rows[used:] = rows, 0
        self.sample_slots[:used], self.sample_slots[used:] = slots, self._spare_slot
        self.token_ids[first:], self.token_slots[first:], self.positions[first:] = 0, -1, 0
        for row in range(used, len(self._pages)):
            self._fill_pages(row, ())

    def _fill_tokens(self, sequence: SequencePlan, first: int) -> None:
        token_ids = sequence.token_ids
        if sequence.count == 1:  # scalars are cheaper than slices
            self.token_ids[first] = 0 if token_ids is None else token_ids[0]
            self.token_slots[first] = sequence.slot if token_ids is None else -1
            self.positions[first] = sequence.start
            return
        assert token_ids is not None, "one token at most is read from the device"
        rows = slice(first, first + sequence.count)
        self.token_ids[rows] = token_ids
        self.token_slots[rows] = -1
        self.positions[rows] = np.arange(sequence.start, sequence.start + sequence.count)

    def _fill_pages(self, row: int, pages: tuple[int, ...]) -> None:
        if self._pages[row] is not pages:
            self._pages[row] = pages
            self.block_tables[row, : len(pages)] = pages
            self.block_tables[row, len(pages) :] = 0


class _Sampling:
    """Sampling inputs; unused rows and rows that do not sample are greedy."""

    def __init__(self, rows: int) -> None:
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.output_index = np.zeros(rows, np.int64)
        self._params = [_GREEDY] * rows

    def fill(self, plan: StepPlan) -> None:
        used = len(plan.sequences)
        for row, sequence in enumerate(plan.sequences):
            self._fill_row(row, sequence.sampling if sequence.sample else _GREEDY)
            self.output_index[row] = sequence.output_index
        for row in range(used, len(self._params)):
            self._fill_row(row, _GREEDY)
        self.output_index[used:] = 0

    def _fill_row(self, row: int, params: SamplingParams) -> None:
        if self._params[row] is not params:
            self._params[row] = params
            self.temperature[row] = params.temperature
            self.top_k[row] = params.top_k
            self.top_p[row] = params.top_p
            self.min_p[row] = params.min_p
            self.seed[row] = params.seed


class _LogitBias:
    """What is added to the logits; unused entries name the token -1."""

    def __init__(self, rows: int) -> None:
        self.bias_ids = np.full((rows, MAX_LOGIT_BIAS), -1, np.int32)
        self.bias_values = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
        self._biases: list[tuple[tuple[int, float], ...]] = [()] * rows

    def fill(self, plan: StepPlan) -> None:
        for row, sequence in enumerate(plan.sequences):
            self._fill_row(row, sequence.sampling.logit_bias)
        for row in range(len(plan.sequences), len(self._biases)):
            self._fill_row(row, ())

    def _fill_row(self, row: int, bias: tuple[tuple[int, float], ...]) -> None:
        if self._biases[row] is not bias:
            self._biases[row] = bias
            self.bias_ids[row], self.bias_values[row] = -1, 0
            for i, (token, value) in enumerate(bias):
                self.bias_ids[row, i], self.bias_values[row, i] = token, value
