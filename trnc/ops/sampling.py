"""From logits to tokens: masks, bias, penalties, picks and log-probabilities, with references.

The order is: mask -> logit_bias -> penalties (repetition, frequency, presence) -> (greedy pick) ->
temperature -> top_k -> top_p -> min_p -> Gumbel-max.
Noise is a pure function of (seed, output index, token id), so a token is a function of its own
logits and its request's parameters alone: not of the batch, nor of how the step was scheduled.

Shapes: `logits` [R, V] float; every parameter of a row is [R]. Ties, at every cut and at the final
pick, go to the lower token id. A NaN logit counts as -inf, which is never picked unless the whole
row is so: then the pick is token 0. A row whose largest logit is infinite is picked from greedily
and has NaN log-probabilities. So garbage in gives a valid id out, never a crash.

The references compute in the dtype of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trnc.ops.library import declare

# splitmix64 (Steele, Lea and Flood 2014): the increment and the two multipliers, as signed int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def apply_mask(logits: Tensor, mask: Tensor) -> Tensor:
    """Return `logits` with -inf where a bit of `mask` [R, ceil(V / 32)] int32 is 0.

    Token t is bit t % 32, counted from the lowest, of word t // 32; a row of -1 changes nothing.
    """
    result: Tensor = torch.ops.trnc.apply_mask.default(logits, mask)
    return result


def penalize(
    logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Return `logits` with the penalties of some tokens, in this order:

        repetition:  l = l / r where l > 0, else l * r   (CTRL, arXiv 1909.05858)
        frequency:   l = l - f * count
        presence:    l = l - p where count > 0

    Args:
        logits: [R, V].
        ids: [R, N] int32, each token at most once; the first negative one ends the row's list.
        counts: [R, N] int32, how often the token was output; 0 for one of the prompt alone.
        repetition: [R] f32, r > 0; 1 changes nothing.
        frequency: [R] f32, f; 0 changes nothing.
        presence: [R] f32, p; 0 changes nothing.
    """
    result: Tensor = torch.ops.trnc.penalize.default(
        logits, ids, counts, repetition, frequency, presence
    )
    return result


def logit_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return `logits` with `values` [R, B] added at `ids` [R, B] int32 (negative = unused)."""
    result: Tensor = torch.ops.trnc.logit_bias.default(logits, ids, values)
    return result


def sample_greedy(logits: Tensor) -> Tensor:
    """Return the id of each row's largest logit, [R] int64."""
    result: Tensor = torch.ops.trnc.sample_greedy.default(logits)
    return result


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_index: Tensor,
) -> Tensor:
    """Sample one id a row, [R] int64, by Gumbel-max over the tokens that pass the filters.

    Args:
        logits: [R, V].
        temperature: f32; a row with 0 gives exactly `sample_greedy`.
        top_k: int32; keep the k best, 0 or less keeps all.
        top_p: f32; keep the shortest run of best tokens whose probability, renormalised after
            top_k, reaches top_p; 1 or more keeps all. The best token always stays.
        min_p: f32; keep tokens at least min_p times as probable as the best one.
        seed: int64, the request's.
        output_index: int64, which output token of the request this is.
    """
    result: Tensor = torch.ops.trnc.sample.default(
        logits, temperature, top_k, top_p, min_p, seed, output_index
    )
    return result


