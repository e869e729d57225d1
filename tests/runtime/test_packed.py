"""Packed weights: packed once, read afterwards, packed again when anything is different."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.tiny import PRESET, tiny_model, write_mixed_gguf
from tests.runtime.serving import alone
from trnc.compiler.store import Store
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.models import weights
from trnc.runtime.executor import ProgramExecutor
from trnc.runtime.packed import DATA_FILE, INDEX_FILE, read_packed, write_packed
from trnc.runtime.packed_store import packed_store
from trnc.runtime.start import StartOptions, require_cache, start_executor

HASH_LIMIT = 20_000
REQUEST = Submit("it", tuple(range(3, 40)), SamplingParams(logprobs=3), 6)


class Starts:
    """Starts of one checkpoint of the test's own; `packings` counts the matrices packed by each."""

    def __init__(self, options: StartOptions, packings: list[str]) -> None:
        assert options.packed is not None
        self.options = options
        self.root = options.packed
        self.log: list[str] = []
        self._packings = packings

    @property
    def store(self) -> Store:
        return packed_store(self.root, self.log.append)

    def file(self, name: str) -> Path:
        (entry,) = self.store.entries()
        return entry.path / name

    def start(self) -> tuple[int, object]:
        """Start; return how many matrices were packed, and the answer to the request."""
        self._packings.clear()
        executor, _, _ = start_executor(self.options, require_cache, self.log.append)
        try:
            return len(self._packings), alone(executor, REQUEST)
        finally:
            executor.close()


