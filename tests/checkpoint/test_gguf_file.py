"""The GGUF reader: against the `gguf` package's writer, and on damaged files."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.files import write_gguf
from trnc.checkpoint.gguf_file import GgufFile
from trnc.errors import CheckpointError

METADATA = {
    "a.int": 7,
    "a.float": 0.5,
    "a.flag": True,
    "a.text": "für dich 😀",
    "a.words": ["", "Ġt", "日本"],
    "a.numbers": [3, -1, 4],
    "a.floats": [0.25, -2.0],
}


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "m": np.arange(6, dtype=np.float32).reshape(2, 3),
        "h": np.arange(4, dtype=np.float16),
        "q": (np.zeros((2, 210), dtype=np.uint8), gguf.GGMLQuantizationType.Q6_K),
    }
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write_gguf(path, metadata=METADATA, tensors=tensors)


def test_reads_metadata_and_tensors(small_gguf: Path) -> None:
    file = GgufFile(small_gguf)
    assert file.metadata["general.architecture"] == "llama"
    for key, value in METADATA.items():
        assert file.metadata[key] == (tuple(value) if isinstance(value, list) else value)
    assert {n: (i.shape, i.type) for n, i in file.tensors.items()} == {
        "m": ((2, 3), "F32"),
        "h": ((4,), "F16"),
        "q": ((2, 256), "Q6_K"),
    }
    assert file.floats("m") == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert np.frombuffer(file.data("h"), np.float16).tolist() == [0, 1, 2, 3]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_truncated_file_is_refused(small_gguf: Path, data: st.DataObject) -> None:
    whole = small_gguf.read_bytes()
    with GgufFile(small_gguf) as file:
        end = max(info.offset + info.size for info in file.tensors.values())
    cut = data.draw(st.integers(0, end - 1))
    path = small_gguf.with_name("cut.gguf")
    path.write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        GgufFile(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_never_escapes_as_another_error(
    small_gguf: Path, data: st.DataObject
) -> None:
    damaged = bytearray(small_gguf.read_bytes())
    at = data.draw(st.integers(0, 400))
    damaged[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path = small_gguf.with_name("damaged.gguf")
    path.write_bytes(damaged)
    with suppress(CheckpointError):
        GgufFile(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "little endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 8, 100) + b"cut", "truncated"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)
