"""Weights under one canonical naming, whatever file they come from.

`embed`, `layers.{i}.attn_norm|q|k|v|o|mlp_norm|gate|up|down`, `norm`, `head`, and what else
`trnc.checkpoint.shapes` lists. A weight is loaded when it is asked for, so a dequantised model is
never held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trnc.checkpoint.gguf_file import GgufFile, TensorInfo
from trnc.checkpoint.layouts import GROUP, Dense, Int4Groups, Int8Groups, Layout
from trnc.checkpoint.mtp_file import DRAFT_IDS, SCALE, read_mtp_file
from trnc.checkpoint.safetensors_folder import SafetensorsFolder
from trnc.checkpoint.shapes import WeightShapes, mtp_layers, weight_shapes
from trnc.checkpoint.source import Source
from trnc.errors import CheckpointError

Weight = Layout | Tensor


class Weights(Mapping[str, Weight]):
    """Canonical name -> matrix (a layout) or vector (a Tensor [n]), loaded at each access."""

    def __init__(self, *, stored: Mapping[str, str], load: Callable[[str], Weight]) -> None:
        """Take the stored type of each weight, in the order of the computation, and a loader."""
        self._stored = dict(stored)
        self._load = load

    def stored_type(self, name: str) -> str:
        """Return the type in the file, such as F32, BF16, Q4_1 or Q6_K; loads no data."""
        return self._stored[name]

    def __getitem__(self, name: str) -> Weight:
        """Load one weight. Raises CheckpointError if its stored type cannot be read."""
        if name not in self._stored:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order of the computation."""
        return iter(self._stored)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._stored)

    def matrix(self, name: str) -> Layout:
        """Load a weight that is a matrix [N, K]."""
        value = self[name]
        if isinstance(value, Tensor):
            raise TypeError(f"{name} is a vector")
        return value

    def vector(self, name: str) -> Tensor:
        """Load a norm's weight or a bias, f32 [n], or the ids of `draft_ids`, i64 [n]."""
        value = self[name]
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a matrix")
        return value


def load_weights(source: Source, config: WeightShapes, file: GgufFile | None = None) -> Weights:
    """Open the weights of a model and check all names and shapes at once; loads no data yet.

    `file` is the model's GGUF file if that is open already.

    Raises:
        CheckpointError: a tensor that is missing, not expected, or of another shape; the message
            names it.
    """
    expected = weight_shapes(config)
    if source.mtp is None or not mtp_layers(config):
        return _open(source, config, expected, file)
    prefixes = tuple(f"layers.{layer}." for layer in mtp_layers(config))
    block = {name: shape for name, shape in expected.items() if name.startswith(prefixes)}
    main = {name: shape for name, shape in expected.items() if name not in block}
    return _join(_open(source, config, main, file), _open_block(source.mtp, block, config))


def _open(
    source: Source,
    config: WeightShapes,
    expected: dict[str, tuple[int, ...]],
    file: GgufFile | None,
) -> Weights:
    if source.kind == "gguf":
        return _open_gguf(file or GgufFile(source.path), config, expected)
    return _open_folder(source, config, expected)


def _join(first: Weights, second: Weights) -> Weights:
    stored = {name: part.stored_type(name) for part in (first, second) for name in part}
    return Weights(stored=stored, load=lambda name: second[name] if name in second else first[name])


def _check(
    where: object,
    stored: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    spelled: Callable[[str], str],
    ignored: Callable[[str], bool],
) -> None:
    wanted = {spelled(name): shape for name, shape in expected.items()}
    for name, shape in wanted.items():
        if name not in stored:
            raise CheckpointError(f"{where}: tensor '{name}' is missing")
        if stored[name] != shape:
            raise CheckpointError(
                f"{where}: tensor '{name}' has shape {list(stored[name])}, but the config asks for"
                f" {list(shape)}"
            )
    extra = sorted(name for name in stored if name not in wanted and not ignored(name))
    if extra:
        raise CheckpointError(
            f"{where}: tensor '{extra[0]}' (one of {len(extra)}) has no place in this architecture;"
            " leaving it out would change the model"
        )


# --- Hugging Face folders -------------------------------------------------------------------------

_FOLDER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_norm": "shared_head.norm",
}
_FOLDER_DTYPES = ("F32", "F16", "BF16")


