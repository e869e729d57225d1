"""Packs and second tiers: whole artifacts of another store, or none."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trnc.compiler.archive import pack, unpack
from trnc.compiler.statistics import by_kind, unreferenced
from trnc.compiler.store import ArtifactKey, Store
from trnc.compiler.tier import VARIABLE, open_store
from trnc.errors import ConfigError, StoreError

KEYS = [ArtifactKey.of("stage", {"digest": str(i), "target": "avx2"}) for i in range(3)]


def fill(store: Store, *keys: ArtifactKey) -> None:
    for key in keys or KEYS:

        def build(out: Path, key: ArtifactKey = key) -> None:
            (out / "stage.so").write_bytes(key.id.encode() * 200)
            (out / "deep").mkdir()
            (out / "deep" / "a.json").write_text("{}")

        store.get_or_build(key, build)


@pytest.fixture
def full(tmp_path: Path) -> Store:
    store = Store(root=tmp_path / "full", log=lambda line: None)
    fill(store)
    return store


@pytest.fixture
def logged() -> list[str]:
    return []


@pytest.fixture
def empty(tmp_path: Path, logged: list[str]) -> Store:
    return Store(root=tmp_path / "empty", log=logged.append)


def contents(store: Store) -> dict[str, bytes]:
    root = store.root / "objects"
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_a_pack_brings_every_byte_to_another_store(full: Store, empty: Store, tmp_path) -> None:
    packed = pack(full, tmp_path / "pack.tgz")
    assert packed.artifacts == 3
    unpacked = unpack(empty, tmp_path / "pack.tgz")
    assert (unpacked.added, unpacked.present, unpacked.refused) == (3, 0, ())
    assert contents(empty) == contents(full)
    assert empty.verify() == []
    again = unpack(empty, tmp_path / "pack.tgz")
    assert (again.added, again.present) == (0, 3)
    assert empty.builds == 0


def test_packs_of_one_store_are_equal_and_name_no_user_and_no_folder(full: Store, tmp_path) -> None:
    pack(full, tmp_path / "a.tgz")
    pack(full, tmp_path / "b.tgz")
    assert (tmp_path / "a.tgz").read_bytes() == (tmp_path / "b.tgz").read_bytes()
    plain = gzip.decompress((tmp_path / "a.tgz").read_bytes())
    assert str(tmp_path).encode() not in plain
    with tarfile.open(tmp_path / "a.tgz") as archive:
        assert {(m.uid, m.uname, m.mtime) for m in archive} == {(0, "", 0)}


def test_only_the_named_artifacts_and_no_damaged_one_is_packed(full: Store, tmp_path) -> None:
    assert pack(full, tmp_path / "one.tgz", ids=[KEYS[1].id]).artifacts == 1
    (full.root / "objects" / KEYS[0].id[:2] / KEYS[0].id / "stage.so").write_bytes(b"x")
    assert pack(full, tmp_path / "rest.tgz").artifacts == 2
    with pytest.raises(StoreError, match="1 artifacts are not in the store"):
        pack(full, tmp_path / "bad.tgz", ids=[KEYS[0].id])
    assert not list(tmp_path.glob(".*partial"))


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flip(data: bytes) -> bytes:
    plain = bytearray(gzip.decompress(data))
    at = plain.index(KEYS[1].id.encode() * 3)
    plain[at] ^= 1
    return gzip.compress(bytes(plain))


def rename(data: bytes) -> bytes:
    plain = gzip.decompress(data)
    name = f"objects/{KEYS[1].id[:2]}/{KEYS[1].id}/stage.so".encode()
    wrong = b"../" + name[3:]
    header = plain.index(name)
    block = bytearray(plain[header : header + 512])
    block[: len(name)] = wrong
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return gzip.compress(plain[:header] + bytes(block) + plain[header + 512 :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "no pack of a store, or damaged"),
        (lambda data: b"not a pack", "no pack of a store"),
        (lambda data: gzip.compress(b""), "no pack of a store"),
        (rename, "no file of an artifact"),
    ],
)
def test_a_damaged_pack_is_one_line_and_leaves_only_whole_artifacts(
    full: Store, empty: Store, tmp_path, damage: Callable[[bytes], bytes], message: str
) -> None:
    file = tmp_path / "pack.tgz"
    pack(full, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StoreError, match=message):
        unpack(empty, file)
    assert empty.verify() == []
    assert contents(empty).items() <= contents(full).items()
    assert not list((empty.root / "building").glob("*"))
    assert not (tmp_path.parent / "stage.so").exists()


def test_an_artifact_with_a_flipped_bit_is_refused_and_the_others_are_added(
    full: Store, empty: Store, tmp_path
) -> None:
    file = tmp_path / "pack.tgz"
    pack(full, file)
    file.write_bytes(flip(file.read_bytes()))
    unpacked = unpack(empty, file)
    assert unpacked.added == 2
    (reason,) = unpacked.refused
    assert f"{KEYS[1].id[:12]} is not taken over: the checksum of stage.so differs" in reason
    assert empty.get(KEYS[1]) is None


# A second tier


def second(
    monkeypatch: pytest.MonkeyPatch, location: str, root: Path, log: Callable[[str], None]
) -> Store:
    monkeypatch.setenv(VARIABLE, location)
    return open_store(root, log)


def freeze(folder: Path) -> Callable[[], None]:
    """Take every right to write away; the result gives them back."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    return lambda: [path.chmod(path.stat().st_mode | 0o200) for path in paths] and None


