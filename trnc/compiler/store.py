"""The artifact cache on disk: content-addressed, locked, checksummed.

    objects/ab/<id>/artifact.json   kind, factors, time, and the size and sha-256 of each file
    objects/ab/<id>/...             the files
    building/<id>/                  a build in progress, renamed into objects/ when it is whole
    locks/<id>.lock                 held by whoever builds, moves or removes that artifact
    quarantine/<id>-<n>/            damaged artifacts, kept for people until `gc`

An artifact is visible when it is whole, or not at all: a killed build leaves only its folder in
`building/`. Reading takes no lock and needs no write permission. Every reader checks every byte,
except of files beyond a store's `hash_limit`. A damaged artifact is set aside, and nothing else is
ever deleted for it.

The locks are `flock`s: the kernel drops them with their process. A build that forks children which
outlive it keeps the lock until they end.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from trnc.errors import StoreError

RECORD = "artifact.json"
FORMAT = 1

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """What an artifact is a function of: everything that can change its bytes.

    `kind` is such as "stage", "kernels", "runner", "manifest". `factors` are (name, value) pairs,
    sorted by name; build one with `ArtifactKey.of`.
    """

    kind: str
    factors: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        """Refuse factors that would give one key two ids."""
        names = [name for name, _ in self.factors]
        if names != sorted(set(names)):
            raise ValueError(f"factors of a {self.kind} key must be sorted and unique: {names}")

    @classmethod
    def of(cls, kind: str, factors: dict[str, str]) -> ArtifactKey:
        """Make a key of factors in any order."""
        return cls(kind, tuple(sorted(factors.items())))

    @property
    def id(self) -> str:
        """The sha-256, in hex, of the key as canonical JSON."""
        text = _json({"kind": self.kind, "factors": dict(self.factors)})
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One artifact of the store. `size` is in bytes, without its record."""

    key: ArtifactKey
    path: Path
    created: datetime
    size: int


@dataclass(frozen=True, slots=True)
class Damage:
    """An artifact that does not match its record, or has none."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What `gc` removed: artifacts by id, other folders (stale builds, quarantine), bytes."""

    artifacts: tuple[str, ...]
    folders: int
    size: int


class SecondTier(Protocol):
    """Where artifacts are looked for that a store lacks. It is only read."""

    def find(self, id: str, store: Store) -> Path | None:
        """Return the folder of a whole artifact, which may have been copied into `store`."""
        ...


