"""From a preset to its variant matrix: every variant that serving can ever need, and no other."""

from __future__ import annotations

from itertools import product

from trnc.core import Sampling, Step, VariantKey
from trnc.presets import Preset


def variant_matrix(preset: Preset) -> tuple[VariantKey, ...]:
    """Return all variants of a preset, in a fixed order.

    A feature that the preset has doubles the variants but hardly the stages: the programs with and
    without it share all but the feature's own stage.
    """
    buckets: list[tuple[Step, int, int]] = [("decode", r, r) for r in preset.decode_rows]
    buckets += [("prefill", tokens, preset.max_rows) for tokens in preset.prefill_tokens]
    samplings: tuple[Sampling, ...] = ("greedy", "sample")
    logprobs = (False, True) if preset.logprobs else (False,)
    logit_bias = (False, True) if preset.logit_bias else (False,)
    return tuple(
        VariantKey(*bucket, *flags)
        for bucket, flags in product(buckets, product(samplings, logprobs, logit_bias))
    )