def test_a_folder_serves_what_the_store_lacks_and_is_never_written(
    full: Store, tmp_path, monkeypatch, logged: list[str]
) -> None:
    shutil.rmtree(full.root / "locks")
    before = sorted(full.root.rglob("*"))
    thaw = freeze(full.root)
    store = second(monkeypatch, str(full.root), tmp_path / "own", logged.append)
    assert store.get(KEYS[0]) == full.get(KEYS[0])
    assert store.get_or_build(KEYS[1], lambda out: pytest.fail("built")) is not None
    assert not (tmp_path / "own").exists()
    thaw()
    (full.root / "objects" / KEYS[0].id[:2] / KEYS[0].id / "stage.so").write_bytes(b"x")
    assert store.get(KEYS[0]) is None
    assert "second tier: artifact" in logged[0]
    assert sorted(full.root.rglob("*")) == before
    fill(store, KEYS[0])
    assert store.get(KEYS[0]) == tmp_path / "own" / "objects" / KEYS[0].id[:2] / KEYS[0].id


def test_a_url_is_copied_into_the_store_once(
    full: Store, tmp_path, monkeypatch, logged: list[str]
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(full.root / "objects"), "/fleet/store/objects", recursive=True)
    store = second(monkeypatch, "memory://fleet/store", tmp_path / "own", logged.append)
    found = store.get(KEYS[0])
    assert found is not None
    assert found.is_relative_to(tmp_path / "own")
    assert store.verify() == []
    remote = f"/fleet/store/objects/{KEYS[1].id[:2]}/{KEYS[1].id}/stage.so"
    memory.pipe(remote, b"x" * memory.size(remote))
    assert store.get(KEYS[1]) is None
    assert "is not taken over: the checksum of stage.so differs" in logged[0]
    memory.rm("/fleet", recursive=True)
    assert store.get(KEYS[0]) == found
    assert store.get(KEYS[2]) is None
    assert store.get(ArtifactKey.of("stage", {"digest": "nowhere"})) is None


def test_a_manifest_that_differs_from_the_second_tiers_is_written_to_the_store(
    full: Store, tmp_path, monkeypatch
) -> None:
    store = second(monkeypatch, str(full.root), tmp_path / "own", print)
    rebuilt = store.rebuild(KEYS[0], lambda out: (out / "other").write_text("new") and None)
    assert store.get(KEYS[0]) == rebuilt
    assert (rebuilt / "other").exists()
    assert (full.root / "objects" / KEYS[0].id[:2] / KEYS[0].id / "stage.so").exists()


@pytest.mark.parametrize("location", ["/no/such/folder", "nosuch://bucket/x"])
def test_a_second_tier_that_cannot_be_is_one_line(tmp_path, monkeypatch, location: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}={location}"):
        second(monkeypatch, location, tmp_path, print)


# Numbers


def test_what_no_manifest_names_is_unreferenced(full: Store) -> None:
    manifest = ArtifactKey.of("manifest", {"preset": "p"})
    text = f'{{"kernels": "k", "runner": "r", "stages": {{"{KEYS[0].id}": "0"}}}}'
    full.get_or_build(manifest, lambda out: (out / "manifest.json").write_text(text) and None)
    entries = full.entries()
    assert {e.key for e in unreferenced(entries)} == set(KEYS[1:])
    assert {kind: len(group) for kind, group in by_kind(entries).items()} == {
        "stage": 3,
        "manifest": 1,
    }