class Store:
    """The artifacts below one folder."""

    def __init__(
        self,
        *,
        root: Path,
        log: Callable[[str], None],
        hash_limit: int | None = None,
        second: SecondTier | None = None,
    ) -> None:
        """Use the store in `root`; the first build creates it.

        `log` gets one line for each thing that a person should know. Of files with more than
        `hash_limit` bytes only the size is checked, except by `verify`; None: no file is so large.
        What `root` lacks is looked for in `second`.
        """
        self.root = root
        self._second = second
        self._hash_limit = hash_limit
        self.builds = 0  # how many artifacts this object has built
        self._log = log

    def get(self, key: ArtifactKey) -> Path | None:
        """Return `find(key.id)`."""
        return self.find(key.id)

    def find(self, id: str) -> Path | None:
        """Return the folder of a whole, verified artifact, or None.

        A damaged one is moved to `quarantine/` (where the store can be written) and logged.

        Raises:
            StoreError: the folder may not be read.
        """
        path = self._path(id)
        if damage(path, id, self._hash_limit) is None:
            return path
        if path.exists() and (found := self._find_rebuilt(id)) is not None:
            return found
        return self._second.find(id, self) if self._second is not None else None

    def _find_rebuilt(self, id: str) -> Path | None:
        """Set a damaged artifact aside, unless another process has rebuilt it meanwhile."""
        path = self._path(id)
        try:
            with self._lock(id):
                return self._get_locked(id, self._hash_limit)
        except OSError as error:
            if error.errno not in _NO_PERMISSION | _NO_ROOM:
                raise
            self._log(
                f"store: artifact {id[:12]} is damaged ({damage(path, id, self._hash_limit)}) and"
                f" cannot be set aside, as {self.root} cannot be written ({error.strerror})"
            )
            return None

    def get_or_build(self, key: ArtifactKey, build: Callable[[Path], None]) -> Path:
        """Return the artifact's folder; if there is none, `build` writes its files first.

        `build` gets an empty folder. However many threads and processes ask, one builds and the
        others wait for it. If it raises, nothing is kept and the error passes through.

        Raises:
            StoreError: the store is full or cannot be written, or `build` wrote no regular file.
        """
        if (found := self.get(key)) is not None:
            return found
        with self._explaining(), self._lock(key.id):
            found = self._get_locked(key.id, self._hash_limit)
            return found or self._build_locked(key, build)

    def discard(self, id: str) -> None:
        """Remove one artifact, unless somebody is building it."""
        path = self._path(id)
        if path.exists():
            with self._explaining():
                self._remove(id, path)

    def rebuild(self, key: ArtifactKey, build: Callable[[Path], None]) -> Path:
        """Build an artifact in the place of the one that is there, whatever the second tier has.

        Raises:
            StoreError: as by `get_or_build`.
        """
        with self._explaining(), self._lock(key.id):
            shutil.rmtree(self._path(key.id), ignore_errors=True)
            return self._build_locked(key, build)

    def adopt(self, id: str, copy: Callable[[Path], None]) -> Path:
        """Take over an artifact that another store built; `copy` writes its files and its record.

        Every byte is checked before the artifact is visible.

        Raises:
            StoreError: it is not whole, or the store is full or cannot be written.
        """
        with self._explaining(), self._lock(id):
            final = self._path(id)
            if damage(final, id, self._hash_limit) is None:
                return final
            folder = self.root / "building" / id
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                copy(folder)
                if (reason := damage(folder, id, None)) is not None:
                    raise StoreError(f"artifact {id[:12]} is not taken over: {reason}")
                for path in [*folder.rglob("*"), folder]:
                    _fsync(path)
                shutil.rmtree(final, ignore_errors=True)
                final.parent.mkdir(parents=True, exist_ok=True)
                folder.rename(final)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            _fsync(final.parent)
            return final

    def entries(self) -> list[Entry]:
        """Return every artifact with a readable record, oldest first. Files are not checked."""
        found = []
        for path in self._objects():
            with suppress(OSError, ValueError):
                found.append(_read_entry(path))
        return sorted(found, key=lambda e: (e.created, e.key.id))

    def verify(self) -> list[Damage]:
        """Check every byte of every artifact; set damaged ones aside and return them."""
        damaged = []
        for path in self._objects():
            reason = damage(path, path.name, None)
            if reason is None:
                continue
            damaged.append(Damage(path.name, reason))
            with self._explaining(), self._lock(path.name):
                self._get_locked(path.name, None)
        return damaged

    def quarantined(self, id: str) -> list[Path]:
        """Return the folders of this artifact that were set aside, oldest first."""
        return sorted((self.root / "quarantine").glob(f"{id}-*"), key=lambda p: p.stat().st_mtime)

    def gc(
        self, *, keep: Collection[str] | None = None, older_than: timedelta | None = None
    ) -> Collected:
        """Remove stale builds and the quarantine, and artifacts if a condition is given.

        An artifact goes when its id is not in `keep` (if given) and it was created longer ago than
        `older_than` (if given). With neither, no artifact goes. A build in progress is left alone.
        """
        with self._explaining():
            return self._collect(keep, older_than)

    def _collect(self, keep: Collection[str] | None, older_than: timedelta | None) -> Collected:
        now = datetime.now(UTC)
        size, folders, removed = 0, 0, []
        if keep is not None or older_than is not None:
            for entry in self.entries():
                is_kept = keep is not None and entry.key.id in keep
                is_young = older_than is not None and now - entry.created <= older_than
                if not is_kept and not is_young and self._remove(entry.key.id, entry.path):
                    removed.append(entry.key.id)
                    size += entry.size
        for path in [*_folders(self.root / "building"), *_folders(self.root / "quarantine")]:
            below = _size(path)
            if self._remove(path.name[:64], path):
                folders, size = folders + 1, size + below
        return Collected(tuple(removed), folders, size)

    def _path(self, id: str) -> Path:
        return self.root / "objects" / id[:2] / id

    def _objects(self) -> list[Path]:
        return [path for shard in _folders(self.root / "objects") for path in _folders(shard)]

    def _get_locked(self, id: str, hash_limit: int | None) -> Path | None:
        """Return the artifact's folder, or set it aside if it is damaged. The caller has the lock,
        so a folder that another process has just rebuilt is not taken for the damaged one."""
        path = self._path(id)
        reason = damage(path, id, hash_limit)
        if reason is None:
            return path
        if path.exists():
            quarantine = self.root / "quarantine"
            quarantine.mkdir(exist_ok=True)
            number = len(list(quarantine.glob(f"{id}-*")))
            path.rename(quarantine / f"{id}-{number}")
            self._log(
                f"store: set aside a damaged artifact, {id[:12]} ({reason}):"
                f" it is in {quarantine / f'{id}-{number}'} and must be built again"
            )
        return None

    def _build_locked(self, key: ArtifactKey, build: Callable[[Path], None]) -> Path:
        folder = self.root / "building" / key.id
        final = self._path(key.id)
        shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed
        folder.mkdir(parents=True)
        try:
            self.builds += 1
            build(folder)
            _write_record(folder, key)
            final.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(final)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _fsync(final.parent)
        return final

    def _remove(self, id: str, path: Path) -> bool:
        """Remove a folder and the lock's file, unless somebody has the lock."""
        try:
            with self._lock(id, wait=False) as lock:
                rubbish = self.root / "building" / id
                if path != rubbish:
                    shutil.rmtree(rubbish, ignore_errors=True)
                    rubbish.parent.mkdir(exist_ok=True)
                    path.rename(rubbish)  # readers see all of an artifact or nothing
                shutil.rmtree(rubbish)
                lock.unlink()
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def _lock(self, id: str, *, wait: bool = True) -> Iterator[Path]:
        """Hold the artifact's lock. Raises BlockingIOError if it is taken and `wait` is False."""
        path = self.root / "locks" / f"{id}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with path.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                # gc may have removed the file while we waited: then this lock guards nothing.
                if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    continue
                yield path
                return

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an OSError that says the store cannot be written into a StoreError."""
        try:
            yield
        except OSError as error:
            is_ours = error.filename is None or Path(error.filename).is_relative_to(self.root)
            if not is_ours or error.errno not in _NO_ROOM | _NO_PERMISSION:
                raise
            advice = (
                "Free some space there (`trnc cache gc` removes old artifacts), or set TRNC_STORE"
                " to a folder with room."
                if error.errno in _NO_ROOM
                else "Give this user the right to write there, or set TRNC_STORE to a folder of"
                " its own; a read-only store serves only what is already in it."
            )
            where = error.filename or self.root
            raise StoreError(
                f"the store {self.root} cannot be written: {where}: {error.strerror}. {advice}"
            ) from error


def default_root() -> Path:
    """Return $TRNC_STORE, else $TRNC_CACHE/store, else $XDG_CACHE_HOME/trnc/store, else
    ~/.cache/trnc/store."""
    if store := os.environ.get("TRNC_STORE"):
        return Path(store).expanduser()
    if cache := os.environ.get("TRNC_CACHE"):
        return Path(cache).expanduser() / "store"
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "trnc" / "store"
    return Path.home() / ".cache" / "trnc" / "store"


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _render_record(record: dict[str, Any]) -> str:
    """The record's bytes: sorted, indented, with the sha-256 of the rest as `checksum`."""
    rest = {name: value for name, value in record.items() if name != "checksum"}
    checksum = hashlib.sha256(_json(rest).encode()).hexdigest()
    return json.dumps({**rest, "checksum": checksum}, sort_keys=True, indent=1) + "\n"


