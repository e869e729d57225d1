"""From a step plan to the input tensors of its variant: padding, block tables, sampling inputs.

Padding is data that computes nothing that matters: padded token rows belong to no sequence,
unused sequences have a count of 0 and name page 0, and rows that do not sample name the spare slot.

The tensors of a variant are allocated once and filled for each step. What most steps leave as it
was, a row's pages and sampling parameters, is written only where the plan has another object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trnc.core import MAX_LOGIT_BIAS, SamplingParams, SequencePlan, StepPlan, VariantKey

Inputs = dict[str, Tensor]

PAIR_BYTES = 8  # of each of `SequencePlan.counts`: an id and a count
_GREEDY = SamplingParams()


def build_inputs(
    plan: StepPlan,
    key: VariantKey,
    *,
    max_pages: int,
    spare_slot: int,
    vocab_size: int,
    speculates: bool = False,
) -> Inputs:
    """Return new tensors of every `input.*` that the variant's program reads, by bare name."""
    buffers = InputBuffers(
        key,
        max_pages=max_pages,
        spare_slot=spare_slot,
        vocab_size=vocab_size,
        speculates=speculates,
    )
    return buffers.fill(plan)


class InputBuffers:
    """The input tensors of one variant. They must not be filled while a step reads them.

    `spare_slot` is the last slot of the device state. With `speculates` the programs keep what a
    draft needs.
    """

    def __init__(
        self,
        key: VariantKey,
        *,
        max_pages: int,
        spare_slot: int,
        vocab_size: int,
        speculates: bool = False,
    ) -> None:
        slots = spare_slot + 1
        parts: list[_Part] = [_BlockTables(key.rows, max_pages)]
        parts.append(_Draft(key, slots=slots) if key.step == "draft" else _Layout(key, slots=slots))
        if speculates and key.step != "draft":
            parts.append(_Following(key))
        if key.sampling == "sample":
            parts.append(_Sampling(key))
        if key.mask:
            parts.append(_Mask(key, vocab_size))
        if key.logit_bias:
            parts.append(_LogitBias(key))
        if key.penalties:
            parts.append(_Penalties(key))
        if key.prompt_logprobs:
            parts.append(_PromptLogprobs(key))
        self._parts = parts
        self._tensors = {
            name: torch.from_numpy(array) for part in parts for name, array in _arrays(part)
        }

    def fill(self, plan: StepPlan) -> Inputs:
        """Write the inputs of a plan and return the tensors, the same ones each time."""
        for part in self._parts:
            part.fill(plan)
        return self._tensors


class _Part(Protocol):
    """Some inputs of a variant: attributes that are arrays, or lists of them, are tensors."""

    def fill(self, plan: StepPlan) -> None: ...


def _arrays(part: _Part) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, value in vars(part).items():
        if isinstance(value, np.ndarray):
            yield name, value
        elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            yield from ((f"{name}.{index}", array) for index, array in enumerate(value))


def logit_rows(plan: StepPlan) -> Iterator[tuple[int, SequencePlan, int]]:
    """Yield the rows of logits that count: the row, its sequence, and how many tokens of the step
    come before it.
    """
    if plan.step != "verify":
        yield from ((row, sequence, 0) for row, sequence in enumerate(plan.sequences))
        return
    for index, sequence in enumerate(plan.sequences):
        first = index * (plan.depth + 1)
        yield from ((first + offset, sequence, offset) for offset in range(sequence.count))


class _BlockTables:
    """Which pages each sequence has; row r of the others names page 0."""

    def __init__(self, rows: int, max_pages: int) -> None:
        self.block_tables = np.zeros((rows, max_pages), np.int32)
        self._pages: list[tuple[int, ...]] = [()] * rows  # what each row of the tables has

    def fill(self, plan: StepPlan) -> None:
        for row, sequence in enumerate(plan.sequences):
            self._fill_row(row, sequence.pages)
        for row in range(len(plan.sequences), len(self._pages)):
            self._fill_row(row, ())

    def _fill_row(self, row: int, pages: tuple[int, ...]) -> None:
        if self._pages[row] is not pages:
            self._pages[row] = pages
            pages = pages[: self.block_tables.shape[1]]  # a context bucket's table is narrower
            self.block_tables[row, : len(pages)] = pages
            self.block_tables[row, len(pages) :] = 0


