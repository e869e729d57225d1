"""The shape of a model: every number that its graphs depend on, and nothing else.

No checkpoint name, path or weight format is in here, so that two fine-tunes of one architecture
have equal configs and share every artifact. Both readers (Hugging Face `config.json` and GGUF
metadata) refuse what the step functions cannot compute: a field that would change the numbers is
never ignored. Imports no torch: the API process needs `max_position`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trnc.checkpoint.gguf_file import GgufFile
from trnc.checkpoint.mtp_file import read_mtp_file
from trnc.checkpoint.source import Source
from trnc.errors import CheckpointError, nearest
from trnc.models.config_parts import MlaConfig, MoeConfig, read_mla, read_moe, read_mtp_layers
from trnc.models.fields import integer, number

Architecture = Literal["llama", "glm4_moe", "deepseek_v3"]
RopeKind = Literal["none", "linear", "llama3", "yarn", "factors"]

_HF_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
)
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_HF_DEFAULT_MAX_POSITION = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
    "Glm4MoeForCausalLM": 131072,
    "DeepseekV3ForCausalLM": 4096,
}
_HF_OPTIONAL_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Glm4MoeForCausalLM")
_WITH_EXPERTS: Mapping[str, Architecture] = {
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over half-split pairs (d, d + dim/2) of the first `dim` head dimensions.

    The numbers that a `kind` does not use keep their defaults, so equal rotations compare equal.
    `attention_factor` multiplies cos and sin (YaRN). `factors` [dim/2] divide the frequencies
    (kind "factors": how GGUF stores the llama3 scaling).
    """

    theta: float
    dim: int
    kind: RopeKind = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, attention with rope, a gated SiLU MLP.

    Attention is grouped-query attention, or latent attention where `mla` is set: then `head_dim` is
    that of queries and keys, and there are as many KV heads as heads. With `moe`, the layers from
    `moe.first_layer` on are mixtures of experts. `mtp_layers` (0 or 1) is the number of layers for
    multi-token prediction, which come after the others: layer `num_layers` is the first. It drafts
    only `mtp_vocab` of the tokens, or all where that is 0.

    `qk_norm` is a per-head RMSNorm on q and k before rope. `max_position` is the longest context
    in tokens that the checkpoint declares. `sliding_window` is None where attention sees the whole
    context; otherwise the model is computed exactly only up to that many tokens, and the engine
    must refuse a longer `max_context`.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    max_position: int
    sliding_window: int | None = None
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    mtp_layers: int = 0
    mtp_vocab: int = 0

    def __post_init__(self) -> None:
        """Raise CheckpointError where the numbers cannot be those of one model."""
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd: rope rotates pairs")
        if self.rope.dim % 2:
            raise CheckpointError(f"rope rotates pairs, not {self.rope.dim} dimensions")

    def is_moe(self, index: int) -> bool:
        """Whether layer `index` has routed experts; those of multi-token prediction always do."""
        return self.moe is not None and index >= min(self.moe.first_layer, self.num_layers)


def load_config(source: Source, file: GgufFile | None = None) -> ModelConfig:
    """Read the config of a resolved model; `file` is its GGUF file if that is open already.

    Raises CheckpointError naming the file and the field.
    """
    try:
        config = _read_config(source, file)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{source.path}/config.json is not valid JSON: {error}") from None
    if source.mtp is None:
        return config
    if config.mtp_layers:
        raise CheckpointError(f"--mtp {source.mtp}: {source.path} has an MTP layer of its own")
    return replace(config, mtp_layers=1, mtp_vocab=read_mtp_file(source.mtp).draft_vocab)


def _read_config(source: Source, file: GgufFile | None) -> ModelConfig:
    if file is not None:
        return from_gguf(file)
    if source.kind == "gguf":
        with GgufFile(source.path) as opened:
            return from_gguf(opened)
    return from_hf(json.loads((source.path / "config.json").read_text()))


# --- Hugging Face ---------------------------------------------------------------------------------


