"""ModelConfig from Hugging Face and GGUF files: what is read, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import (
    FAMILIES,
    SHAPE,
    gguf_tensors,
    shape_metadata,
    tiny_model,
    write_gguf,
)
from trnc.checkpoint.source import resolve
from trnc.errors import CheckpointError
from trnc.models.config import ModelConfig, RopeConfig, from_hf, load_config
from trnc.models.config_parts import MlaConfig, MoeConfig

LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **SHAPE}
EXPECTED = {
    "llama": {"head_dim": 16, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32},
    "qwen2": {"head_dim": 16, "qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"head_dim": 32, "qk_norm": True},
}


def expected_config(family: str) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "rms_eps": 1e-6,
        "max_position": 256,
    }
    flags = ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tie_embeddings")
    values |= {**dict.fromkeys(flags, False), **EXPECTED[family]}
    return ModelConfig(rope=RopeConfig(theta=10000.0, dim=values["head_dim"]), **values)


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_writes(family: str, tmp_path: Path) -> None:
    tiny_model(family).config.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    class_name = FAMILIES[family][1].__name__
    (tmp_path / "config.json").write_text(json.dumps({**table, "architectures": [class_name]}))
    assert load_config(resolve(str(tmp_path))) == expected_config(family)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_same_config(family: str, tmp_path: Path) -> None:
    head_dim = EXPECTED[family]["head_dim"]
    metadata = shape_metadata(family, **{"attention.key_length": head_dim})
    metadata[f"{family}.attention.value_length"] = head_dim
    tensors = gguf_tensors(tiny_model(family), family)
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors=tensors, arch=family)
    assert load_config(resolve(str(path))) == expected_config(family)


def test_rope_of_transformers_4_and_5_are_read_alike() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = from_hf({**LLAMA, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    legacy = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    assert old == new == from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": legacy})
    assert old.rope.theta == 5e5
    assert old.rope.kind == "llama3"
    assert old.rope.original_max_position == 64


def test_qwen3_has_a_default_head_dim_of_its_own() -> None:
    assert from_hf(LLAMA).head_dim == 16
    assert from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, 64),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
            },
            64,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "full_attention"],
            },
            None,
        ),
    ],
)
def test_a_sliding_window_counts_where_a_layer_uses_it(changes: dict, window: int | None) -> None:
    assert from_hf({**LLAMA, **changes}).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLm"]}, "Did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["SmolLM3ForCausalLM"]}, "no_rope_layers"),
        ({"architectures": []}, "'architectures'"),
        ({"hidden_act": "gelu"}, "'hidden_act'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'rope_scaling'.*'dynamic'"),
        ({"rope_parameters": {"rope_type": "lama3"}}, "Did you mean 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config' is 'gptq'"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps'"),
    ],
)
def test_what_would_change_the_numbers_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_hf({**LLAMA, **changes})


# Experts and latent attention: the numbers of the released models


GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_glm_4_5() -> None:
    config = from_hf(GLM)
    assert config == ModelConfig(
        architecture="glm4_moe",
        vocab_size=151552,
        hidden_size=5120,
        intermediate_size=12288,
        num_layers=92,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        rms_eps=1e-5,
        rope=RopeConfig(theta=1e6, dim=64),
        qk_norm=True,
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
        max_position=131072,
        moe=MoeConfig(
            160, 8, 1, 1, inner=1536, shared_inner=1536, scale=2.5, normalize=True, first_layer=3
        ),
        mtp_layers=1,
    )
    assert [config.is_moe(i) for i in (0, 2, 3, 91, 92)] == [False, False, True, True, True]
    new = {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "default"}
    assert from_hf({**GLM, "rope_parameters": new}).rope.dim == 32


def test_deepseek_v3() -> None:
    config = from_hf(DEEPSEEK)
    mscale = 0.1 * math.log(40) + 1
    assert config.mla == MlaConfig(
        1536, 512, 128, 64, 128, scale=192**-0.5 * mscale * mscale, interleaved=True
    )
    assert config.mla.latent_width == 576
    assert config.head_dim == 192
    assert config.moe == MoeConfig(
        256, 8, 8, 4, inner=2048, shared_inner=2048, scale=2.5, normalize=True, first_layer=3
    )
    assert config.rope.dim == 64
    assert config.rope.kind == "yarn"
    assert config.rope.attention_factor == 1.0
    assert config.mtp_layers == 1
    assert not config.qkv_bias
    assert from_hf({**DEEPSEEK, "rope_scaling": None}).mla.scale == 192**-0.5


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        (GLM, {"n_routed_experts": None}, "'n_routed_experts' is missing"),
        (GLM, {"n_group": 3}, "'n_group' 3"),
        (GLM, {"topk_group": 2}, "'topk_group' 2"),
        (GLM, {"n_group": 40, "num_experts_per_tok": 5}, "'num_experts_per_tok' 5 is more"),
        (GLM, {"first_k_dense_replace": -1}, "'first_k_dense_replace'"),
        (GLM, {"num_nextn_predict_layers": 2}, "'num_nextn_predict_layers' is 2"),
        (GLM, {"partial_rotary_factor": 0.4}, "rope rotates pairs"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "'topk_method' is 'greedy'"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "'moe_layer_freq'"),
        (DEEPSEEK, {"attention_bias": True}, "'attention_bias'"),
        (DEEPSEEK, {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        (DEEPSEEK, {"architectures": ["DeepseekV3ForCasualLM"]}, "mean 'DeepseekV3ForCausalLM'"),
    ],
)
def test_experts_and_latents_that_cannot_be_computed_are_refused(
    table: dict, changes: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_hf({**table, **changes})


def test_an_mtp_layer_has_experts_even_where_no_other_has() -> None:
    config = from_hf({**GLM, "first_k_dense_replace": 200})
    assert not config.is_moe(91)
    assert config.is_moe(92)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("lama", {}, "Did you mean 'llama'"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("llama", {"attention.value_length": 8}, "value_length"),
        ("llama", {"attention.head_count": [4, 4]}, "head_count"),
    ],
)
def test_a_gguf_file_that_cannot_be_computed_is_refused(
    arch: str, changes: dict, message: str, tmp_path: Path
) -> None:
    tensors = gguf_tensors(tiny_model("mistral"), "llama")
    metadata = shape_metadata(arch, **changes)
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors=tensors, arch=arch)
    with pytest.raises(CheckpointError, match=message):
        load_config(resolve(str(path)))


def test_gguf_rope_factors_come_from_their_tensor(tmp_path: Path) -> None:
    import numpy as np

    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    tensors = {**gguf_tensors(tiny_model("llama"), "llama"), "rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "m.gguf", metadata=shape_metadata(), tensors=tensors)
    rope = load_config(resolve(str(path))).rope
    assert rope == RopeConfig(
        theta=10000.0, dim=16, kind="factors", factors=tuple(factors.tolist())
    )


def test_a_gguf_file_with_yarn(tmp_path: Path) -> None:
    changes = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    tensors = gguf_tensors(tiny_model("qwen2"), "qwen2")
    path = write_gguf(
        tmp_path / "m.gguf",
        metadata=shape_metadata("qwen2", **changes),
        tensors=tensors,
        arch="qwen2",
    )
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert load_config(resolve(str(path))).rope == from_hf({**LLAMA, "rope_scaling": scaling}).rope


def test_the_config_and_the_tokenizer_are_read_without_torch() -> None:
    code = (
        "import sys, trnc.models.config, trnc.checkpoint.source, trnc.checkpoint.tokenizer,"
        " trnc.checkpoint.chat_template, trnc.checkpoint.generation, trnc.checkpoint.pull;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'gguf', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
