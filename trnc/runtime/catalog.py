"""The catalog answers one question: which compiled variant runs this step?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trnc.core import Sampling, Step, StepPlan, VariantKey
from trnc.errors import EngineError
from trnc.runtime.inputs import PAIR_BYTES


class Needs(NamedTuple):
    """What the requests of a plan need of its variant. `penalties` is a size that there is."""

    step: Step
    depth: int
    sampling: Sampling
    logprobs: bool
    logit_bias: bool
    mask: bool
    prompt_logprobs: bool
    penalties: int

    def met_by(self, key: VariantKey) -> bool:
        """Whether a variant has all of it; what it has beside that gets neutral inputs."""
        flags = ("logprobs", "logit_bias", "mask", "prompt_logprobs")
        same = (key.step, key.depth, key.sampling) == (self.step, self.depth, self.sampling)
        has_all = all(getattr(key, flag) >= getattr(self, flag) for flag in flags)
        return same and has_all and key.penalties >= self.penalties


@dataclass(frozen=True, slots=True)
class Catalog:
    """All variants that may run, the smallest and plainest first."""

    keys: tuple[VariantKey, ...]
    penalty_sizes: tuple[int, ...]
    _meeting: dict[Needs, list[VariantKey]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @classmethod
    def of(cls, keys: Iterable[VariantKey]) -> Catalog:
        """Build a catalog from the keys of a manifest, in any order."""

        def cost(key: VariantKey) -> tuple[int, ...]:
            extra = (key.prompt_logprobs, key.penalties, key.mask, key.logprobs, key.logit_bias)
            return (key.tokens, key.rows, key.context, *extra)

        ordered = sorted(keys, key=cost)
        return cls(tuple(ordered), tuple(sorted({key.penalties for key in ordered})))

    def select(self, plan: StepPlan) -> VariantKey:
        """Return the smallest variant that holds the plan and has what its requests need.

        Raises:
            EngineError: no variant holds it. The scheduler's limits should make that impossible.
        """
        tokens = sum(s.count if plan.step == "prefill" else 1 for s in plan.sequences)
        context = max((s.start + max(s.count, plan.depth) for s in plan.sequences), default=0)
        needs = _needs(plan, self.penalty_sizes)
        for key in self._that_meet(needs):
            holds = key.tokens >= tokens and key.rows >= len(plan.sequences)
            if holds and (key.context == 0 or key.context >= context):
                return key
        raise EngineError(
            f"no compiled variant runs a {plan.step} of {tokens} tokens in {len(plan.sequences)} "
            f"sequences ({needs})"
        )

    def _that_meet(self, needs: Needs) -> list[VariantKey]:
        """Needs are few and come again with every step, so each is looked for once."""
        if needs not in self._meeting:
            self._meeting[needs] = [key for key in self.keys if needs.met_by(key)]
        return self._meeting[needs]


def _needs(plan: StepPlan, penalty_sizes: tuple[int, ...]) -> Needs:
    mode: Sampling = "greedy"
    logprobs = logit_bias = mask = prompt_logprobs = False
    penalized = 0
    for sequence in plan.sequences:
        prompt_logprobs = prompt_logprobs or bool(sequence.targets)
        if sequence.sample:
            sampling = sequence.sampling
            mode = "sample" if sampling.temperature else mode
            logprobs = logprobs or (sampling.logprobs is not None and plan.step != "draft")
            logit_bias = logit_bias or bool(sampling.logit_bias)
            mask = mask or bool(sequence.masks)
            penalized = max(penalized, *(len(c) // PAIR_BYTES for c in sequence.counts), 0)
    size = next((size for size in penalty_sizes if size >= penalized), penalized)
    return Needs(plan.step, plan.depth, mode, logprobs, logit_bias, mask, prompt_logprobs, size)
