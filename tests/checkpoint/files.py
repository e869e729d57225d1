"""Small checkpoints for the tests: written by transformers, by `gguf`, or byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
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

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 32}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def tiny_model(family: str) -> PreTrainedModel:
    """Return a random model; every parameter is random, also norms and biases."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SHAPE, **extra))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def write_gguf(
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    arch: str = "llama",
) -> Path:
    """Write a GGUF. A tensor is an array, or (bytes array, type) for a block format."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, value in (tensors or {}).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def shape_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return the metadata of a GGUF model with SHAPE's numbers."""
    values = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    return {f"{arch}.{key}": value for key, value in {**values, **changes}.items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(model: PreTrainedModel, arch: str) -> dict[str, Any]:
    """Return a model's tensors as llama.cpp's converter writes them, q/k permuted for `llama`."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tied = model.config.tie_word_embeddings
    result = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        array = tensor.numpy()
        leaf = stem.rsplit(".", 1)[-1]
        if arch == "llama" and leaf in heads:
            paired = array.reshape(heads[leaf], 2, -1, *array.shape[1:])
            array = paired.swapaxes(1, 2).reshape(array.shape)
        result[f"{prefix}{_GGUF_NAMES[stem]}.{kind}"] = array
    return result
