"""From logits to tokens, as stages shared by every model. The order is DESIGN §5."""

from __future__ import annotations

from torch import Tensor

from trnc import ops
from trnc.core import MAX_LOGIT_BIAS, MAX_LOGPROBS
from trnc.models.stage import Stage, StageSpec, TensorSpec


def logit_bias_stage(spec: StageSpec) -> Stage:
    """Add up to MAX_LOGIT_BIAS sparse biases a row; an id of -1 is unused."""

    def logit_bias(logits: Tensor, bias_ids: Tensor, bias_values: Tensor) -> tuple[Tensor]:
        return (ops.logit_bias(logits, bias_ids, bias_values),)

    inputs = {
        "logits": _logits(spec),
        "bias_ids": TensorSpec((spec.rows, MAX_LOGIT_BIAS), "int32"),
        "bias_values": TensorSpec((spec.rows, MAX_LOGIT_BIAS)),
    }
    return Stage(function=logit_bias, inputs=inputs, outputs=("logits",))


def mask_stage(spec: StageSpec) -> Stage:
    """Make the logits of the tokens that a row's mask leaves out -inf."""

    def mask(logits: Tensor, mask: Tensor) -> tuple[Tensor]:
        return (ops.apply_mask(logits, mask),)

    words = -(-spec.model.vocab_size // 32)
    inputs = {"logits": _logits(spec), "mask": TensorSpec((spec.rows, words), "int32")}
    return Stage(function=mask, inputs=inputs, outputs=("logits",))


def penalties_stage(spec: StageSpec) -> Stage:
    """Repetition, frequency and presence penalties of up to `spec.entries` tokens a row."""

    def penalties(
        logits: Tensor,
        penalty_ids: Tensor,
        penalty_counts: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
    ) -> tuple[Tensor]:
        return (ops.penalize(logits, penalty_ids, penalty_counts, repetition, frequency, presence),)

    inputs = {
        "logits": _logits(spec),
        "penalty_ids": TensorSpec((spec.rows, spec.entries), "int32"),
        "penalty_counts": TensorSpec((spec.rows, spec.entries), "int32"),
        "repetition": TensorSpec((spec.rows,)),
        "frequency": TensorSpec((spec.rows,)),
        "presence": TensorSpec((spec.rows,)),
    }
    return Stage(function=penalties, inputs=inputs, outputs=("logits",))


def greedy_stage(spec: StageSpec) -> Stage:
    """Pick the highest logit of each row, the lowest id among equals."""

    def greedy(logits: Tensor) -> tuple[Tensor]:
        return (ops.sample_greedy(logits),)

    return Stage(function=greedy, inputs={"logits": _logits(spec)}, outputs=("tokens",))


def sample_stage(spec: StageSpec) -> Stage:
    """Temperature, top-k, top-p, min-p, then Gumbel-max; a row at temperature 0 is greedy."""

    def sample(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        output_index: Tensor,
    ) -> tuple[Tensor]:
        return (ops.sample(logits, temperature, top_k, top_p, min_p, seed, output_index),)

    row = (spec.rows,)
    inputs = {
        "logits": _logits(spec),
        "temperature": TensorSpec(row),
        "top_k": TensorSpec(row, "int32"),
        "top_p": TensorSpec(row),
        "min_p": TensorSpec(row),
        "seed": TensorSpec(row, "int64"),
        "output_index": TensorSpec(row, "int64"),
    }
    return Stage(function=sample, inputs=inputs, outputs=("tokens",))


def logprobs_stage(spec: StageSpec) -> Stage:
    """Log-softmax of the raw logits at the chosen tokens, and the MAX_LOGPROBS best of each row."""

    top = min(MAX_LOGPROBS, spec.model.vocab_size)

    def logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.logprobs(logits, tokens, top)

    inputs = {"logits": _logits(spec), "tokens": TensorSpec((spec.rows,), "int64")}
    return Stage(function=logprobs, inputs=inputs, outputs=("logprob", "top_ids", "top_logprobs"))


def _logits(spec: StageSpec) -> TensorSpec:
    return TensorSpec((spec.rows, spec.model.vocab_size))
