"""Weights and step plans by chance: valid ones, in which every feature of a variant is used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trnc.compiler.backends.stablehlo.build import Plan
from trnc.compiler.matrix import context_buckets
from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
from trnc.equiv.draw import random_packed
from trnc.models.registry import build_stage
from trnc.models.stage import TensorSpec
from trnc.models.weights import bind_tables, bind_weights
from trnc.presets import Preset
from trnc.runtime.start import open_model


def draw_weights(plan: Plan, seed: int) -> dict[str, Tensor]:
    """Return every `weight.*` of a configuration, packed as its graphs take them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = bind_tables(plan.config.model, max_context=plan.config.preset.positions)
    for program in plan.programs.values():
        for call in program.calls:
            ports = build_stage(call.stage).inputs.values()
            for name, spec in zip(call.inputs, ports, strict=True):
                if name.startswith("weight.") and name not in tensors:
                    tensors[name] = _weight(name, spec, plan, generator)
    return tensors


def read_weights(plan: Plan, model: str) -> dict[str, Tensor]:
    """Return the same tensors as a checkpoint has them."""
    config = plan.config
    weights = open_model(model, report=print).weights
    with torch.inference_mode():
        bound = bind_weights(
            weights, config.model, config.formats, max_context=config.preset.positions
        )
        return dict(bound)


def _weight(name: str, spec: TensorSpec, plan: Plan, generator: torch.Generator) -> Tensor:
    shape = tuple(int(size) for size in spec.shape)
    if name in plan.formats:
        return random_packed(shape, plan.formats[name], generator)
    if not spec.torch_dtype.is_floating_point:  # which tokens an MTP layer's own head drafts
        return torch.randperm(plan.config.model.vocab_size, generator=generator)[: shape[0]]
    return torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)


@dataclass(frozen=True)
class Drawer:
    """Draws steps of one configuration. Slots have pages of their own: steps can follow others."""

    preset: Preset
    vocab: int
    dice: random.Random

    def first(self, key: VariantKey) -> StepPlan:
        """Return a step that gives every slot that it can a few tokens, at the start of its
        context: so few that drafts after them stay in the smallest context.
        """
        room = min(context_buckets(self.preset)) - 2 * max(self.preset.mtp_depths, default=0) - 2
        rows = min(key.rows, key.tokens)
        count = min(key.tokens // rows, room) if key.step == "prefill" else 1
        sequences = [self._sequence(key, slot, count, start=0) for slot in range(rows)]
        return StepPlan(key.step, tuple(replace(s, sample=True) for s in sequences), key.depth)

    def plan(self, key: VariantKey) -> StepPlan:
        """Return a step that fills a part of the variant."""
        rows = self.dice.randint(1, min(key.rows, key.tokens))
        slots = self.dice.sample(range(self.preset.max_rows), rows)
        counts = self._counts(key, rows)
        sequences = [self._sequence(key, s, c) for s, c in zip(slots, counts, strict=True)]
        if key.sampling == "sample":  # what is not drawn may be greedy, but not all of it
            chance = replace(sequences[0].sampling, temperature=0.9)
            sequences[0] = replace(sequences[0], sample=True, sampling=chance)
        return StepPlan(key.step, tuple(sequences), key.depth)

    def _counts(self, key: VariantKey, rows: int) -> Iterator[int]:
        """How many tokens each sequence has in the step."""
        left = key.tokens
        for row in range(rows):
            most = {"prefill": left - (rows - row - 1), "verify": key.depth + 1}.get(key.step, 1)
            most = min(most, self._longest(key))
            count = most if row == rows - 1 else self.dice.randint(1, most)
            left -= count
            yield count

    def _sequence(
        self, key: VariantKey, slot: int, count: int, start: int | None = None
    ) -> SequencePlan:
        dice, longest = self.dice, max(count, key.depth + 1)
        room = self._longest(key) - longest
        if start is None:
            # A draft stands where the device says, which its pages must hold in any case.
            start = room if key.step == "draft" else dice.randint(0, room)
        pages = 1 + slot * self.preset.max_pages
        pages_used = -(-(start + longest) // self.preset.page_size)
        sample = key.step != "prefill" or dice.random() < 0.8
        tokens = tuple(dice.choices(range(self.vocab), k=count))
        rows = count if key.step == "verify" else 1
        return SequencePlan(
            slot=slot,
            start=start,
            count=count,
            token_ids=tokens if key.step == "prefill" else None,
            pages=tuple(range(pages, pages + pages_used)),
            sample=sample,
            output_index=dice.randint(0, 50) + (start if key.step == "draft" else 0),
            sampling=self._sampling(key),
            following=None if sample else dice.randrange(self.vocab),
            masks=tuple(self._mask() for _ in range(rows)) if key.mask else (),
            counts=tuple(self._penalised(key) for _ in range(rows)) if key.penalties else (),
            targets=self._targets(count) if key.prompt_logprobs else (),
        )

    def _longest(self, key: VariantKey) -> int:
        return min(key.context, self.preset.max_context)

    def _sampling(self, key: VariantKey) -> SamplingParams:
        dice = self.dice
        biased = dice.sample(range(self.vocab), 4) if key.logit_bias else ()
        penalties = (dice.uniform(0.8, 1.4), dice.uniform(-1, 1), dice.uniform(-1, 1))
        repetition, frequency, presence = penalties if key.penalties else (1.0, 0.0, 0.0)
        return SamplingParams(
            temperature=dice.choice((0.0, 0.7, 1.2)) if key.sampling == "sample" else 0.0,
            top_k=dice.choice((0, 1, 20)),
            top_p=dice.choice((1.0, 0.9)),
            min_p=dice.choice((0.0, 0.02)),
            seed=dice.randrange(-(2**63), 2**63),
            logprobs=5 if key.logprobs else None,
            logit_bias=tuple((token, dice.uniform(-4, 4)) for token in biased),
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            prompt_logprobs=3 if key.prompt_logprobs else None,
        )

    def _mask(self) -> bytes:
        words = -(-self.vocab // 32)
        return np.array(self.dice.choices(range(-(2**31), 2**31), k=words), np.int32).tobytes()

    def _penalised(self, key: VariantKey) -> bytes:
        ids = self.dice.sample(
            range(self.vocab), self.dice.randint(1, min(key.penalties, self.vocab))
        )
        counts = self.dice.choices(range(4), k=len(ids))
        return np.array([ids, counts], np.int32).tobytes()

    def _targets(self, count: int) -> tuple[int, ...]:
        return tuple(self.dice.randrange(-1, self.vocab) for _ in range(count))