@pytest.fixture
def starts(
    quantized_options: StartOptions,
    quantized: ProgramExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Starts:
    packings: list[str] = []
    pack = weights.ops.pack

    def counting(matrix: object, format: str) -> torch.Tensor:
        packings.append(format)
        return pack(matrix, format)  # type: ignore[arg-type]

    monkeypatch.setattr(weights.ops, "pack", counting)
    # The tensors of a real model are not hashed at a start, its index is.
    monkeypatch.setattr("trnc.runtime.packed_store.HASH_LIMIT", HASH_LIMIT)
    model = tmp_path / "mixed.gguf"
    model.write_bytes(Path(quantized_options.model).read_bytes())
    options = replace(quantized_options, model=str(model), packed=tmp_path / "packed")
    return Starts(options, packings)


def test_the_second_start_packs_nothing_and_answers_the_same(
    starts: Starts, quantized: ProgramExecutor
) -> None:
    answer = alone(quantized, REQUEST)  # of an executor that keeps no packed weights
    first, second = starts.start(), starts.start()
    assert first[0] > 0
    assert second[0] == 0
    assert first[1] == second[1] == answer
    assert starts.log == []


def test_what_is_kept_is_what_was_packed_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "bytes": torch.randint(0, 256, (3, 7), dtype=torch.uint8),
        "f32": torch.randn(5, 3),
        "bf16": torch.randn(9).bfloat16(),
        "strided": torch.randn(4, 6).t(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    write_packed(tensors.items(), tmp_path)
    read = read_packed(tmp_path)
    assert read is not None
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        bits = tensor.contiguous().view(torch.uint8)
        assert torch.equal(read[name].view(torch.uint8), bits), name
        assert read[name].data_ptr() % 64 == 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_each_backend_has_its_own(starts: Starts, backend: str) -> None:
    starts.start()
    starts.options = replace(starts.options, backend=backend)  # type: ignore[arg-type]
    packed, _ = starts.start()
    assert (packed == 0) == (backend == "inductor")


def test_a_changed_checkpoint_is_packed_again(starts: Starts) -> None:
    before = starts.start()
    data = bytearray(Path(starts.options.model).read_bytes())
    data[-1] ^= 1  # the size stays; the last weight does not
    Path(starts.options.model).write_bytes(data)
    after = starts.start()
    assert after[0] == before[0]
    assert starts.start()[0] == 0


def test_a_changed_folder_is_packed_again(
    f32_options: StartOptions, starts: Starts, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    tiny_model("qwen3-biased").save_pretrained(folder)
    starts.options = replace(f32_options, model=str(folder), packed=starts.root)
    starts.options = replace(starts.options, backend="eager")
    packed, answer = starts.start()
    assert starts.start() == (0, answer)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert starts.start() == (packed, answer)


def truncated(data: bytes) -> bytes:
    return data[:-1000]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


@pytest.mark.parametrize("name", [DATA_FILE, INDEX_FILE, "artifact.json"])
@pytest.mark.parametrize("damage", [truncated, flipped, lambda data: b""])
def test_a_damaged_file_is_told_and_packed_again(
    starts: Starts, name: str, damage: Callable[[bytes], bytes]
) -> None:
    before = starts.start()
    file = starts.file(name)
    assert (file.stat().st_size > HASH_LIMIT) == (name == DATA_FILE)
    file.write_bytes(damage(file.read_bytes()))
    assert starts.start() == before
    assert len(starts.log) == 1
    assert "damaged" in starts.log[0]
    assert starts.start() == (0, before[1])
    assert starts.store.verify() == []


def test_a_cache_that_cannot_be_written_only_costs_time(starts: Starts) -> None:
    starts.root.write_text("a file, where a folder is wanted")
    packed, answer = starts.start()
    assert packed > 0
    assert starts.start() == (packed, answer)
    for line in starts.log:
        assert "cannot be kept" in line
        assert "every start packs them" in line


def test_a_read_only_cache_is_read(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    _, answer = starts.start()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(starts.root))

    monkeypatch.setattr(Store, "_lock", refuse)  # root may write everywhere
    assert starts.start() == (0, answer)
    assert starts.log == []
    starts.file(DATA_FILE).write_bytes(b"")
    packed, again = starts.start()
    assert packed > 0
    assert again == answer
    assert "cannot be kept" in starts.log[-1]
    assert "Permission denied" in starts.log[-1]


def test_two_of_a_checkpoint_are_kept_and_its_neighbours(starts: Starts, tmp_path: Path) -> None:
    model = Path(starts.options.model)
    neighbour = write_mixed_gguf(tmp_path / "neighbour.gguf")
    for path, time in ((neighbour, 1), (model, 1), (model, 2), (model, 3)):
        os.utime(path, ns=(time, time))
        starts.options = replace(starts.options, model=str(path))
        starts.start()
    kept = [dict(entry.key.factors)["checkpoint"] for entry in starts.store.entries()]
    assert kept == [str(neighbour), str(model), str(model)]
    assert starts.start()[0] == 0


def in_a_process(starts: Starts, check: str = "pass") -> subprocess.Popen[str]:
    """Start the engine's executor as `trnc serve` does, in a process of its own."""
    preset = starts.root.parent / "tiny.toml"
    preset.write_text(
        f'description = "{PRESET.description}"\ndecode_rows = {list(PRESET.decode_rows)}\n'
        f"prefill_tokens = {list(PRESET.prefill_tokens)}\nmax_context = {PRESET.max_context}\n"
        f"page_size = {PRESET.page_size}\n"
    )
    arguments = {
        "model": starts.options.model,
        "preset": str(preset),
        "backend": "inductor",
        "store": str(starts.options.store),
        "jobs": 1,
        "require_cache": True,
    }
    program = (
        "import sys; from trnc.cli import arguments, engine_command;"
        f"engine_command.start(arguments.EngineArguments(**{arguments}), print); {check}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"TRNC_CACHE": str(starts.root.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_at_once_pack_once_and_both_start(starts: Starts) -> None:
    both = [in_a_process(starts) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said == ["", ""]
    assert len(starts.store.entries()) == 1
    assert starts.start()[0] == 0  # and this process reads what they have written


def test_a_warm_start_imports_no_compiler_and_nothing_for_tracing(starts: Starts) -> None:
    heavy = {
        "sympy", "transformers", "gguf", "rich", "typer", "torch._inductor.codecache",
        "torch._dynamo", "torch._prims", "trnc.compiler.compile", "trnc.compiler.trace",
    }  # fmt: skip
    loaded = in_a_process(starts, f"print(*({heavy} & set(sys.modules)), end='')")
    assert loaded.communicate()[0] == ""
    assert loaded.returncode == 0