def folder_name(name: str) -> str:
    """Return how a Hugging Face folder spells a canonical name."""
    match name.split("."):
        case ["layers", layer, "experts", expert, leaf]:
            return f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight"
        case ["layers", layer, "router_correction"]:
            return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        case _:
            return _spell(name, _FOLDER_NAMES, "model.layers.")


def _spell(name: str, table: Mapping[str, str], layer_prefix: str) -> str:
    """Translate a canonical name, e.g. `layers.3.q_bias`, through a table of its last part."""
    *layer, leaf = name.split(".")
    prefix = f"{layer_prefix}{layer[1]}." if layer else ""
    if leaf.endswith("_bias"):
        return f"{prefix}{table[leaf.removesuffix('_bias')]}.bias"
    return f"{prefix}{table[leaf]}.weight"


def _open_folder(
    source: Source, config: WeightShapes, expected: dict[str, tuple[int, ...]]
) -> Weights:
    folder = SafetensorsFolder(source.path)
    # A tied checkpoint may hold a copy of its head; an MTP layer may hold copies of the embedding
    # and of the head, which are tied to the model's own.
    copies = {"lm_head.weight"} if config.tie_embeddings else set()
    for layer in mtp_layers(config):
        prefix = f"model.layers.{layer}."
        copies |= {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}

    def ignored(name: str) -> bool:
        return name.endswith(".rotary_emb.inv_freq") or name in copies  # old ones have frequencies

    shapes = {name: info.shape for name, info in folder.tensors.items()}
    _check_mtp(source.path, shapes, config, expected)
    _check(source.path, shapes, expected, folder_name, ignored)

    def load(name: str) -> Weight:
        stored = folder.tensors[folder_name(name)]
        if stored.dtype not in _FOLDER_DTYPES:
            raise CheckpointError(
                f"{stored.file}: tensor '{folder_name(name)}' is {stored.dtype}; only"
                f" {', '.join(_FOLDER_DTYPES)} are supported"
            )
        tensor = folder.tensor(folder_name(name))
        return Dense(tensor) if tensor.ndim == 2 else tensor.float()

    stored = {name: folder.tensors[folder_name(name)].dtype for name in expected}
    return Weights(stored=stored, load=load)


