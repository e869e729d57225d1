"""The catalog answers one question: which compiled variant runs this step?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trnc.core import StepPlan, VariantKey
from trnc.errors import EngineError


@dataclass(frozen=True, slots=True)
class Catalog:
    """All variants that may run, smallest bucket first."""

    keys: tuple[VariantKey, ...]

    @classmethod
    def of(cls, keys: Iterable[VariantKey]) -> Catalog:
        """Build a catalog from the keys of a manifest, in any order."""
        return cls(tuple(sorted(keys, key=lambda k: (k.tokens, k.rows, k.logprobs, k.logit_bias))))

    def select(self, plan: StepPlan) -> VariantKey:
        """Return the smallest variant that holds the plan and has what its requests need.

        Raises:
            EngineError: no variant holds it. The scheduler's limits should make that impossible.
        """
        sampling = [s.sampling for s in plan.sequences if s.sample]
        mode = "sample" if any(s.mode == "sample" for s in sampling) else "greedy"
        logprobs = any(s.logprobs is not None for s in sampling)
        logit_bias = any(s.logit_bias for s in sampling)
        tokens = sum(s.count for s in plan.sequences)
        for key in self.keys:
            if (
                key.step == plan.step
                and key.tokens >= tokens
                and key.rows >= len(plan.sequences)
                and key.sampling == mode
                and key.logprobs == logprobs
                and key.logit_bias == logit_bias
            ):
                return key
        raise EngineError(
            f"no compiled variant runs a {plan.step} of {tokens} tokens in {len(plan.sequences)} "
            f"sequences ({mode}, logprobs={logprobs}, logit_bias={logit_bias})"
        )
