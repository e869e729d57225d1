"""From a preset to its variant matrix: every variant that serving can ever need, and no other."""

from __future__ import annotations

from itertools import product

from trnc.core import VariantKey
from trnc.presets import Preset


def variant_matrix(preset: Preset) -> tuple[VariantKey, ...]:
    """Return all variants of a preset, in a fixed order.

    A feature that the preset has doubles the variants but hardly the stages: the programs with and
    without it share all but the feature's own stage.
    """
    sizes = [("decode", rows, rows) for rows in preset.decode_rows]
    sizes += [("prefill", tokens, preset.max_rows) for tokens in preset.prefill_tokens]
    logprobs = (False, True) if preset.logprobs else (False,)
    logit_bias = (False, True) if preset.logit_bias else (False,)
    return tuple(
        VariantKey(step, tokens, rows, sampling, with_logprobs, with_bias)
        for (step, tokens, rows), sampling, with_logprobs, with_bias in product(
            sizes, ("greedy", "sample"), logprobs, logit_bias
        )
    )
