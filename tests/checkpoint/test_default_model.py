"""The default model's own file: downloaded once into the user's cache."""

from __future__ import annotations

import subprocess
import sys

import gguf
import pytest
import torch

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.layouts import Int4Groups, Int8Groups
from trnc.checkpoint.source import Source, resolve
from trnc.checkpoint.tokenizer import load_tokenizer
from trnc.checkpoint.weights import load_weights
from trnc.models.config import load_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source() -> Source:
    return resolve("smollm2-135m")


def test_config(source: Source) -> None:
    config = load_config(source)
    shape = (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads)
    assert shape == (576, 30, 9, 3)
    assert (config.rms_eps, config.rope.theta, config.max_position) == (1e-5, 1e5, 8192)
    assert config.tie_embeddings


def test_weights_are_kept_in_their_precision(source: Source) -> None:
    config = load_config(source)
    weights = load_weights(source, config)
    assert isinstance(weights["embed"], Int8Groups)
    assert isinstance(weights["layers.29.q"], Int4Groups)
    assert "head" not in weights
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source.path).tensors}

    def reference(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).float()

    down = weights.matrix("layers.7.down").dequantize()
    torch.testing.assert_close(down, reference("blk.7.ffn_down.weight"), rtol=0, atol=0)
    # Pair i of llama.cpp's rope is rows (2i, 2i + 1) of a head; ours are (i, i + 32).
    q = weights.matrix("layers.7.q").dequantize().view(9, 2, 32, 576)
    paired = reference("blk.7.attn_q.weight").view(9, 32, 2, 576)
    torch.testing.assert_close(q, paired.transpose(1, 2), rtol=0, atol=0)


def test_tokenizer_and_chat_template(source: Source) -> None:
    tokenizer = load_tokenizer(source)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (49152, 1)
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
    text = template.render([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    words = tokenizer.encode("The capital of France is Paris.", add_special_tokens=True)
    assert [tokenizer.id_to_token(i) for i in words] == [
        *("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis", "ĠParis", "."),
    ]


def test_the_api_process_loads_it_all_without_torch(source: Source) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from trnc.checkpoint.source import Source\n"
        "from trnc.checkpoint.tokenizer import load_tokenizer\n"
        "from trnc.checkpoint.generation import generation_defaults\n"
        "from trnc.models.config import load_config\n"
        f"source = Source('gguf', Path({str(source.path)!r}), 'm')\n"
        "load_tokenizer(source), load_config(source), generation_defaults(source)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