def from_hf(table: Mapping[str, Any]) -> ModelConfig:
    """Return the config that a Hugging Face `config.json` (transformers 4 or 5) describes.

    Raises:
        CheckpointError: an architecture, activation, rope scaling or quantisation that is not
            supported, or a required field that is missing or of the wrong type.
    """
    name = _hf_architecture(table)
    _refuse_hf(table)
    heads = integer(table, "num_attention_heads")
    max_position = integer(table, "max_position_embeddings", _HF_DEFAULT_MAX_POSITION[name])
    mla = read_mla(table, _scaling(table)) if name == "DeepseekV3ForCausalLM" else None
    head_dim = mla.head_dim if mla else _hf_head_dim(table, name, heads)
    rope_dim = mla.rope_dim if mla else _hf_rope_dim(table, name, head_dim)
    biased = bool(table.get("attention_bias", False))
    with_experts = name in _WITH_EXPERTS
    return ModelConfig(
        architecture=_WITH_EXPERTS.get(name, "llama"),
        vocab_size=integer(table, "vocab_size"),
        hidden_size=integer(table, "hidden_size"),
        intermediate_size=integer(table, "intermediate_size"),
        num_layers=integer(table, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if mla else integer(table, "num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=number(table, "rms_norm_eps", 1e-5 if name == "Glm4MoeForCausalLM" else 1e-6),
        rope=_hf_rope(table, rope_dim, max_position),
        qk_norm=name == "Qwen3ForCausalLM"
        or (name == "Glm4MoeForCausalLM" and bool(table.get("use_qk_norm", False))),
        qkv_bias=name == "Qwen2ForCausalLM" or (biased and name in _HF_OPTIONAL_BIAS),
        output_bias=biased and name in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=name == "LlamaForCausalLM" and bool(table.get("mlp_bias", False)),
        tie_embeddings=bool(table.get("tie_word_embeddings", False)),
        max_position=max_position,
        sliding_window=_hf_sliding_window(table, name, max_position),
        moe=read_moe(table) if with_experts else None,
        mla=mla,
        mtp_layers=read_mtp_layers(table) if with_experts else 0,
    )


def _hf_head_dim(table: Mapping[str, Any], name: str, heads: int) -> int:
    # Qwen3 is the one class whose default head_dim is a number of its own.
    derived = 128 if name == "Qwen3ForCausalLM" else integer(table, "hidden_size") // heads
    return integer(table, "head_dim", derived)


def _hf_architecture(table: Mapping[str, Any]) -> str:
    names = table.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"'architectures' must name one class, got {names!r}")
    name = str(names[0])
    if name in _HF_ARCHITECTURES:
        return name
    if name == "SmolLM3ForCausalLM":
        raise CheckpointError(
            "'architectures' is SmolLM3ForCausalLM: layers without rope ('no_rope_layers') are not"
            " supported yet"
        )
    raise CheckpointError(
        f"'architectures' is {name}, which is not supported.{nearest(name, _HF_ARCHITECTURES)}"
        f" Supported: {', '.join(_HF_ARCHITECTURES)}."
    )


def _refuse_hf(table: Mapping[str, Any]) -> None:
    """Raise for fields that change the numbers and that no step function computes."""
    activation = table.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"'hidden_act' is {activation!r}; only 'silu' is supported")
    if table.get("quantization_config"):
        method = table["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"'quantization_config' is {method!r}: quantised safetensors are not supported; use"
            " the unquantised checkpoint or a GGUF file"
        )
    if table.get("no_rope_layers"):
        raise CheckpointError("'no_rope_layers': layers without rope are not supported yet")


def _hf_sliding_window(
    table: Mapping[str, Any], architecture: str, max_position: int
) -> int | None:
    """Return the window of any layer that has one. Layers are not told apart: the least counts."""
    if architecture == "LlamaForCausalLM" or architecture in _WITH_EXPERTS:
        return None
    if architecture == "MistralForCausalLM":
        window = table.get("sliding_window", 4096)
    else:
        used = bool(table.get("use_sliding_window", False))
        layers = table.get("layer_types")
        if layers is not None:
            used = used and "sliding_attention" in layers
        window = table.get("sliding_window", 4096) if used else None
    if window is None or window >= max_position:
        return None
    return int(window)


def _hf_rope(table: Mapping[str, Any], dim: int, max_position: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (4)."""
    name, scaling = _scaling_name(table), _scaling(table)
    if any(isinstance(value, dict) for value in scaling.values()):
        raise CheckpointError(f"'{name}' differs between layers, which is not supported")
    theta = number(scaling, "rope_theta", number(table, "rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    # A number outside the scaling table wins, as in transformers.
    original = table.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings", max_position
    )
    base = RopeConfig(theta=theta, dim=dim)
    try:
        return _scaled(base, str(kind), scaling, int(original), max_position)
    except CheckpointError as error:
        raise CheckpointError(f"'{name}': {error}") from None


def _hf_rope_dim(table: Mapping[str, Any], architecture: str, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated."""
    scaling = _scaling(table)
    if architecture == "Glm4MoeForCausalLM":
        factor = number(
            scaling, "partial_rotary_factor", number(table, "partial_rotary_factor", 0.5)
        )
        return int(head_dim * factor)
    for where, values in (("", table), (f"{_scaling_name(table)}.", scaling)):
        if values.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"'{where}partial_rotary_factor' other than 1.0 is not supported")
    return head_dim


def _scaling_name(table: Mapping[str, Any]) -> str:
    return "rope_parameters" if table.get("rope_parameters") else "rope_scaling"


def _scaling(table: Mapping[str, Any]) -> dict[str, Any]:
    return dict(table.get(_scaling_name(table)) or {})