class _Layout:
    """Which tokens are computed, at which positions, and which rows sample into which slot.

    Sequences follow each other without gaps; those of a verify begin `depth + 1` rows apart.
    """

    def __init__(self, key: VariantKey, *, slots: int) -> None:
        self.token_ids = np.zeros(key.tokens, np.int64)
        self.token_slots = np.full(key.tokens, -1, np.int64)
        self.positions = np.zeros(key.tokens, np.int64)
        self.sequences = np.zeros((key.rows, 3), np.int32)
        self.sample_rows = np.arange(key.logit_rows)
        self.sample_slots = np.full(key.rows, slots - 1, np.int64)
        self._slots = slots
        self._stride = key.depth + 1 if key.step == "verify" else 0

    def fill(self, plan: StepPlan) -> None:
        first = 0
        shapes, rows, slots = [], [], []
        for index, sequence in enumerate(plan.sequences):
            first = index * self._stride if self._stride else first
            self._fill_tokens(sequence, first)
            shapes.append((first, sequence.count, sequence.start))
            first += sequence.count
            rows.append(first - 1)
            slots.append(sequence.slot if sequence.sample else self._slots - 1)
        used = len(rows)
        self.sequences[:used], self.sequences[used:] = shapes, 0
        self.sample_slots[:used], self.sample_slots[used:] = slots, self._slots - 1
        if not self._stride:
            self.sample_rows[:used], self.sample_rows[used:] = rows, 0
        self._clear(first, None)

    def _fill_tokens(self, sequence: SequencePlan, first: int) -> None:
        token_ids = sequence.token_ids
        if self._stride or sequence.count == 1:  # scalars are cheaper than slices
            named = token_ids or ()
            for depth in range(sequence.count):
                row, known = first + depth, depth < len(named)
                self.token_ids[row] = named[depth] if known else 0
                self.token_slots[row] = -1 if known else depth * self._slots + sequence.slot
                self.positions[row] = sequence.start + depth
            if self._stride:
                self._clear(first + sequence.count, first + self._stride)
            return
        assert token_ids is not None, "a prefill names its tokens"
        rows = slice(first, first + sequence.count)
        self.token_ids[rows] = token_ids
        self.token_slots[rows] = -1
        self.positions[rows] = np.arange(sequence.start, sequence.start + sequence.count)

    def _clear(self, first: int, end: int | None) -> None:
        rows = slice(first, end)
        self.token_ids[rows], self.token_slots[rows], self.positions[rows] = 0, -1, 0


class _Draft:
    """Which slots draft, and where the drafts go. Positions are the device's own."""

    def __init__(self, key: VariantKey, *, slots: int) -> None:
        self.slots = np.full(key.rows, slots - 1, np.int64)
        self.active = np.zeros(key.rows, np.int32)
        self.output_offset = np.zeros(key.rows, np.int64)
        self.own_rows = np.arange(key.rows)
        self.draft_slots = [np.zeros(key.rows, np.int64) for _ in range(key.depth)]
        self._slots = slots

    def fill(self, plan: StepPlan) -> None:
        used = len(plan.sequences)
        self.slots[:used] = [sequence.slot for sequence in plan.sequences]
        self.slots[used:] = self._slots - 1
        self.active[:used], self.active[used:] = 1, 0
        self.output_offset[:used] = [s.output_index - s.start for s in plan.sequences]
        for depth, slots in enumerate(self.draft_slots, start=1):
            slots[:] = self.slots + depth * self._slots


class _Following:
    """The token after each row: known already, or the one that a row of this step picks.

    The last known token of a sequence is followed by its first pick, a draft by the next pick.
    """

    def __init__(self, key: VariantKey) -> None:
        self.next_ids = np.zeros(key.tokens, np.int64)
        self.next_rows = np.full(key.tokens, -1, np.int64)
        self.lengths = np.zeros(key.rows, np.int64)
        if key.step == "verify":
            self.next_rows[:] = np.arange(key.tokens)

    def fill(self, plan: StepPlan) -> None:
        if plan.step == "verify":
            return
        first = 0
        for row, sequence in enumerate(plan.sequences):
            last = first + sequence.count - 1
            if sequence.token_ids is not None:
                self.next_ids[first:last] = sequence.token_ids[1:]
            self.next_rows[first:last] = -1
            self.next_ids[last] = sequence.following or 0
            self.next_rows[last] = row if sequence.following is None else -1
            self.lengths[row] = sequence.start + sequence.count
            first = last + 1


