"""From a preset to its variant matrix: every variant that serving can ever need, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from trnc.core import Sampling, Step, VariantKey
from trnc.presets import Preset


def variant_matrix(preset: Preset, contexts: tuple[int, ...] = (0,)) -> tuple[VariantKey, ...]:
    """Return all variants of a preset, in a fixed order, at each context bucket.

    A feature that the preset has adds variants but hardly stages: the programs with and without it
    share all but the feature's own stage.
    """
    samplings: tuple[Sampling, ...] = ("greedy", "sample")
    logprobs = (False, True) if preset.logprobs else (False,)
    plain = (
        VariantKey(step, tokens, rows, sampling, scores, bias, depth, mask, penalties)
        for step, tokens, rows, depth in _buckets(preset)
        for sampling, scores, (bias, mask, penalties) in product(
            samplings,
            (False,) if step == "draft" else logprobs,
            _draft_shapings(preset) if step == "draft" else _shapings(preset),
        )
    )
    keys = (*plain, *_prompt_variants(preset))
    return tuple(replace(key, context=context) for key in keys for context in contexts)


def _buckets(preset: Preset) -> Iterator[tuple[Step, int, int, int]]:
    """Yield each step with its token rows, sequences and depth."""
    if not preset.mtp_always:
        yield from (("decode", rows, rows, 0) for rows in preset.decode_rows)
    yield from (("prefill", tokens, preset.max_rows, 0) for tokens in preset.prefill_tokens)
    depths = preset.mtp_depths[-1:] if preset.mtp_always else preset.mtp_depths
    for depth, rows in product(depths, preset.decode_rows):
        yield "draft", rows, rows, depth
        yield "verify", rows * (depth + 1), rows, depth


def _shapings(preset: Preset) -> Iterator[tuple[bool, bool, int]]:
    """Yield what may be done to logits: (logit_bias, mask, penalties).

    Each has all that the one before has, with neutral inputs where no request uses it: so features
    add variants instead of multiplying them.
    """
    yield from _draft_shapings(preset)
    for size in preset.penalty_sizes:
        yield preset.logit_bias, preset.masks, size


def _draft_shapings(preset: Preset) -> Iterator[tuple[bool, bool, int]]:
    """A mask is of the first draft: the others, and penalties, follow what is not known yet."""
    yield False, False, 0
    if preset.logit_bias:
        yield True, False, 0
    if preset.masks:
        yield preset.logit_bias, True, 0


def _prompt_variants(preset: Preset) -> Iterator[VariantKey]:
    """Yield the prefills that also score the prompt; they are rare, so they have all the rest."""
    if not preset.prompt_logprobs:
        return
    *_, (bias, mask, penalties) = _shapings(preset)
    samplings: tuple[Sampling, ...] = ("greedy", "sample")
    for tokens, sampling in product(preset.prefill_tokens, samplings):
        yield VariantKey(
            "prefill",
            tokens,
            preset.max_rows,
            sampling,
            preset.logprobs,
            bias,
            mask=mask,
            penalties=penalties,
            prompt_logprobs=True,
        )


def context_buckets(preset: Preset) -> tuple[int, ...]:
    """Return the context buckets of a backend that needs them, ascending, in whole pages.

    The last one is the longest context. The preset may name others; by default there is one more, a
    quarter of it, where that is at least 256 tokens.
    """
    full = preset.max_pages * preset.page_size
    quarter = full // 4 // preset.page_size * preset.page_size
    wanted = preset.trainium.context_buckets or ((quarter,) if quarter >= 256 else ())
    return (*(context for context in wanted if context < full), full)
