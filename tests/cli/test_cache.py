"""`trnc cache` on a store of the test's own, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import fails, trnc
from trnc.compiler.store import ArtifactKey, Store
from trnc.runtime.packed_store import checkpoint_factors, packed_root, packed_store

STAGE = ArtifactKey.of("stage", {"digest": "a" * 64, "target": "avx2", "torch": "2.13.0"})
KERNELS = ArtifactKey.of("kernels", {"sources": "b" * 64, "target": "avx2"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, with no packed weights."""
    monkeypatch.setenv("TRNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(root=tmp_path / "store", log=lambda line: None)
    for key in (STAGE, KERNELS):
        store.get_or_build(key, lambda out: (out / "stage.so").write_bytes(b"x" * 5000))
    return store


def test_path_follows_the_flag_then_the_variables(tmp_path):
    assert trnc("cache", "path", "--store", tmp_path).out == f"{tmp_path}\n"
    assert trnc("cache", "path", TRNC_STORE=str(tmp_path)).out == f"{tmp_path}\n"
    out = trnc("cache", "path", TRNC_STORE="", TRNC_CACHE=str(tmp_path)).out
    assert out == f"{tmp_path / 'store'}\n"


def test_ls_shows_what_artifacts_are(store):
    out = trnc("cache", "ls", "--store", store.root).out
    for shown in (STAGE.id[:12], "stage", "a" * 12, KERNELS.id[:12], "kernels", "b" * 12, "avx2"):
        assert shown in out
    assert "2 artifacts" in out


def test_an_empty_store_is_no_error(tmp_path):
    for command in ("ls", "verify", "gc"):
        ran = trnc("cache", command, "--store", tmp_path / "none")
        assert ran.status == 0, ran.err


def test_verify_tells_damage_and_sets_it_aside(store):
    out = trnc("cache", "verify", "--store", store.root).out
    assert out.startswith("2 of 2 artifacts are whole\n")
    found = store.find(STAGE.id)
    assert found is not None
    (found / "stage.so").write_bytes(b"y" + b"x" * 4999)
    ran = trnc("cache", "verify", "--store", store.root)
    assert ran.status == 1
    assert f"damaged artifact, {STAGE.id[:12]} (the checksum of stage.so differs)" in ran.out
    assert "1 of 2 artifacts are whole" in ran.out
    assert trnc("cache", "verify", "--store", store.root).status == 0
    assert store.find(KERNELS.id) is not None


def test_gc_removes_what_was_set_aside_and_keeps_artifacts_unless_told(store):
    found = store.find(STAGE.id)
    assert found is not None
    (found / "stage.so").unlink()
    trnc("cache", "verify", "--store", store.root)
    out = trnc("cache", "gc", "--store", store.root).out
    assert "removed 0 artifacts and 1 other folders" in out
    out = trnc("cache", "gc", "--store", store.root, "--older-than-days", "0").out
    assert "removed 1 artifacts and 0 other folders" in out
    assert store.entries() == []


def test_packed_weights_are_listed_verified_and_removed_with_their_checkpoint(cache, tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    packed = packed_store(packed_root(), print)
    key = ArtifactKey.of("weights", {**checkpoint_factors(model), "formats": "f"})
    folder = packed.get_or_build(key, lambda out: (out / "weights.bin").write_bytes(b"x" * 5000))
    listed = f"packed weights {key.id[:12]}, 0.0 MiB, of {model}"
    assert f"{listed}\n" in trnc("cache", "ls").out
    assert "1 of 1 packed weights are whole" in trnc("cache", "verify").out
    trnc("cache", "gc")
    assert packed.get(key) == folder
    model.write_bytes(b"other weights")
    assert f"{listed}, which changed\n" in trnc("cache", "ls").out
    assert "removed 1 packed weights without their checkpoint" in trnc("cache", "gc").out
    assert packed.entries() == []


def test_verify_reads_all_of_the_packed_weights(cache, tmp_path):
    packed = packed_store(packed_root(), print)
    key = ArtifactKey.of("weights", {**checkpoint_factors(tmp_path), "formats": "f"})
    large = bytes(5 << 20)  # too much for a start to hash
    folder = packed.get_or_build(key, lambda out: (out / "weights.bin").write_bytes(large))
    (folder / "weights.bin").write_bytes(large[:-1] + b"x")
    assert packed.get(key) == folder
    ran = trnc("cache", "verify")
    assert ran.status == 1
    assert "0 of 1 packed weights are whole" in ran.out
    assert packed.get(key) is None


def test_a_store_that_is_no_folder_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for command in ("ls", "verify", "gc"):
        assert f"{file}" in fails("cache", command, "--store", file)
