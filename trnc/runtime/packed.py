"""Packed weights on disk: a checkpoint is packed once, and later starts read what that gave.

In an artifact, `weights.bin` holds the tensors one after the other, and `index.json` says where. A
start compares the sizes of both with the record, the sha-256 of the index, and a sum over the
64-bit words of each tensor, which any flipped bit changes and which costs little more than reading
them; `trnc cache verify` compares the sha-256 of all. What differs is packed again.

The tensors are read into one block of memory that asks for huge pages: a decode step streams all of
them, and with pages of 4 KiB (also those of a mapped file) it waits for address translation.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from trnc.checkpoint.source import Report, Source
from trnc.compiler.store import ArtifactKey
from trnc.errors import StoreError
from trnc.models.config import ModelConfig
from trnc.models.stage import WeightFormats
from trnc.runtime.packed_store import checkpoint_factors, discard_superseded, packed_store

DATA_FILE = "weights.bin"
INDEX_FILE = "index.json"
KIND = "weights"

_ALIGNMENT = 64  # bytes; a cache line, and the widest vector register
_SOURCES = ("checkpoint", "models", "ops")

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor of the file: `offset` and `size` in bytes, `total` is what `_total` says of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    total: int


def packed_key(source: Source, model: ModelConfig, formats: WeightFormats) -> ArtifactKey:
    """Return the key of a checkpoint's packed weights.

    Its sources are those of all that reads or packs a checkpoint.
    """
    factors = (
        checkpoint_factors(source.path)
        | _block_factors(source, model)
        | {
            "model": _digest(asdict(model)),
            "formats": _digest(asdict(formats)),
            "sources": _sources_digest(),
            "torch": torch.__version__,
        }
    )
    return ArtifactKey.of(KIND, factors)


def _block_factors(source: Source, model: ModelConfig) -> dict[str, str]:
    """Return what tells the file of an MTP block from others, where it is packed, too."""
    if source.mtp is None or not model.mtp_layers:
        return {}
    return {f"mtp {name}": value for name, value in checkpoint_factors(source.mtp).items()}


def load_packed(
    key: ArtifactKey,
    root: Path,
    pack: Callable[[], Iterable[tuple[str, Tensor]]],
    report: Report,
) -> dict[str, Tensor]:
    """Return the tensors of `pack()`, from the store in `root` if they are there and whole.

    Otherwise they are packed and kept. Where they cannot be kept, a line says why.
    """
    store = packed_store(root, report)
    try:
        for _ in range(2):
            folder = store.get_or_build(key, lambda out: write_packed(pack(), out))
            if store.builds:
                discard_superseded(store, key)
            with suppress(FileNotFoundError):  # somebody has just removed it
                if (tensors := read_packed(folder)) is not None:
                    return tensors
                report(f"packed weights: {folder} is damaged, packing again")
                store.discard(key.id)
        reason = "they do not stay as they were written"
    except (StoreError, OSError) as error:
        cause = error.__cause__ or error
        reason = str(cause.strerror if isinstance(cause, OSError) else cause)
    report(f"packed weights: cannot be kept in {root} ({reason}), so every start packs them")
    return dict(pack())


def write_packed(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors, one at a time, as the files of an artifact."""
    index = []
    with (folder / DATA_FILE).open("wb") as file:
        for name, tensor in tensors:
            data = tensor.contiguous().flatten().view(torch.uint8).numpy()
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            index.append(Packed(name, dtype, shape, file.tell(), data.nbytes, _total(data)))
            file.write(data.data)
            file.write(bytes(-data.nbytes % _ALIGNMENT))
    (folder / INDEX_FILE).write_bytes(msgspec.json.encode(index))


def read_packed(folder: Path) -> dict[str, Tensor] | None:
    """Read an artifact that `write_packed` wrote; None if a tensor is not what was written."""
    index = msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=list[Packed])
    arena = _read(folder / DATA_FILE)
    data = np.frombuffer(arena, dtype=np.uint8)
    if any(_total(data[p.offset : p.offset + p.size]) != p.total for p in index):
        return None
    return {packed.name: _tensor(arena, packed) for packed in index}


def _read(path: Path) -> mmap.mmap:
    """Read a file into memory of its own, in huge pages where the system has them."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            arena.madvise(mmap.MADV_HUGEPAGE)
        view, done = memoryview(arena), 0
        while count := file.readinto(view[done:]):  # at most 2 GiB at once
            done += count
    return arena


def _tensor(arena: mmap.mmap, packed: Packed) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    count = packed.size // dtype.itemsize
    flat = torch.frombuffer(arena, dtype=dtype, count=count, offset=packed.offset)
    return flat.view(packed.shape)


def _total(data: Bytes) -> int:
    """Return the sum of the 64-bit words, modulo 2**64; the last one is filled with zeros.

    numpy sums on this thread alone: torch would wake its pool, which waits for busy cores.
    """
    words = data[: data.nbytes // 8 * 8].view(np.uint64)
    rest = int.from_bytes(data[words.nbytes :].tobytes(), "little")
    return (int(words.sum(dtype=np.uint64)) + rest) % 2**64


def _sources_digest() -> str:
    root = Path(str(resources.files("trnc")))
    files = [*(p for name in _SOURCES for p in sorted((root / name).glob("*.py"))), Path(__file__)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()
