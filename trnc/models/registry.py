"""Which function builds the stage that a spec names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trnc.models import llama, mtp, sampling, speculation
from trnc.models.layer import layer_stage
from trnc.models.stage import Stage, StageKind, StageSpec

_BUILDERS: Mapping[StageKind, Callable[[StageSpec], Stage]] = {
    "embed": llama.embed_stage,
    "layer": layer_stage,
    "moe_layer": layer_stage,
    "head": llama.head_stage,
    "mtp_embed": mtp.mtp_embed_stage,
    "mtp_cache": mtp.mtp_cache_stage,
    "mtp_head": mtp.mtp_head_stage,
    "accept": speculation.accept_stage,
    "draft_begin": speculation.draft_begin_stage,
    "draft_next": speculation.draft_next_stage,
    "mask": sampling.mask_stage,
    "logit_bias": sampling.logit_bias_stage,
    "penalties": sampling.penalties_stage,
    "greedy": sampling.greedy_stage,
    "sample": sampling.sample_stage,
    "logprobs": sampling.logprobs_stage,
}


def build_stage(spec: StageSpec) -> Stage:
    """Return the pure function, the inputs and the outputs of the stage that `spec` describes."""
    return _BUILDERS[spec.kind](spec)