class _Sampling:
    """Sampling inputs; unused rows and rows that do not sample are greedy.

    In a draft the output index is the device's own.
    """

    def __init__(self, key: VariantKey) -> None:
        rows = key.logit_rows
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.output_index = np.zeros(rows, np.int64)
        self._params = [_GREEDY] * rows

    def fill(self, plan: StepPlan) -> None:
        unused = set(range(len(self._params)))
        for row, sequence, offset in logit_rows(plan):
            self._fill_row(row, sequence.sampling if sequence.sample else _GREEDY)
            self.output_index[row] = sequence.output_index + offset
            unused.remove(row)
        for row in unused:
            self._fill_row(row, _GREEDY)
            self.output_index[row] = 0

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

    def __init__(self, key: VariantKey) -> None:
        rows = key.logit_rows
        self.bias_ids = np.full((rows, MAX_LOGIT_BIAS), -1, np.int32)
        self.bias_values = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
        self._biases: list[tuple[tuple[int, float], ...]] = [()] * rows

    def fill(self, plan: StepPlan) -> None:
        unused = set(range(len(self._biases)))
        for row, sequence, _ in logit_rows(plan):
            self._fill_row(row, sequence.sampling.logit_bias)
            unused.remove(row)
        for row in unused:
            self._fill_row(row, ())

    def _fill_row(self, row: int, bias: tuple[tuple[int, float], ...]) -> None:
        if self._biases[row] is not bias:
            self._biases[row] = bias
            self.bias_ids[row], self.bias_values[row] = -1, 0
            for i, (token, value) in enumerate(bias):
                self.bias_ids[row, i], self.bias_values[row, i] = token, value


class _Mask:
    """Which tokens may be picked, as packed bits; a row of ones allows all."""

    def __init__(self, key: VariantKey, vocab_size: int) -> None:
        self.mask = np.full((key.logit_rows, -(-vocab_size // 32)), -1, np.int32)
        self._masks = [b""] * key.logit_rows

    def fill(self, plan: StepPlan) -> None:
        unused = set(range(len(self._masks)))
        for row, sequence, offset in logit_rows(plan):
            self._fill_row(row, sequence.masks[offset] if sequence.masks else b"")
            unused.remove(row)
        for row in unused:
            self._fill_row(row, b"")

    def _fill_row(self, row: int, mask: bytes) -> None:
        if self._masks[row] is not mask:
            self._masks[row] = mask
            self.mask[row] = np.frombuffer(mask, np.int32) if mask else -1


class _Penalties:
    """Which tokens are penalised, and how; the first id of -1 ends the list of a row."""

    def __init__(self, key: VariantKey) -> None:
        rows = key.logit_rows
        self.penalty_ids = np.full((rows, key.penalties), -1, np.int32)
        self.penalty_counts = np.zeros((rows, key.penalties), np.int32)
        self.repetition = np.ones(rows, np.float32)
        self.frequency = np.zeros(rows, np.float32)
        self.presence = np.zeros(rows, np.float32)
        self._counts = [b""] * rows
        self._params = [_GREEDY] * rows

    def fill(self, plan: StepPlan) -> None:
        unused = set(range(len(self._counts)))
        for row, sequence, offset in logit_rows(plan):
            self._fill_counts(row, sequence.counts[offset] if sequence.counts else b"")
            self._fill_params(row, sequence.sampling)
            unused.remove(row)
        for row in unused:
            self._fill_counts(row, b"")
            self._fill_params(row, _GREEDY)

    def _fill_counts(self, row: int, counts: bytes) -> None:
        before = self._counts[row]
        if before is not counts:
            self._counts[row] = counts
            ids, numbers = np.frombuffer(counts, np.int32).reshape(2, -1)
            self.penalty_ids[row, : len(ids)] = ids
            self.penalty_counts[row, : len(ids)] = numbers
            was = len(before) // PAIR_BYTES
            self.penalty_ids[row, len(ids) : was] = -1
            self.penalty_counts[row, len(ids) : was] = 0

    def _fill_params(self, row: int, params: SamplingParams) -> None:
        if self._params[row] is not params:
            self._params[row] = params
            self.repetition[row] = params.repetition_penalty
            self.frequency[row] = params.frequency_penalty
            self.presence[row] = params.presence_penalty


class _PromptLogprobs:
    """The token that follows each token row; 0 where nobody asks."""

    def __init__(self, key: VariantKey) -> None:
        self.prompt_rows = np.arange(key.tokens, dtype=np.int64)
        self.targets = np.zeros(key.tokens, np.int64)

    def fill(self, plan: StepPlan) -> None:
        self.targets[:] = 0
        first = 0
        for sequence in plan.sequences:
            if sequence.targets:
                wanted = np.maximum(sequence.targets, 0)
                self.targets[first : first + sequence.count] = wanted
            first += sequence.count
