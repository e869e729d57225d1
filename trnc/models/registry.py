"""Which function builds the stage that a spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trnc.models import llama, sampling
from trnc.models.stage import Stage, StageKind, StageSpec

_BUILDERS: Mapping[StageKind, Callable[[StageSpec], Stage]] = {
    "embed": llama.embed_stage,
    "layer": llama.layer_stage,
    "head": llama.head_stage,
    "logit_bias": sampling.logit_bias_stage,
    "greedy": sampling.greedy_stage,
    "sample": sampling.sample_stage,
    "logprobs": sampling.logprobs_stage,
}


def build_stage(spec: StageSpec) -> Stage:
    """Return the pure function, the inputs and the outputs of the stage that `spec` describes."""
    return _BUILDERS[spec.kind](spec)
