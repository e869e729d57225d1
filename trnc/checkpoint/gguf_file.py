"""A reader of GGUF files: metadata, the tensor list, and tensors' bytes over a memory map.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian. It is our own because the `gguf` package takes seconds over a vocabulary of 49k tokens;
that package is used (in `weights`) for the block formats that we do not keep as they are. Imports
no torch: the API process reads the tokenizer from here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trnc.errors import CheckpointError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))

# ggml type number -> (name, values in a block, bytes of a block): the ones that are kept as stored.
_NATIVE_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` is row-major (outermost first), `offset` and `size` are in bytes."""

    name: str
    type: str
    type_number: int
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """An open GGUF file. `metadata` maps a key to a number, bool, str, or tuple of these."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header. Raises CheckpointError if it is not a whole GGUF."""
        self.path = path
        try:
            with path.open("rb") as file:
                # A private map is writable, so torch takes its bytes without a warning; nothing
                # is ever written through it.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        with _errors_name(path):
            self.metadata, self.tensors = _read_header(self._map)

    def data(self, name: str) -> memoryview:
        """Return the bytes of a tensor (a view of the map, valid while the file is open)."""
        info = self.tensors[name]
        return memoryview(self._map)[info.offset : info.offset + info.size]

    def floats(self, name: str) -> tuple[float, ...]:
        """Return the values of a small F32 tensor. Raises CheckpointError for another type."""
        info = self.tensors[name]
        if info.type != "F32":
            raise CheckpointError(f"tensor '{name}' must be F32, got {info.type}")
        return struct.unpack(f"<{info.size // 4}f", self.data(name))

    def close(self) -> None:
        """Unmap the file, unless views of it are alive: then it is unmapped with the last one."""
        with suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        """Return the file; it is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (struct.error, IndexError):
        raise CheckpointError(f"{path}: the file is truncated; download it again") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: a string is not UTF-8: {error}") from None


class _Cursor:
    """Reads values one after the other; running off the end raises struct.error."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        if struct.calcsize(f"<{code}") * count > len(self.data) - self.at:
            raise struct.error  # before struct allocates for a count that is nonsense
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> tuple[str, ...]:
        data, at, end = self.data, self.at, len(self.data)
        length_of = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            if at > end:
                raise struct.error
            result.append(data[start:at].decode())
        self.at = at
        return tuple(result)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.numbers("I")[0], self.numbers("Q")[0]
            if item == _STRING:
                return self.strings(count)
            return self.numbers(_scalar(item), count)
        return self.numbers(_scalar(kind))[0]


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise CheckpointError(f"metadata value of unknown type {kind}")
    return _SCALARS[kind]


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if data[:4] != _MAGIC:
        raise CheckpointError("not a GGUF file (it does not start with 'GGUF')")
    cursor = _Cursor(data, 4)
    version = cursor.numbers("I")[0]
    if version not in (2, 3):
        raise CheckpointError(
            f"GGUF version {version} is not supported (only 2 and 3, little endian)"
        )
    tensor_count, key_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    entries = []
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = cursor.numbers("Q", cursor.numbers("I")[0])
        entries.append((name, dimensions[::-1], cursor.numbers("I")[0], cursor.numbers("Q")[0]))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise CheckpointError(f"'general.alignment' must be a multiple of 8, got {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    infos = (_tensor_info(*entry, start=start, end=len(data)) for entry in entries)
    return metadata, {info.name: info for info in infos}


def _tensor_info(
    name: str, shape: tuple[int, ...], number: int, offset: int, *, start: int, end: int
) -> TensorInfo:
    kind, block, block_bytes = _NATIVE_TYPES.get(number) or _foreign_type(name, number)
    width = shape[-1] if shape else 1
    if width % block:
        raise CheckpointError(f"tensor '{name}': a row of {width} is not whole {kind} blocks")
    size = width // block * block_bytes
    for extent in shape[:-1]:
        size *= extent
    if start + offset + size > end:
        raise CheckpointError(f"the file is truncated at tensor '{name}'; download it again")
    return TensorInfo(name, kind, number, shape, start + offset, size)


def _foreign_type(name: str, number: int) -> tuple[str, int, int]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # slow import

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise CheckpointError(f"tensor '{name}' has the unknown ggml type {number}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return kind.name, block, block_bytes
