"""Weights under one canonical naming, whatever file they come from.

`embed`, `layers.{i}.attn_norm|q|k|v|o|mlp_norm|gate|up|down`, `norm`, `head`; `q_bias` and so on
beside a matrix that has one, `q_norm` and `k_norm` where the config says so, and no `head` where it
is tied. A weight is loaded when it is asked for, so a dequantised model is never held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from trnc.checkpoint.gguf_file import GgufFile, TensorInfo
from trnc.checkpoint.layouts import Dense, Int4Groups, Int8Groups, Layout
from trnc.checkpoint.safetensors_folder import SafetensorsFolder
from trnc.checkpoint.source import Source
from trnc.errors import CheckpointError

Weight = Layout | Tensor


class WeightShapes(Protocol):
    """What this module needs of a `ModelConfig` (which lives above it)."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def qk_norm(self) -> bool: ...  # noqa: D102
    @property
    def qkv_bias(self) -> bool: ...  # noqa: D102
    @property
    def output_bias(self) -> bool: ...  # noqa: D102
    @property
    def mlp_bias(self) -> bool: ...  # noqa: D102
    @property
    def tie_embeddings(self) -> bool: ...  # noqa: D102


class Weights(Mapping[str, Weight]):
    """Canonical name -> matrix (a layout) or vector (f32 Tensor [n]), loaded at each access."""

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
        """Load a norm's weight or a bias, f32 [n]."""
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
    if source.kind == "gguf":
        return _open_gguf(file or GgufFile(source.path), config, expected)
    return _open_folder(source, config, expected)


def weight_shapes(config: WeightShapes) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of every weight, in the order of the computation."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)}
    layer |= {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    layer["o"] = (hidden, q)
    if config.output_bias:
        layer["o_bias"] = (hidden,)
    layer |= {"mlp_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden)}
    layer["down"] = (hidden, inner)
    if config.mlp_bias:
        layer |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (hidden,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


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
}
_FOLDER_DTYPES = ("F32", "F16", "BF16")


def folder_name(name: str) -> str:
    """Return how a Hugging Face folder spells a canonical name."""
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

    def ignored(name: str) -> bool:
        # A tied checkpoint may hold a copy of its head, and old ones their rope frequencies.
        return name.endswith(".rotary_emb.inv_freq") or (
            config.tie_embeddings and name == "lm_head.weight"
        )

    shapes = {name: info.shape for name, info in folder.tensors.items()}
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
