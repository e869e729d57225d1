"""Parts of a config that only some families have: routed experts, latent attention, MTP layers.

A field that a released checkpoint always has is required: defaults of transformers' config classes
are those of one model. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trnc.errors import CheckpointError
from trnc.models.fields import integer, number


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts behind a sigmoid router, as in GLM-4.5 and DeepSeek-V3 (arXiv 2412.19437, 2.1.2).

    A token goes to the `top_k` best of `num_experts`, out of its `top_groups` best of `num_groups`
    equal groups, and to the shared experts. Their weights add up to 1 where `normalize`, and are
    then multiplied by `scale`. `inner` is the width of one expert, `shared_inner` that of the
    shared ones together. Layers before `first_layer` have a dense MLP.
    """

    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    inner: int
    shared_inner: int
    scale: float
    normalize: bool
    first_layer: int

    def __post_init__(self) -> None:
        """Raise CheckpointError where the numbers cannot be those of one model."""
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or size < 2 or self.top_groups > self.num_groups:
            raise CheckpointError(
                f"'n_group' {self.num_groups} and 'topk_group' {self.top_groups}: "
                f"{self.num_experts} experts do not divide into such groups of two or more"
            )
        if self.top_k > size * self.top_groups:
            raise CheckpointError(
                f"'num_experts_per_tok' {self.top_k} is more than the experts of "
                f"{self.top_groups} groups of {size}"
            )


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Keys and values of all heads are made of one latent of `kv_rank` values a token and one rotated
    key of `rope_dim`; these are cached. `q_rank` is that of the queries' latent, None for none.
    A query is `nope_dim + rope_dim` wide, a value `value_dim`. `scale` is the softmax's, and
    `interleaved` says that rope rotates pairs (2i, 2i + 1) in the checkpoint.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool

    @property
    def head_dim(self) -> int:
        """The width of one head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """What is cached of a token."""
        return self.kv_rank + self.rope_dim


def read_moe(table: Mapping[str, Any]) -> MoeConfig:
    """Read the experts of a Hugging Face config; raises CheckpointError naming the field."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if table.get(key, only) != only:
            raise CheckpointError(f"'{key}' is {table[key]!r}; only '{only}' is supported")
    if table.get("moe_layer_freq", 1) != 1:
        raise CheckpointError("'moe_layer_freq' other than 1 is not supported")
    inner = integer(table, "moe_intermediate_size")
    dense = table.get("first_k_dense_replace")
    if not isinstance(dense, int) or dense < 0:
        raise CheckpointError(f"'first_k_dense_replace' must be 0 or more, got {dense!r}")
    return MoeConfig(
        num_experts=integer(table, "n_routed_experts"),
        top_k=integer(table, "num_experts_per_tok"),
        num_groups=integer(table, "n_group"),
        top_groups=integer(table, "topk_group"),
        inner=inner,
        shared_inner=inner * integer(table, "n_shared_experts"),
        scale=number(table, "routed_scaling_factor"),
        normalize=bool(table.get("norm_topk_prob", True)),
        first_layer=dense,
    )


def read_mla(table: Mapping[str, Any], scaling: Mapping[str, Any]) -> MlaConfig:
    """Read the latent attention of a Hugging Face config and its table of rope scaling."""
    if table.get("attention_bias"):
        raise CheckpointError("'attention_bias' is not supported with latent attention")
    nope, rope = integer(table, "qk_nope_head_dim"), integer(table, "qk_rope_head_dim")
    no_q_rank = "q_lora_rank" in table and table["q_lora_rank"] is None
    return MlaConfig(
        q_rank=None if no_q_rank else integer(table, "q_lora_rank"),
        kv_rank=integer(table, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=integer(table, "v_head_dim"),
        scale=(nope + rope) ** -0.5 * _yarn_mscale(scaling) ** 2,
        interleaved=bool(table.get("rope_interleave", True)),
    )


def _yarn_mscale(scaling: Mapping[str, Any]) -> float:
    """Return what YaRN multiplies queries and keys by where the config has `mscale_all_dim`."""
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return 1.0
    factor, weight = scaling.get("factor", 1.0), scaling.get("mscale_all_dim")
    return 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1.0 else 1.0


def read_mtp_layers(table: Mapping[str, Any]) -> int:
    """Return how many MTP layers follow the others, 0 or 1; a config without the field has none."""
    layers = table.get("num_nextn_predict_layers") or 0
    if layers not in (0, 1):
        raise CheckpointError(
            f"'num_nextn_predict_layers' is {layers!r}; at most one MTP layer is supported"
        )
    return int(layers)
