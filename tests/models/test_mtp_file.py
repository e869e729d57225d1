"""An MTP block in a file of its own: what it computes, and that it is checked when it is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from tests.models.test_mtp import SPECULATING, TOKENS, Drafter
from tests.models.tiny import PRESET, VOCAB, tiny_model, write_mixed_gguf
from trnc.checkpoint.layouts import Int8Groups
from trnc.checkpoint.mtp_file import packaged_block, read_mtp_file
from trnc.checkpoint.pull import SMOLLM2
from trnc.checkpoint.source import DEFAULT_MODEL
from trnc.checkpoint.weights import folder_name
from trnc.compiler.canonical import canonical_text
from trnc.compiler.program import mtp_calls
from trnc.compiler.trace import trace_stage
from trnc.core import SamplingParams, VariantKey
from trnc.engine.messages import Submit
from trnc.engine.offline import run_requests
from trnc.errors import CheckpointError
from trnc.models.rope import rope_tables
from trnc.models.weights import pack_weights
from trnc.ops import unpack
from trnc.runtime.packed import packed_key
from trnc.runtime.start import (
    Model,
    StartOptions,
    open_model,
    program_config,
    require_cache,
    start_executor,
)

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 3, 64, 96, 4, 2
IDS = torch.tensor([1, 2, 5, 8, 60, 61, 130, 199])
SHAPES = {
    **dict.fromkeys(("enorm", "hnorm", "shared_norm", "attn_norm", "mlp_norm"), (HIDDEN,)),
    "eh_proj": (HIDDEN, 2 * HIDDEN),
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN // 2, HIDDEN),
    "v": (HIDDEN // 2, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}


def stored(name: str) -> str:
    return folder_name(f"layers.{LAYERS}.{name}")


def random_block() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    block = {n: torch.randn(s, generator=generator) * 0.2 for n, s in SHAPES.items()}
    return {n: t + 1 if t.ndim == 1 else t for n, t in block.items()}


def write_block(path: Path, *, int8: bool = False, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Write a block and return what its weights stand for, by canonical name."""
    weights, tensors = random_block(), {}
    for name, weight in weights.items():
        tensors[stored(name)] = weight
        if int8 and weight.ndim == 2:
            scale = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 127).half()
            q = (weight / scale.float().repeat_interleave(32, 1)).round().clamp(-127, 127)
            quantized = Int8Groups(q.to(torch.int8), scale)
            tensors |= {stored(name): quantized.q, f"{stored(name)}_scale": quantized.scale}
            weights[name] = quantized.dequantize()
    save_file(tensors if ids is None else tensors | {"draft_ids": ids.int()}, path)
    return weights


