"""Tensors of a Hugging Face folder: one `model.safetensors`, or shards with an index.

Files are memory-mapped and each tensor is read when it is asked for, in its stored dtype.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trnc.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is; `dtype` as the file spells it (`F32`, `BF16`, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFolder:
    """The tensors of a folder by name. Only headers are read at first."""

    def __init__(self, folder: Path) -> None:
        """Open every shard. Raises CheckpointError naming the file that is missing or damaged."""
        self.folder = folder
        self._open = {file: _open(file) for file in _shards(folder)}
        self.tensors = {
            name: StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
            for file, handle in self._open.items()
            for name in handle.keys()  # noqa: SIM118 - a handle is not a mapping
            for part in [handle.get_slice(name)]
        }

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype, over the memory map where that is possible."""
        tensor: Tensor = self._open[self.tensors[name].file].get_tensor(name)
        return tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: the index names this shard, but it is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: damaged or truncated ({error}); download it again"
        ) from None


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index: {error!r}") from None
        return [folder / name for name in sorted(names)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise CheckpointError(
        f"{folder}: no {_SINGLE} and no {_INDEX}. Only safetensors are read; convert other"
        " formats first."
    )