def _check_mtp(
    where: object,
    stored: Mapping[str, tuple[int, ...]],
    config: WeightShapes,
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise where an MTP layer that the config announces is not, or not all, in the folder."""
    prefixes = tuple(f"layers.{layer}." for layer in mtp_layers(config))
    names = [folder_name(name) for name in expected if name.startswith(prefixes)]
    missing = [name for name in names if name not in stored]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(names)} tensors of the MTP layer are missing:"
            f" {', '.join(missing[:8])}{', ...' if missing[8:] else ''}. Download them again, or"
            " set 'num_nextn_predict_layers' to 0 in config.json to do without the MTP layer."
        )


# --- an MTP block in a file of its own ------------------------------------------------------------

_BLOCK_DTYPES = (*_FOLDER_DTYPES, "I8")
_ID_DTYPES = ("I32", "I64")


def _open_block(path: Path, expected: dict[str, tuple[int, ...]], config: WeightShapes) -> Weights:
    header = read_mtp_file(path)
    names = {
        name: DRAFT_IDS if name.endswith(DRAFT_IDS) else folder_name(name) for name in expected
    }
    shapes = {name: shape for name, (_, shape) in header.tensors.items()}
    scales = {
        names[name] + SCALE: (*shape[:-1], shape[-1] // GROUP)
        for name, shape in expected.items()
        if header.tensors.get(names[name], ("",))[0] == "I8"
    }
    missing = [name for name in (*names.values(), *scales) if name not in shapes]
    if missing:
        raise CheckpointError(
            f"--mtp {path}: {len(missing)} tensors of the MTP block are missing:"
            f" {', '.join(missing[:8])}{', ...' if missing[8:] else ''}"
        )
    wanted = {names[name]: shape for name, shape in expected.items()} | scales
    _check(f"--mtp {path}", shapes, wanted, str, lambda _: False)
    for name, (dtype, _) in header.tensors.items():
        known = _BLOCK_DTYPES if name != DRAFT_IDS else _ID_DTYPES
        if dtype not in known:
            raise CheckpointError(
                f"--mtp {path}: tensor '{name}' is {dtype}; it must be {' or '.join(known)}"
            )
    try:
        handle: Any = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"--mtp {path}: damaged or truncated ({error})") from None
    if config.mtp_vocab:
        _check_draft_ids(path, handle.get_tensor(DRAFT_IDS), config.vocab_size)

    def load(name: str) -> Weight:
        tensor: Tensor = handle.get_tensor(names[name])
        if names[name] == DRAFT_IDS:
            return tensor.long()
        if names[name] + SCALE in scales:
            return Int8Groups(tensor, handle.get_tensor(names[name] + SCALE))
        return Dense(tensor) if tensor.ndim == 2 else tensor.float()

    stored = {name: header.tensors[names[name]][0] for name in expected}
    return Weights(stored={n: "Q8_0" if t == "I8" else t for n, t in stored.items()}, load=load)


def _check_draft_ids(path: Path, ids: Tensor, vocab: int) -> None:
    if not (ids[1:] > ids[:-1]).all():
        raise CheckpointError(f"--mtp {path}: '{DRAFT_IDS}' must be ascending, each token once")
    if ids[0] < 0 or ids[-1] >= vocab:
        raise CheckpointError(
            f"--mtp {path}: '{DRAFT_IDS}' must be between 0 and {vocab - 1}, got"
            f" {int(ids[0])} to {int(ids[-1])}"
        )


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
}


def _gguf_name(name: str) -> str:
    return _spell(name, _GGUF_NAMES, "blk.")


def _open_gguf(
    file: GgufFile, config: WeightShapes, expected: dict[str, tuple[int, ...]]
) -> Weights:
    shapes = {name: info.shape for name, info in file.tensors.items()}
    _check(file.path, shapes, expected, _gguf_name, lambda name: name == "rope_freqs.weight")
    # llama.cpp rotates interleaved pairs in this architecture, and its converter permutes rows.
    permuted = file.metadata["general.architecture"] == "llama"

    def load(name: str) -> Weight:
        weight = _read_gguf(file, file.tensors[_gguf_name(name)])
        leaf = name.rsplit(".", 1)[-1]
        if not permuted or leaf not in ("q", "k", "q_bias", "k_bias"):
            return weight
        index = _half_split_rows(expected[name][0], config.head_dim)
        return weight[index] if isinstance(weight, Tensor) else weight.permute_rows(index)

    stored = {name: file.tensors[_gguf_name(name)].type for name in expected}
    return Weights(stored=stored, load=load)


def _half_split_rows(rows: int, head_dim: int) -> Tensor:
    """Return int64 [rows]: where each row of (d, d + dim/2) pairs is among interleaved pairs."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)


def _read_gguf(file: GgufFile, info: TensorInfo) -> Weight:
    if len(info.shape) == 2 and info.type in _BLOCK_READERS:
        blocks = torch.frombuffer(file.data(info.name), dtype=torch.uint8)
        return _BLOCK_READERS[info.type](blocks.view(*info.shape[:1], info.shape[1] // 32, -1))
    if info.type in _FLOAT_TYPES:
        flat = torch.frombuffer(file.data(info.name), dtype=_FLOAT_TYPES[info.type])
        tensor = flat.view(info.shape)
    else:
        tensor = _dequantize(file, info)
    return Dense(tensor) if tensor.ndim == 2 else tensor.float()


_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the f16 at byte `at` of each block [N, G, bytes] as [N, G]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [N, G, 16] to [N, G * 32]: the low halves of a group come first."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)


def _q4_0(blocks: Tensor) -> Layout:
    return Int4Groups(_nibbles(blocks[..., 2:]), _half(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Layout:
    return Int4Groups(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Layout:
    q = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return Int8Groups(q, _half(blocks, 0))


_BLOCK_READERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _dequantize(file: GgufFile, info: TensorInfo) -> Tensor:
    """Return f32 of `info.shape`, through the `gguf` package."""
    import numpy as np  # only for block formats that are not kept
    from gguf.constants import GGMLQuantizationType  # slow import
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(info.type_number)
    rows = np.frombuffer(file.data(info.name), dtype=np.uint8).reshape(*info.shape[:-1], -1)
    try:
        return torch.from_numpy(dequantize(rows, kind))
    except (NotImplementedError, KeyError):
        raise CheckpointError(
            f"{file.path}: tensor '{info.name}' is {info.type}, which cannot be dequantised"
        ) from None
