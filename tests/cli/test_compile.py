"""`compile --dry-run` and `explain-miss`: what would be compiled, and why, without compiling."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkpoint.files import gguf_tensors, shape_metadata, tiny_model, write_gguf
from tests.cli.command import fails, trnc
from trnc.compiler.compile import kernels_key
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.store import ArtifactKey, Store
from trnc.ops.native import detect_target
from trnc.presets import load_preset


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tensors = gguf_tensors(tiny_model("mistral"), "llama")
    metadata = shape_metadata(**{"attention.key_length": 32, "attention.value_length": 32})
    return write_gguf(path, metadata=metadata, tensors=tensors)


def test_a_dry_run_prints_the_matrix_and_compiles_nothing(model, tmp_path):
    root = tmp_path / "store"
    ran = trnc("compile", "--dry-run", "--model", model, "--preset", "batch8", "--store", root)
    assert ran.status == 0, ran.err
    preset = load_preset("batch8")
    assert f"Preset batch8: {len(variant_matrix(preset))} variants" in ran.out
    for step, sizes in (("decode", preset.decode_rows), ("prefill", preset.prefill_tokens)):
        rows = [line for line in ran.out.splitlines() if line.startswith(f"│ {step}")]
        assert [int(row.split("│")[2]) for row in rows] == list(sizes)
    assert "In the store: 0. To compile: 9." in ran.out
    assert not root.exists()


def test_the_eager_backend_has_nothing_to_compile(model, tmp_path):
    ran = trnc("compile", "--backend", "eager", "--model", model, "--store", tmp_path)
    assert ran.status == 0
    assert "compiles nothing" in ran.out


def test_a_wrong_environment_is_one_line(model, tmp_path):
    arguments = ("compile", "--model", model, "--store", tmp_path / "store")
    assert "TRNC_TARGET=avx51 is not a target" in fails(*arguments, TRNC_TARGET="avx51")
    assert "no-such-g++ was not found; install g++" in fails(*arguments, CXX="no-such-g++")


def test_require_cache_refuses_to_compile(model, tmp_path):
    root = tmp_path / "store"
    said = fails("bench", "--require-cache", "--model", model, "--store", root)
    assert "--require-cache: not every artifact of preset 'default'" in said
    assert "run `trnc compile`" in said
    assert not root.exists()


def test_a_miss_is_explained_by_the_nearest_artifact(model, tmp_path):
    wanted = dict(kernels_key(detect_target()).factors)
    older = ArtifactKey.of("kernels", {**wanted, "torch": "2.11.0"})
    store = Store(root=tmp_path / "store", log=lambda line: None)
    store.get_or_build(older, lambda out: (out / "library.so").write_bytes(b"x"))
    ran = trnc("explain-miss", "--model", model, "--store", store.root)
    assert ran.status == 0, ran.err
    assert re.search(
        r"layer: stage \w+: the store has no stage at all: run `trnc compile`", ran.out
    )
    assert f"nearest is {older.id[:12]}" in ran.out
    assert f"torch: have '2.11.0', want '{wanted['torch']}' (another torch compiled it" in ran.out
    assert "where 1 of 5 factors differ" in ran.out
