"""From a preset to its variant matrix: every variant that serving can ever need, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from trnc.core import Sampling, Step, VariantKey
from trnc.presets import Preset


def variant_matrix(preset: Preset) -> tuple[VariantKey, ...]:
    """Return all variants of a preset, in a fixed order.

    A feature that the preset has doubles the variants but hardly the stages: the programs with and
    without it share all but the feature's own stage.
    """
    samplings: tuple[Sampling, ...] = ("greedy", "sample")
    logprobs = (False, True) if preset.logprobs else (False,)
    logit_bias = (False, True) if preset.logit_bias else (False,)
    return tuple(
        VariantKey(step, tokens, rows, *flags, depth)
        for step, tokens, rows, depth in _buckets(preset)
        for flags in product(samplings, (False,) if step == "draft" else logprobs, logit_bias)
    )


def _buckets(preset: Preset) -> Iterator[tuple[Step, int, int, int]]:
    """Yield each step with its token rows, sequences and depth."""
    if not preset.mtp_always:
        yield from (("decode", rows, rows, 0) for rows in preset.decode_rows)
    yield from (("prefill", tokens, preset.max_rows, 0) for tokens in preset.prefill_tokens)
    depths = preset.mtp_depths[-1:] if preset.mtp_always else preset.mtp_depths
    for depth, rows in product(depths, preset.decode_rows):
        yield "draft", rows, rows, depth
        yield "verify", rows * (depth + 1), rows, depth