def change(path: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a block, or leave them out."""
    changed = load_file(path) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)


class PlainBlock:
    """The formula of `trnc.models.mtp` in plain torch, over one sequence and with its own cache."""

    def __init__(self, weights: dict[str, Tensor], embed: Tensor, head: Tensor, model: Model):
        self.w, self.embed, self.head, self.model = weights, embed, head, model
        self.k = self.v = torch.empty(KV_HEADS, 0, HIDDEN // HEADS)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (HIDDEN,), self.w[name], self.model.config.rms_eps)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        tables = rope_tables(self.model.config.rope, start + x.shape[1])
        cos, sin = (table[start:] for table in tables)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def draft(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """The last row's state [H] and logits [V], over all positions so far."""
        start = self.k.shape[1]
        both = [self.norm(self.embed[tokens], "enorm"), self.norm(states, "hnorm")]
        x = linear(torch.cat(both, dim=1), self.w["eh_proj"])
        normed = self.norm(x, "attn_norm")
        q, k, v = (
            linear(normed, self.w[n]).unflatten(1, (-1, HIDDEN // HEADS)).transpose(0, 1)
            for n in "qkv"
        )
        self.k = torch.cat([self.k, self.rotate(k, start)], dim=1)
        self.v = torch.cat([self.v, v], dim=1)
        rows, keys = torch.arange(start, start + len(tokens)), torch.arange(self.k.shape[1])
        attended = scaled_dot_product_attention(
            self.rotate(q, start)[None],
            self.k[None],
            self.v[None],
            attn_mask=keys <= rows[:, None],
            enable_gqa=True,
        )
        x = x + linear(attended[0].transpose(0, 1).flatten(1), self.w["o"])
        normed = self.norm(x, "mlp_norm")
        wide = silu(linear(normed, self.w["gate"])) * linear(normed, self.w["up"])
        state = self.norm(x + linear(wide, self.w["down"]), "shared_norm")[-1]
        return state, linear(state, self.head)


@pytest.fixture(params=["llama", "llama-tied", "gguf"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model of the llama family that has no MTP layer."""
    if request.param == "gguf":
        return str(write_mixed_gguf(tmp_path / "tiny.gguf"))
    tiny_model(request.param).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_model("llama-tied").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def opened(target: str, block: Path) -> Model:
    return open_model(target, report=lambda line: None, mtp=str(block))


def rounds() -> Iterator[tuple[int, int]]:
    """A prompt, then two more drafts of one token each."""
    yield from ((0, 13), (13, 14), (14, 15))


@pytest.mark.parametrize("int8", [False, True])
def test_drafts_are_those_of_the_formula(target: str, int8: bool, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    weights = write_block(path, int8=int8)
    model = opened(target, path)
    drafter = Drafter(model)
    embed = model.weights.matrix("embed").dequantize()
    tied = model.config.tie_embeddings
    head = embed if tied else model.weights.matrix("head").dequantize()
    plain = PlainBlock(weights, embed, head, model)
    states = drafter.states(TOKENS[:13], 0)
    for start, end in rounds():
        chunk = TOKENS[start + 1 : end + 1]
        wanted_state, wanted = plain.draft(chunk, states)
        states, logits = drafter.draft(chunk, states, start)
        torch.testing.assert_close(states[0], wanted_state, atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_a_small_head_gives_the_logits_of_its_tokens_alone(target: str, tmp_path: Path) -> None:
    logits = {}
    for name, ids in (("all", None), ("some", IDS)):
        path = tmp_path / f"{name}.safetensors"
        write_block(path, int8=True, ids=ids)
        drafter = Drafter(opened(target, path))
        _, logits[name] = drafter.draft(TOKENS[1:14], drafter.states(TOKENS[:13], 0), 0)
    torch.testing.assert_close(logits["some"][IDS], logits["all"][IDS])
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[IDS] = False
    assert (logits["some"][others] == -torch.inf).all()


def test_formats_are_those_of_the_files(tmp_path: Path) -> None:
    """The block keeps its int8, and the small head the format of the head that it is cut from."""
    path = tmp_path / "block.safetensors"
    weights = write_block(path, int8=True, ids=IDS)
    model = opened(str(write_mixed_gguf(tmp_path / "tiny.gguf")), path)
    config = program_config(model, SPECULATING, "inductor")
    assert config.formats.layers[LAYERS].qkv == config.formats.layers[LAYERS].eh_proj == "i8g32"
    packed = dict(pack_weights(model.weights, config.model, config.formats))
    prefix = f"weight.layers.{LAYERS}."
    got = unpack(packed[f"{prefix}eh_proj"], "i8g32", HIDDEN, 2 * HIDDEN)
    torch.testing.assert_close(got, weights["eh_proj"], atol=0, rtol=0)
    head = unpack(packed[f"{prefix}draft_head"], config.formats.head, len(IDS), HIDDEN)
    assert torch.equal(head, model.weights.matrix("embed").dequantize()[IDS])
    assert torch.equal(packed[f"{prefix}draft_ids"], IDS)


def test_every_stage_of_a_draft_can_be_traced(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    write_block(path, int8=True, ids=IDS)
    model = opened(str(write_mixed_gguf(tmp_path / "tiny.gguf")), path)
    config = program_config(model, SPECULATING, "inductor")
    calls = mtp_calls(config, VariantKey("prefill", 32, 4))
    texts = {call.stage.kind: canonical_text(trace_stage(call.stage)) for call in calls}
    assert list(texts) == ["mtp_embed", "layer", "mtp_head"]
    assert f"i64[{len(IDS)}]" in texts["mtp_head"]


def test_without_drafts_nothing_of_the_block_is_there(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    write_block(path, ids=IDS)
    plain = open_model(folder, report=lambda line: None)
    model = opened(folder, path)
    assert (model.config.mtp_layers, model.config.mtp_vocab) == (1, len(IDS))
    config = program_config(model, PRESET, "inductor")
    assert config == program_config(plain, PRESET, "inductor")
    packed = dict(pack_weights(model.weights, config.model, config.formats))
    assert not any(name.startswith(f"weight.layers.{LAYERS}.") for name in packed)
    key = packed_key(model.source, config.model, config.formats)
    assert key == packed_key(plain.source, config.model, config.formats)


def test_another_block_is_packed_anew(folder: str, tmp_path: Path) -> None:
    keys = set()
    for name in ("one", "two"):
        write_block(tmp_path / name)
        model = opened(folder, tmp_path / name)
        config = program_config(model, SPECULATING, "inductor")
        keys.add(packed_key(model.source, config.model, config.formats).id)
    assert len(keys) == 2


def test_answers_are_those_without_the_block(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    write_block(path, int8=True, ids=IDS)
    answers = []
    for preset, block in ((PRESET, None), (SPECULATING, str(path))):
        options = StartOptions(folder, preset, "eager", tmp_path / "store", mtp=block)
        executor, _, _ = start_executor(options, require_cache, lambda line: None)
        requests = [
            Submit("greedy", tuple(TOKENS[:9]), SamplingParams(), 12),
            Submit("seeded", tuple(TOKENS[9:14]), SamplingParams(temperature=0.8, seed=3), 12),
        ]
        tokens: dict[str, tuple[int, ...]] = {"greedy": (), "seeded": ()}
        for delta in run_requests(executor, requests):
            tokens[delta.request_id] += delta.token_ids
        executor.close()
        answers.append(tokens)
    assert answers[0] == answers[1]


# --- what is wrong with a file --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({stored("enorm"): None}, r"1 tensors of the MTP block are missing: model\.layers\.3\.eno"),
        ({stored("gate"): None, stored("up"): None}, "2 tensors .*gate_proj.weight, .*up_proj.wei"),
        ({stored("eh_proj"): torch.ones(64, 64)}, r"'model\.layers\.3\.eh_proj\.weight' has shape"),
        ({"model.layers.2.enorm.weight": torch.ones(64)}, r"'model\.layers\.2\.enorm\.weight'"),
        ({stored("o"): torch.ones(64, 64, dtype=torch.int8)}, r"missing: .*o_proj\.weight_scale"),
        ({stored("o"): torch.ones(64, 64, dtype=torch.int16)}, r"o_proj\.weight' is I16"),
        ({"draft_ids": torch.tensor([3, 2])}, "'draft_ids' must be ascending"),
        ({"draft_ids": torch.tensor([2, 2])}, "'draft_ids' must be ascending"),
        ({"draft_ids": torch.tensor([-1, 2])}, r"between 0 and 199"),
        ({"draft_ids": torch.tensor([3, 200])}, r"between 0 and 199"),
        ({"draft_ids": torch.tensor([0.5, 1.5])}, r"'draft_ids' is F32"),
    ],
)
def test_a_wrong_tensor_is_named(
    tensors: dict[str, Any], message: str, folder: str, tmp_path: Path
) -> None:
    path = tmp_path / "block.safetensors"
    write_block(path)
    change(path, **tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        opened(folder, path)
    assert f"--mtp {path}" in str(error.value)


def test_a_missing_or_damaged_file_is_named(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    with pytest.raises(CheckpointError, match=re.escape(f"--mtp {path}: no such file")):
        opened(folder, path)
    for data in (b"not a safetensors file", b"", (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"--mtp {path}: not a safetensors file"):
            opened(folder, path)
    write_block(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=f"--mtp {path}: damaged or truncated"):
        opened(folder, path)


def test_a_model_with_an_mtp_layer_takes_no_block(tmp_path: Path) -> None:
    from tests.models.mtp_folder import write_checkpoint

    write_checkpoint("glm4_moe", tmp_path)
    path = tmp_path / "block"
    write_block(path)
    with pytest.raises(CheckpointError, match="has an MTP layer of its own"):
        opened(str(tmp_path), path)


# --- the default model's --------------------------------------------------------------------------


def test_the_packaged_block_was_made_for_the_default_model() -> None:
    block = read_mtp_file(packaged_block(DEFAULT_MODEL))
    assert block.metadata["target_sha256"] == SMOLLM2.member_sha256
    assert block.metadata["license"] == "Apache-2.0"
    assert block.path.stat().st_size < 10 << 20


@pytest.mark.slow
def test_the_default_model_has_its_block() -> None:
    model = open_model(DEFAULT_MODEL, report=lambda line: None)
    assert (model.config.mtp_layers, model.config.mtp_vocab > 0) == (1, True)
    digest = hashlib.sha256(model.source.path.read_bytes()).hexdigest()
    assert digest == read_mtp_file(packaged_block(DEFAULT_MODEL)).metadata["target_sha256"]
