"""The default model as the Hugging Face folders that other engines read.

    python -m peers.checkpoint MODEL FOLDER

writes `FOLDER/hf`, with the weights dequantised to fp32 by trnc's own reader, and `FOLDER/hf-w8a8`,
the same in the compressed-tensors format: int8 by channel, for int8 activations by token.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trnc.checkpoint.gguf_file import GgufFile
from trnc.checkpoint.gguf_tokenizer import tokenizer_json
from trnc.checkpoint.source import Source, resolve
from trnc.checkpoint.tokenizer import load_tokenizer
from trnc.checkpoint.weights import folder_name, load_weights
from trnc.models.config import ModelConfig, load_config


def convert(source: Source, folder: Path) -> None:
    """Write both folders where they are missing."""
    config = load_config(source)
    if not (folder / "hf").exists():
        _write(folder / "hf", source, config, dict(_dense(source, config)), {})
    if not (folder / "hf-w8a8").exists():
        tensors = dict(_int8(source, config))
        _write(folder / "hf-w8a8", source, config, tensors, {"quantization_config": _W8A8})


def _write(
    folder: Path,
    source: Source,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    extra: dict[str, Any],
) -> None:
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = load_tokenizer(source)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_ids[0]}
    with GgufFile(source.path) as file:
        backend = tokenizer_json(file.metadata)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    files = {
        "config.json": _config_json(config) | ends | extra,
        "generation_config.json": ends,
        "tokenizer.json": backend,
        "tokenizer_config.json": names | tokenizer.special_tokens,
    }
    for name, content in files.items():
        (partial / name).write_text(json.dumps(content, ensure_ascii=False, indent=1))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(folder)


def _config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config of a llama without biases, norms of q and k, or rope scaling."""
    if config.qk_norm or config.qkv_bias or config.rope.kind != "none":
        raise SystemExit("only plain llama models are converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def _dense(source: Source, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    weights = load_weights(source, config)
    for name in weights:
        weight = weights[name]
        tensor = weight if isinstance(weight, Tensor) else weight.dequantize()
        yield folder_name(name), tensor.contiguous()


def _int8(source: Source, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Round the linear layers; the embedding, which is the head too, and the norms stay bf16."""
    for name, tensor in _dense(source, config):
        if not name.endswith("_proj.weight"):
            yield name, tensor.bfloat16()
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / 127
        yield name, (tensor / scale).round().to(torch.int8)
        yield f"{name}_scale", scale.bfloat16()


_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


if __name__ == "__main__":
    convert(resolve(sys.argv[1]), Path(sys.argv[2]))