def logprobs(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (natural log) of each row's chosen token and of its best ones.

    Args:
        logits: [R, V].
        chosen: [R] int64 token ids.
        top: how many of the best to list, at most V.

    Returns:
        chosen's [R]; the ids of the best [R, top] int32 and their values [R, top], best first.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.trnc.logprobs.default(logits, chosen, top)
    return result


def _apply_mask(logits: Tensor, mask: Tensor) -> Tensor:
    bits = (mask[:, :, None] >> torch.arange(32, device=mask.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, float("-inf"))


def _penalize(
    logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    vocab = logits.shape[1]
    used = (ids < 0).cumsum(dim=1) == 0
    # Unused entries go to a column of their own, which is cut off again.
    wide = torch.cat((logits, logits.new_zeros(logits.shape[0], 1)), dim=1)
    where = torch.where(used, ids, vocab).long()
    r, f, p = (x[:, None].to(logits.dtype) for x in (repetition, frequency, presence))
    x = wide.gather(1, where)
    x = torch.where(x > 0, x / r, x * r)
    x = x - f * counts
    x = torch.where(counts > 0, x - p, x)
    return wide.scatter(1, where, x)[:, :vocab].contiguous()


def _logit_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    used = ids >= 0
    return logits.scatter_add(
        1, torch.where(used, ids, 0).long(), torch.where(used, values, 0.0).to(logits.dtype)
    )


def _sample_greedy(logits: Tensor) -> Tensor:
    return _without_nan(logits).argmax(dim=-1)


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_index: Tensor,
) -> Tensor:
    x = _without_nan(logits)
    best = x.amax(dim=-1)
    random = (temperature > 0) & best.isfinite()
    divisor = torch.where(random, temperature, 1.0).to(x.dtype)
    y = _without_nan((x - best[:, None]) / divisor[:, None])
    keep = _kept(y, top_k[:, None], top_p[:, None], min_p[:, None])
    score = (y + gumbel(seed, output_index, x.shape[1], x.dtype)).masked_fill(~keep, float("-inf"))
    return torch.where(random[:, None], score, x).argmax(dim=-1)


def _kept(y: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which tokens [R, V] pass the filters; y are log weights with a maximum of 0."""
    ordered, ids = y.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(y.shape[1], device=y.device)
    weight = ordered.exp()
    within_k = (rank < top_k) | (top_k <= 0)
    mass = torch.where(within_k, weight, 0.0).to(torch.float64).cumsum(dim=-1)
    before = mass - torch.where(within_k, weight, 0.0)
    within_p = (before < top_p * mass[:, -1:]) | (top_p >= 1) | (rank == 0)
    keep = within_k & within_p & (weight >= min_p.clamp(max=1))
    return torch.zeros_like(keep).scatter(1, ids, keep)


def gumbel(seed: Tensor, output_index: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Return the noise -log(-log(u)) of each row's tokens, [R, vocab]."""
    u = uniform(seed, output_index, vocab).to(dtype)
    return -torch.log(-torch.log(u))


def uniform(seed: Tensor, output_index: Tensor, vocab: int) -> Tensor:
    """Return u in (0, 1) for each row's tokens, [R, vocab] f32: exactly what the kernels use.

    Token i takes output i of the splitmix64 stream whose state is a mix of (seed, output_index);
    u = (top 23 bits + 0.5) * 2^-23, which f32 holds exactly and which is never 0 or 1.
    """
    key = _mix(_mix(seed) + output_index * _GAMMA)
    token = torch.arange(1, vocab + 1, device=seed.device)
    bits = _shift(_mix(key[:, None] + token * _GAMMA), 41)
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def _mix(z: Tensor) -> Tensor:
    """Return the splitmix64 finaliser of int64 z (products wrap)."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right, filling with zeros: torch's own shift copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _logprobs(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    x = _without_nan(logits)
    logp = x.log_softmax(dim=-1)
    shifted = _without_nan(x - x.amax(dim=-1, keepdim=True))
    ids = shifted.argsort(dim=-1, descending=True, stable=True)[:, :top]
    return logp.gather(1, chosen[:, None]).squeeze(1), ids.to(torch.int32), logp.gather(1, ids)


def _without_nan(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits.isnan(), float("-inf"))


declare(
    "apply_mask(Tensor logits, Tensor mask) -> Tensor",
    reference=_apply_mask,
    fake=lambda logits, _: torch.empty_like(logits),
)
declare(
    "penalize(Tensor logits, Tensor ids, Tensor counts, Tensor repetition, Tensor frequency, "
    "Tensor presence) -> Tensor",
    reference=_penalize,
    fake=lambda logits, *_: torch.empty_like(logits),
)
declare(
    "logit_bias(Tensor logits, Tensor ids, Tensor values) -> Tensor",
    reference=_logit_bias,
    fake=lambda logits, *_: torch.empty_like(logits),
)
declare(
    "sample_greedy(Tensor logits) -> Tensor",
    reference=_sample_greedy,
    fake=lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64),
)
declare(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed, Tensor output_index) -> Tensor",
    reference=_sample,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
)
declare(
    "logprobs(Tensor logits, Tensor chosen, int top) -> (Tensor, Tensor, Tensor)",
    reference=_logprobs,
    fake=lambda logits, _, top: (
        logits.new_empty(logits.shape[0]),
        logits.new_empty(logits.shape[0], top, dtype=torch.int32),
        logits.new_empty(logits.shape[0], top),
    ),
)
