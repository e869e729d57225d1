"""A store as one file: packed on the machine that compiled, unpacked on those that serve.

The file is a gzipped tar: `pack.json` with the ids of all artifacts, then their files, record
first, in the order of ids. It holds no names of users, hosts or folders and no times but those in
the records, so two packs of one store are equal. Every artifact is checked against its record
before it becomes visible in the store that it is unpacked into.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO

from trnc.compiler.store import RECORD, Store
from trnc.errors import StoreError

FORMAT = 1
_INDEX = "pack.json"
_NAME = re.compile(r"objects/([0-9a-f]{2})/(\1[0-9a-f]{62})/((?:[^/]+/)*[^/]+)")


@dataclass(frozen=True, slots=True)
class Packed:
    """What a pack holds: how many artifacts, and their bytes before compression."""

    artifacts: int
    size: int


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What was done with a pack: artifacts added, those the store had, and why others were not."""

    added: int
    present: int
    refused: tuple[str, ...]


def pack(store: Store, file: Path, *, ids: Collection[str] | None = None) -> Packed:
    """Write all whole artifacts of the store, or those of `ids`, to `file`.

    Raises:
        StoreError: an id of `ids` is not in the store, or the file cannot be written.
    """
    wanted = sorted(e.key.id for e in store.entries()) if ids is None else sorted(set(ids))
    folders = {id: folder for id in wanted if (folder := store.find(id)) is not None}
    if ids is not None and (missing := set(wanted) - folders.keys()):
        raise StoreError(
            f"{len(missing)} artifacts are not in the store {store.root}: compile first"
        )
    size = 0
    with _writing(file) as archive:
        index = json.dumps({"format": FORMAT, "artifacts": list(folders)}).encode()
        _add(archive, _INDEX, io.BytesIO(index), len(index))
        for id, folder in folders.items():
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            for path in sorted(files, key=lambda p: p.name != RECORD):
                name = f"objects/{id[:2]}/{id}/{path.relative_to(folder).as_posix()}"
                with path.open("rb") as content:
                    _add(archive, name, content, path.stat().st_size)
                size += path.stat().st_size
    return Packed(len(folders), size)


def unpack(store: Store, file: Path) -> Unpacked:
    """Add the artifacts of a pack to the store; what it has already stays.

    Raises:
        StoreError: the file is no pack, or ends early. Artifacts before that are in the store.
    """
    added, present, refused, seen = 0, 0, list[str](), set[str]()
    with _reading(file) as archive:
        wanted = _read_index(archive, file)
        for id, members in groupby(archive, key=_artifact):
            if not id:
                continue  # the index
            seen.add(id)
            if store.find(id) is not None:
                present += 1
                continue
            try:
                store.adopt(id, partial(_extract, archive, members))
                added += 1
            except StoreError as error:
                refused.append(str(error))
    if missing := wanted - seen:
        raise StoreError(f"{file} lacks {len(missing)} of the artifacts that it lists")
    return Unpacked(added, present, tuple(refused))


@contextmanager
def _writing(file: Path) -> Iterator[tarfile.TarFile]:
    """Write to a name of its own first: a pack is whole or absent."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        with (
            partial.open("wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            yield archive
        partial.replace(file)
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    archive.addfile(member, content)


@contextmanager
def _reading(file: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(file, "r:gz") as archive:
            yield archive
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise StoreError(f"{file} is no pack of a store, or damaged: {error}") from error
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror or error}") from error


def _read_index(archive: tarfile.TarFile, file: Path) -> set[str]:
    first = archive.next()
    content = archive.extractfile(first) if first and first.name == _INDEX else None
    index = json.load(content) if content is not None else {}
    if index.get("format") != FORMAT:
        raise StoreError(f"{file} is no pack of a store, or of another version of trnc")
    return set(index["artifacts"])


def _artifact(member: tarfile.TarInfo) -> str:
    """The artifact that a member belongs to; a name that leads elsewhere is refused."""
    if member.name == _INDEX:
        return ""
    match = _NAME.fullmatch(member.name)
    if match is None or ".." in member.name.split("/") or not member.isfile():
        raise tarfile.TarError(f"it holds '{member.name}', which is no file of an artifact")
    return match[2]


def _extract(archive: tarfile.TarFile, members: Iterator[tarfile.TarInfo], folder: Path) -> None:
    for member in members:
        match = _NAME.fullmatch(member.name)
        content = archive.extractfile(member)
        assert match is not None
        assert content is not None
        path = folder / match[3]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            shutil.copyfileobj(content, out)
