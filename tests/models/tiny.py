"""Tiny random models of every family: in transformers, as folders and as a GGUF of all formats.

The weights are large enough for the logits to tell tokens apart, so that texts wander and a wrong
key or position changes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.checkpoint.files import gguf_tensors, shape_metadata, write_gguf
from trnc.presets import Preset

VOCAB = 200
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, _BIASED),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 32, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-biased": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
_GLM = {**_EXPERTS, "head_dim": 32, "attention_bias": True}
_DEEPSEEK = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_WITH_EXPERTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {**_GLM, "use_qk_norm": True}),
    "glm4_moe-tied": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            **_GLM,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "n_shared_experts": 3,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**_DEEPSEEK, "rope_parameters": _YARN},
    ),
    "deepseek_v3-no-q-rank": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**_DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0},
    ),
}
_ALL = _FAMILIES | _WITH_EXPERTS
DENSE_FAMILIES = tuple(_FAMILIES)
FAMILIES_WITH_EXPERTS = tuple(_WITH_EXPERTS)
FAMILIES = (*DENSE_FAMILIES, *FAMILIES_WITH_EXPERTS)

PRESET = Preset(
    name="tiny",
    description="Every bucket is small enough to be filled by a test",
    decode_rows=(1, 2, 4, 8),
    prefill_tokens=(8, 32),
    max_context=128,
    page_size=16,
)


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random f32 model; norms and biases are random, too."""
    config_class, model_class, extra = _ALL[family]
    torch.manual_seed(0)
    config = config_class(**{**_SHAPE, **extra, **changes})
    model: PreTrainedModel = model_class(config).eval()
    randomize(model)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Fill all weights, and the biases that correct a router's choice."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)


def write_mixed_gguf(path: Path) -> Path:
    """Write a tied llama with each grouped format and bf16 in every layer, Q8_0 embeddings."""
    kinds = gguf.GGMLQuantizationType
    formats = {
        "token_embd": kinds.Q8_0,
        "attn_q": kinds.Q4_1,
        "attn_k": kinds.Q4_1,
        "attn_v": kinds.Q4_1,
        "attn_output": kinds.Q4_0,
        "ffn_gate": kinds.Q8_0,
        "ffn_up": kinds.Q8_0,
        "ffn_down": kinds.BF16,
    }
    model = tiny_model("llama-tied")
    tensors = {}
    for name, array in gguf_tensors(model, "llama").items():
        kind = formats.get(name.split(".")[-2])
        tensors[name] = array if kind is None else (gguf.quantize(array, kind), kind)
    return write_gguf(path, metadata=shape_metadata(block_count=3), tensors=tensors)