def _scaled(
    base: RopeConfig, kind: str, scaling: Mapping[str, Any], original: int, max_position: int
) -> RopeConfig:
    """Return `base` with the numbers of one kind of scaling."""
    if kind in ("default", "none"):
        return base
    if kind == "linear":
        return replace(base, kind="linear", factor=number(scaling, "factor"))
    if kind == "llama3":
        low, high = number(scaling, "low_freq_factor"), number(scaling, "high_freq_factor")
        if low >= high:
            raise CheckpointError("'low_freq_factor' must be less than 'high_freq_factor'")
        return replace(
            base,
            kind="llama3",
            factor=number(scaling, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
    if kind == "yarn":
        factor = number(scaling, "factor", max_position / original)
        return replace(
            base,
            kind="yarn",
            factor=factor,
            beta_fast=number(scaling, "beta_fast", 32.0),
            beta_slow=number(scaling, "beta_slow", 1.0),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=_yarn_attention_factor(scaling, factor),
            original_max_position=original,
        )
    known = ("default", "linear", "llama3", "yarn")
    raise CheckpointError(
        f"rope scaling '{kind}' is not supported.{nearest(kind, known)}"
        f" Supported: {', '.join(known)}."
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Return what cos and sin are multiplied by: YaRN (arXiv 2309.00071) eq. 22, and mscale."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(float(scaling["mscale"])) / mscale(float(scaling["mscale_all_dim"]))
    return mscale(1.0)


# --- GGUF -----------------------------------------------------------------------------------------


def from_gguf(file: GgufFile) -> ModelConfig:
    """Return the config that the metadata and the tensor list of a GGUF file describe.

    The tensor list tells what the metadata does not: a tied head (no `output.weight`), biases,
    q/k norms, and frequency factors of rope.

    Raises:
        CheckpointError: an architecture or rope scaling that is not supported, experts, or a
            required key that is missing or of the wrong type.
    """
    meta = file.metadata
    arch = str(meta.get("general.architecture"))
    if arch not in _GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"'general.architecture' is '{arch}', which is not supported."
            f"{nearest(arch, _GGUF_ARCHITECTURES)} Supported: {', '.join(_GGUF_ARCHITECTURES)}."
        )
    if meta.get(f"{arch}.expert_count", 0):
        raise CheckpointError(f"'{arch}.expert_count': mixture-of-experts models are not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("tensor 'token_embd.weight' is missing")
    heads = integer(meta, f"{arch}.attention.head_count")
    hidden = integer(meta, f"{arch}.embedding_length")
    head_dim = integer(meta, f"{arch}.attention.key_length", hidden // heads)
    if integer(meta, f"{arch}.attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"'{arch}.attention.value_length' must equal the key length")
    max_position = integer(meta, f"{arch}.context_length")
    window = meta.get(f"{arch}.attention.sliding_window") or None
    return ModelConfig(
        architecture="llama",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=integer(meta, f"{arch}.feed_forward_length"),
        num_layers=integer(meta, f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=integer(meta, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        # The metadata holds an f32, and transformers computes with the decimal that it stands for.
        rms_eps=float(f"{number(meta, f'{arch}.attention.layer_norm_rms_epsilon'):.7g}"),
        rope=_gguf_rope(file, arch, head_dim, max_position),
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
        max_position=max_position,
        sliding_window=int(window) if window and window < max_position else None,
    )


def _gguf_rope(file: GgufFile, arch: str, head_dim: int, max_position: int) -> RopeConfig:
    meta = file.metadata
    if integer(meta, f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"'{arch}.rope.dimension_count' other than head_dim is not supported")
    theta = number(meta, f"{arch}.rope.freq_base", 10000.0)
    kind = str(meta.get(f"{arch}.rope.scaling.type", "none"))
    prefix = f"{arch}.rope.scaling."
    scaling = {key.removeprefix(prefix): v for key, v in meta.items() if key.startswith(prefix)}
    for key in ("beta_fast", "beta_slow"):
        if f"yarn_{key}" in scaling:
            scaling[key] = scaling[f"yarn_{key}"]
    original = int(scaling.get("original_context_length", max_position))
    base = RopeConfig(theta=theta, dim=head_dim)
    # An attn_factor is multiplied onto YaRN's own factor; only 1 means the same everywhere.
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if scaling.get(key, 1.0) != 1.0:
            raise CheckpointError(f"'{prefix}{key}' other than 1.0 is not supported")
    if scaling.get("yarn_log_multiplier", 0.0) != 0.0:
        raise CheckpointError(f"'{prefix}yarn_log_multiplier' is not supported")
    try:
        rope = _scaled(base, kind, scaling, original, max_position)
    except CheckpointError as error:
        raise CheckpointError(f"'{prefix}type': {error}") from None
    if "rope_freqs.weight" not in file.tensors:
        return rope
    factors = file.floats("rope_freqs.weight")
    if rope.kind != "none" or len(factors) != head_dim // 2:
        raise CheckpointError(f"tensor 'rope_freqs.weight' does not fit rope scaling '{kind}'")
    return replace(base, kind="factors", factors=factors)
