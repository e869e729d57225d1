"""The catalog answers one question: which compiled variant runs this step?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trnc.core import Sampling, Step, StepPlan, VariantKey
from trnc.errors import EngineError

_Kind = tuple[Step, int, Sampling, bool, bool]


@dataclass(frozen=True, slots=True)
class Catalog:
    """All variants that may run, smallest bucket first."""

    keys: tuple[VariantKey, ...]
    _by_kind: dict[_Kind, list[VariantKey]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sort the keys by what they can do, so that a choice looks at the buckets only."""
        by_kind: dict[_Kind, list[VariantKey]] = {}
        for key in self.keys:
            kind = (key.step, key.depth, key.sampling, key.logprobs, key.logit_bias)
            by_kind.setdefault(kind, []).append(key)
        object.__setattr__(self, "_by_kind", by_kind)

    @classmethod
    def of(cls, keys: Iterable[VariantKey]) -> Catalog:
        """Build a catalog from the keys of a manifest, in any order."""
        return cls(tuple(sorted(keys, key=lambda k: (k.tokens, k.rows, k.logprobs, k.logit_bias))))

    def select(self, plan: StepPlan) -> VariantKey:
        """Return the smallest variant that holds the plan and has what its requests need.

        Raises:
            EngineError: no variant holds it. The scheduler's limits should make that impossible.
        """
        mode: Sampling = "greedy"
        logprobs = logit_bias = False
        tokens = 0
        for sequence in plan.sequences:
            tokens += sequence.count if plan.step == "prefill" else 1
            if sequence.sample:
                sampling = sequence.sampling
                mode = "sample" if sampling.temperature else mode
                logprobs = logprobs or (sampling.logprobs is not None and plan.step != "draft")
                logit_bias = logit_bias or bool(sampling.logit_bias)
        kind = (plan.step, plan.depth, mode, logprobs, logit_bias)
        for key in self._by_kind.get(kind, ()):
            if key.tokens >= tokens and key.rows >= len(plan.sequences):
                return key
        raise EngineError(
            f"no compiled variant runs a {plan.step} of {tokens} tokens in {len(plan.sequences)} "
            f"sequences ({mode}, logprobs={logprobs}, logit_bias={logit_bias}, depth={plan.depth})"
        )