def _write_record(folder: Path, key: ArtifactKey) -> None:
    """Record the files of a finished build, and flush them and the record to the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()) or name == RECORD:
            raise StoreError(f"the build of {key.kind} wrote {name}: write regular files only")
        if path.is_file():
            files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        _fsync(path)
    if not files:
        raise StoreError(f"the build of {key.kind} {key.id[:12]} wrote no file")
    record = {
        "format": FORMAT,
        "kind": key.kind,
        "factors": dict(key.factors),
        "created": datetime.now(UTC).isoformat(),
        "files": files,
    }
    (folder / RECORD).write_text(_render_record(record))
    _fsync(folder / RECORD)
    _fsync(folder)


def read_record(path: Path) -> dict[str, Any]:
    """Read a record. Raises ValueError if it is not what `_write_record` wrote, byte for byte."""
    text = (path / RECORD).read_text()
    record = json.loads(text)
    if not isinstance(record, dict) or text != _render_record(record):
        raise ValueError(f"{RECORD} is damaged")
    if record["format"] != FORMAT:
        raise ValueError(f"{RECORD} has format {record['format']}, this version reads {FORMAT}")
    return record


def _read_entry(path: Path) -> Entry:
    record = read_record(path)
    return Entry(
        key=ArtifactKey.of(record["kind"], record["factors"]),
        path=path,
        created=datetime.fromisoformat(record["created"]),
        size=sum(file["size"] for file in record["files"].values()),
    )


def damage(path: Path, id: str, hash_limit: int | None) -> str | None:
    """Say what is wrong with the artifact in `path`, or None if every byte is as recorded.

    Of files with more than `hash_limit` bytes only the size is compared. Files that the record does
    not name are not looked at.
    """
    try:
        record = read_record(path)
        if ArtifactKey.of(record["kind"], record["factors"]).id != id:
            return "its record belongs to another key"
        for name, file in record["files"].items():
            if (size := (path / name).stat().st_size) != file["size"]:
                return f"{name} has {size} bytes, not {file['size']}"
            is_hashed = hash_limit is None or size <= hash_limit
            if is_hashed and _sha256(path / name) != file["sha256"]:
                return f"the checksum of {name} differs"
    except PermissionError as error:
        raise StoreError(
            f"{error.filename} may not be read: give this user the right, or set TRNC_STORE to a"
            " folder of its own"
        ) from error
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
