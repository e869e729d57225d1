"""Specs of real stages at sizes that trace in a moment: every family, every kind of stage."""

from __future__ import annotations

from dataclasses import replace

from trnc.models.config import ModelConfig, RopeConfig
from trnc.models.config_parts import MlaConfig, MoeConfig
from trnc.models.stage import LayerFormats, StageSpec, WeightFormats

DENSE = LayerFormats(qkv="i4g32", o="i4g32", gate_up="i8g32", down="f32")
EXPERTS = replace(DENSE, shared_gate_up="i8g32", shared_down="f32")
LATENT = replace(EXPERTS, q_up="f32", k_up="f32", v_up="f32")
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-5,
    rope=RopeConfig(theta=10000.0, dim=16),
    qk_norm=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    tie_embeddings=True,
    max_position=256,
)
GLM = replace(
    MODEL,
    architecture="glm4_moe",
    rope=RopeConfig(theta=10000.0, dim=8),
    qkv_bias=True,
    moe=MoeConfig(8, 3, 1, 1, 32, 32, 2.5, True, 1),
)
DEEPSEEK = replace(
    MODEL,
    architecture="deepseek_v3",
    num_kv_heads=4,
    qk_norm=False,
    moe=MoeConfig(8, 3, 4, 2, 32, 64, 2.5, True, 0),
    mla=MlaConfig(48, 32, 24, 16, 32, 40**-0.5, True),
    head_dim=40,
    rope=RopeConfig(theta=10000.0, dim=16),
)
FORMATS = WeightFormats(embed="i8g32", head="i8g32", layers=(DENSE, DENSE))

_LAYER = StageSpec("layer", MODEL, "tokens", "rows", DENSE, "float16", 32)
SPECS: dict[str, StageSpec] = {
    "embed": StageSpec("embed", MODEL, "tokens", 0, FORMATS),
    "layer": _LAYER,
    "int8": replace(_LAYER, kv_dtype="int8"),
    "experts": replace(_LAYER, kind="moe_layer", model=GLM, formats=EXPERTS),
    "latent": replace(_LAYER, kind="moe_layer", model=DEEPSEEK, formats=LATENT),
    "head": StageSpec("head", MODEL, "tokens", "rows", FORMATS),
    "sample": StageSpec("sample", MODEL, 0, "rows"),
    "logprobs": StageSpec("logprobs", MODEL, 0, "rows"),
}
