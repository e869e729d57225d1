"""Rotary tables against transformers' rotary module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.checkpoint.files import SHAPE
from trnc.models.config import RopeConfig, from_hf
from trnc.models.rope import inverse_frequencies, rope_tables

ORIGINAL = {"original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        **ORIGINAL,
    },
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, **ORIGINAL},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str) -> None:
    parameters = {"rope_theta": 50000.0, **SCALINGS[name]}
    hf = LlamaConfig(**{**SHAPE, "head_dim": 32}, rope_parameters=dict(parameters))
    table = {"architectures": ["LlamaForCausalLM"], **SHAPE, "head_dim": 32}
    rope = from_hf({**table, "rope_parameters": parameters}).rope
    cos, sin = rope_tables(rope, 200)
    module = LlamaRotaryEmbedding(hf)
    wanted_cos, wanted_sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(200)[None])
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(
        inverse_frequencies(rope).float(), module.inv_freq, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(cos, wanted_cos[0, :, :16], rtol=0, atol=5e-5)
    torch.testing.assert_close(sin, wanted_sin[0, :, :16], rtol=0, atol=5e-5)


def test_llama3_as_gguf_factors_is_the_same_rotation() -> None:
    table = {"architectures": ["LlamaForCausalLM"], **SHAPE}
    llama3 = from_hf({**table, "rope_parameters": {"rope_theta": 1e4, **SCALINGS["llama3"]}}).rope
    plain = RopeConfig(theta=1e4, dim=16)
    factors = tuple((inverse_frequencies(plain) / inverse_frequencies(llama3)).tolist())
    stored = RopeConfig(theta=1e4, dim=16, kind="factors", factors=factors)
    torch.testing.assert_close(rope_tables(stored, 99), rope_tables(llama3, 99))


def test_a_far_position_keeps_its_digits() -> None:
    cos, _ = rope_tables(RopeConfig(theta=10000.0, dim=4), 1_000_001)
    exact = torch.tensor(1_000_000 * 0.01, dtype=torch.float64).cos()
    assert abs(cos[1_000_000, 1].double() - exact) < 1e-7
