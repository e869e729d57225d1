"""`trnc cache` on a store of the test's own, whole and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import fails, trnc
from trnc.compiler.store import ArtifactKey, Store

STAGE = ArtifactKey.of("stage", {"digest": "a" * 64, "target": "avx2", "torch": "2.13.0"})
KERNELS = ArtifactKey.of("kernels", {"sources": "b" * 64, "target": "avx2"})


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
    assert trnc("cache", "verify", "--store", store.root).out == "2 of 2 artifacts are whole\n"
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


def test_a_store_that_is_no_folder_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for command in ("ls", "verify", "gc"):
        assert f"{file}" in fails("cache", command, "--store", file)
