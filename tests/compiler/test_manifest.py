"""Where a manifest is looked for: everything that could make it stale is in its key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import trnc
from trnc.compiler import manifest
from trnc.compiler.compile import _keep_manifest
from trnc.compiler.manifest import Manifest, source_fingerprint
from trnc.compiler.store import ArtifactKey, Store


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's sources that the fingerprint is taken of."""
    copy = tmp_path / "trnc"
    shutil.copytree(Path(trnc.__file__).parent, copy)
    monkeypatch.setattr(manifest.resources, "files", lambda _: copy)
    return copy


@pytest.mark.parametrize(
    "name",
    [
        "models/llama.py",
        "ops/kernels/attention.cpp",
        "ops/kernels/simd.h",
        "compiler/backends/runner.cpp",
    ],
)
def test_an_edit_of_any_source_changes_the_fingerprint(package: Path, name: str) -> None:
    before = source_fingerprint()
    (package / name).write_text((package / name).read_text() + "\n")
    assert source_fingerprint() != before


def test_what_is_not_compiled_does_not_count(package: Path) -> None:
    before = source_fingerprint()
    (package / "serve" / "app.py").write_text("")
    assert source_fingerprint() == before


def test_a_manifest_that_names_other_artifacts_gives_way(tmp_path: Path) -> None:
    store = Store(root=tmp_path, log=print)
    key = ArtifactKey.of("manifest", {"model": "m"})
    old = Manifest("default", "inductor", kernels="old", runner="r", stages={}, variants=())
    new = Manifest("default", "inductor", kernels="new", runner="r", stages={}, variants=())
    for wanted in (old, new):
        _keep_manifest(wanted, key, store)
        kept = store.get(key)
        assert kept is not None
        assert manifest.read_manifest(kept) == wanted
