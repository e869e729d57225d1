"""Weights under their canonical names, from safetensors and GGUF, against what was written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoint.files import FAMILIES, gguf_tensors, shape_metadata, tiny_model, write_gguf
from trnc.checkpoint.layouts import Dense, Int4Groups, Int8Groups
from trnc.checkpoint.source import resolve
from trnc.checkpoint.weights import Weights, load_weights
from trnc.errors import CheckpointError
from trnc.models.config import load_config

FOLDER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{n: f"self_attn.{n}_proj" for n in ("q", "k", "v", "o")},
    **{n: f"self_attn.{n}" for n in ("q_norm", "k_norm")},
    **{n: f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}


def load(path: Path) -> Weights:
    source = resolve(str(path))
    return load_weights(source, load_config(source))


def assert_equal_to(weights: Weights, model: PreTrainedModel) -> None:
    """Every parameter of the model is there under its canonical name, and nothing else."""
    left = dict(model.named_parameters())
    for name, value in weights.items():
        *layer, leaf = name.split(".")
        stem, kind = (leaf.removesuffix("_bias"), "bias") if "_bias" in leaf else (leaf, "weight")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        wanted = left.pop(f"{prefix}{FOLDER_NAMES[stem]}.{kind}")
        if wanted.ndim == 2:
            assert isinstance(value, Dense)
        tensor = value.weight if isinstance(value, Dense) else value
        assert tensor.dtype == wanted.dtype
        torch.testing.assert_close(tensor, wanted.detach(), rtol=0, atol=0)
    assert not left


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_safetensors(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal_to(load(tmp_path), model)


def test_bf16_is_kept_in_matrices_and_widened_in_vectors(tmp_path: Path) -> None:
    tiny_model("mistral").to(torch.bfloat16).save_pretrained(tmp_path)
    weights = load(tmp_path)
    assert weights.matrix("layers.0.q").dequantize().dtype == torch.float32
    matrix = weights.matrix("layers.0.q")
    assert isinstance(matrix, Dense)
    assert matrix.weight.dtype == torch.bfloat16
    assert weights.vector("norm").dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_rows_come_back_in_the_order_of_half_split_rope(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    head_dim = model.model.layers[0].self_attn.head_dim
    lengths = {"attention.key_length": head_dim, "attention.value_length": head_dim}
    path = write_gguf(
        tmp_path / "m.gguf",
        metadata=shape_metadata(family, **lengths),
        tensors=gguf_tensors(model, family),
        arch=family,
    )
    assert_equal_to(load(path), model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen2").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    named = {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {k: v for k, v in {**tensors, **named}.items() if v is not None}
    save_file(tensors, folder / "model.safetensors")


def test_a_tied_head_is_not_a_weight_even_where_a_copy_is_stored(folder: Path) -> None:
    assert "head" not in load(folder)
    rewrite(folder, lm_head__weight=torch.zeros(96, 64))
    assert "head" not in load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": None}, r"'model\.norm\.weight' is missing"),
        ({"model__norm__weight": torch.zeros(63)}, r"'model\.norm\.weight' has shape \[63\]"),
        ({"model__norm__bias": torch.zeros(64)}, r"'model\.norm\.bias'.*no place"),
        (
            {"model__layers__0__mlp__up_proj__weight": torch.zeros(96, 64, dtype=torch.int8)},
            "up_proj.weight' is I8",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, changes: dict, message: str) -> None:
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        dict(load(folder))


def test_a_missing_or_truncated_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}.*missing"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load(tmp_path)


def test_a_folder_with_no_safetensors_says_so(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="Only safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Kind.F32, Dense),
        (Kind.F16, Dense),
        (Kind.BF16, Dense),
        (Kind.Q4_0, Int4Groups),
        (Kind.Q4_1, Int4Groups),
        (Kind.Q8_0, Int8Groups),
        (Kind.Q5_0, Dense),
        (Kind.Q5_1, Dense),
        (Kind.Q2_K, Dense),
        (Kind.Q3_K, Dense),
        (Kind.Q4_K, Dense),
        (Kind.Q5_K, Dense),
        (Kind.Q6_K, Dense),
        (Kind.IQ4_NL, Dense),
        (Kind.IQ4_XS, Dense),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_block_format_means_what_gguf_says(kind: Kind, form: type, tmp_path: Path) -> None:
    """`down` is not permuted and `q` is; both are compared with gguf's own dequantisation."""
    model = tiny_model("mistral")
    config = model.config
    width, height = 256, 64
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    if kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        stored = gguf.quants.quantize(rng.normal(size=(height, width)).astype(np.float32), kind)
    else:
        # Exponents of random half-precision scales are kept small: no NaN, no infinity.
        stored = rng.integers(0, 64, (height, width // block * size), dtype=np.uint8)
    wanted = torch.from_numpy(gguf.quants.dequantize(stored, kind)).float()

    tensors = gguf_tensors(model, "llama")
    for index in range(2):
        ffn = np.zeros((width, 64), dtype=np.float32)
        tensors |= {f"blk.{index}.ffn_up.weight": ffn, f"blk.{index}.ffn_gate.weight": ffn}
        tensors[f"blk.{index}.ffn_down.weight"] = (stored, kind)
    metadata = shape_metadata(
        **{
            "feed_forward_length": width,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
    )
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors=tensors)
    down = load(path).matrix("layers.1.down")
    assert type(down) is form
    assert down.shape == (height, width)
    torch.testing.assert_close(down.dequantize(), wanted, rtol=0, atol=0)
    if kind is Kind.Q4_0:
        assert isinstance(down, Int4Groups)
        assert down.offset is None
    if kind in (Kind.F16, Kind.BF16):
        assert isinstance(down, Dense)
        assert down.weight.dtype == {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16])
def test_quantised_rows_are_permuted_whole(kind: Kind, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = gguf_tensors(model, "llama")
    name = "blk.0.attn_k.weight"
    tensors[name] = (gguf.quants.quantize(tensors[name], kind), kind)
    path = write_gguf(tmp_path / "m.gguf", metadata=shape_metadata(), tensors=tensors)
    stored = model.model.layers[0].self_attn.k_proj.weight.detach().numpy()
    wanted = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    got = load(path).matrix("layers.0.k").dequantize()
    torch.testing.assert_close(got, torch.from_numpy(wanted).float(), rtol=0, atol=0)


def test_a_config_of_another_model_is_refused(folder: Path) -> None:
    source = resolve(str(folder))
    config = replace(load_config(source), num_layers=1)
    with pytest.raises(CheckpointError, match=r"layers\.1"):
        load_weights(source, config)
    with pytest.raises(KeyError):
        load(folder)["layers.7.q"]
