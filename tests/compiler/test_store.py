"""The store: whole artifacts or none, built once, whatever happens to the disk or the process."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trnc.compiler.store import ArtifactKey, Store, default_root
from trnc.errors import CompileError, StoreError

KEY = ArtifactKey.of("stage", {"graph": "abc", "torch": "2.13.0"})
OTHER = ArtifactKey.of("stage", {"graph": "def", "torch": "2.13.0"})


def build(folder: Path) -> None:
    (folder / "stage.so").write_bytes(b"machine code" * 100)
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("hello")


def forbidden(folder: Path) -> None:
    pytest.fail("built again")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, log: list[str]) -> Store:
    return Store(root=tmp_path / "store", log=log.append)


# Keys


def test_a_key_is_its_kind_and_factors_in_any_order() -> None:
    assert ArtifactKey.of("stage", {"torch": "2.13.0", "graph": "abc"}) == KEY
    assert ArtifactKey.of("stage", {"torch": "2.13.0", "graph": "abc"}).id == KEY.id
    assert len({KEY.id, OTHER.id, ArtifactKey("kernels", KEY.factors).id}) == 3
    with pytest.raises(ValueError, match="sorted"):
        ArtifactKey("stage", (("torch", "2"), ("graph", "abc")))


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_ids_are_equal_exactly_when_the_factors_are(a: dict[str, str], b: dict[str, str]) -> None:
    assert (ArtifactKey.of("k", a).id == ArtifactKey.of("k", b).id) == (a == b)


# Hits and misses


def test_an_artifact_is_built_once_and_found_by_another_store_object(store: Store) -> None:
    assert store.get(KEY) is None
    path = store.get_or_build(KEY, build)
    assert (path / "stage.so").read_bytes() == b"machine code" * 100
    assert store.get_or_build(KEY, forbidden) == path
    again = Store(root=store.root, log=pytest.fail)
    assert again.get(KEY) == path
    assert again.find(KEY.id) == path
    assert (store.builds, again.builds) == (1, 0)
    assert again.get(OTHER) is None


def test_entries_tell_what_is_there_oldest_first(store: Store) -> None:
    assert store.entries() == []
    for key in (KEY, OTHER):
        store.get_or_build(key, build)
    first, second = store.entries()
    assert (first.key, second.key) == (KEY, OTHER)
    assert first.size == 1205
    assert first.path == store.get(KEY)
    assert first.created <= second.created


def test_a_build_that_raises_leaves_nothing(store: Store) -> None:
    def fails(folder: Path) -> None:
        build(folder)
        raise CompileError("no compiler")

    with pytest.raises(CompileError, match="no compiler"):
        store.get_or_build(KEY, fails)
    assert store.get(KEY) is None
    assert list((store.root / "building").iterdir()) == []
    assert store.get_or_build(KEY, build).is_dir()


@pytest.mark.parametrize(
    ("bad_build", "message"),
    [
        (lambda folder: None, "wrote no file"),
        (lambda folder: (folder / "link").symlink_to("/etc/hosts"), "wrote link"),
        (lambda folder: (folder / "artifact.json").write_text("{}"), "wrote artifact.json"),
    ],
)
def test_a_build_must_write_regular_files(
    store: Store, bad_build: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        store.get_or_build(KEY, bad_build)
    assert store.get(KEY) is None


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: flip(p / "stage.so"), "checksum of stage.so"),
        (lambda p: truncate(p / "stage.so"), "1199 bytes, not 1200"),
        (lambda p: (p / "stage.so").unlink(), "stage.so is missing"),
        (lambda p: (p / "sub" / "notes.txt").write_text("hallo"), "notes.txt"),
        (lambda p: (p / "artifact.json").unlink(), "artifact.json is missing"),
        (lambda p: (p / "artifact.json").write_text(""), "Expecting value"),
        (lambda p: flip(p / "artifact.json"), ""),
    ],
)
def test_a_damaged_artifact_is_set_aside_and_rebuilt_and_nothing_else_is_touched(
    store: Store, log: list[str], damage: Callable[[Path], None], reason: str
) -> None:
    path, other = store.get_or_build(KEY, build), store.get_or_build(OTHER, build)
    damage(path)
    assert store.get(KEY) is None
    assert len(log) == 1
    assert KEY.id[:12] in log[0]
    assert reason in log[0]
    (aside,) = store.quarantined(KEY.id)
    assert str(aside) in log[0]
    assert aside.is_dir()
    assert store.get_or_build(KEY, build) == path
    assert store.get(OTHER) == other
    assert len(log) == 1


def test_get_or_build_replaces_damage_each_time_it_comes_back(store: Store) -> None:
    for _ in range(3):
        flip(store.get_or_build(KEY, build) / "stage.so")
    assert store.get(KEY) is None
    assert len(store.quarantined(KEY.id)) == 3


def test_an_artifact_in_the_place_of_another_is_damage(store: Store, log: list[str]) -> None:
    path = store.get_or_build(KEY, build)
    wrong = store.root / "objects" / OTHER.id[:2] / OTHER.id
    wrong.parent.mkdir(exist_ok=True)
    path.rename(wrong)
    assert store.get(OTHER) is None
    assert "another key" in log[0]


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, where: float, bit: int
) -> None:
    store = Store(root=tmp_path_factory.mktemp("store"), log=lambda line: None)
    path = store.get_or_build(KEY, lambda folder: (folder / "a").write_bytes(b"x" * 400))
    files = [path / "artifact.json", path / "a"]
    sizes = [f.stat().st_size for f in files]
    offset = int(where * sum(sizes))
    file, offset = (files[0], offset) if offset < sizes[0] else (files[1], offset - sizes[0])
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)
    assert store.get(KEY) is None


def test_verify_finds_every_damaged_artifact(store: Store) -> None:
    assert store.verify() == []
    damaged = store.get_or_build(KEY, build)
    store.get_or_build(OTHER, build)
    flip(damaged / "stage.so")
    (found,) = store.verify()
    assert found.id == KEY.id
    assert "checksum" in found.reason
    assert store.verify() == []
    assert len(store.quarantined(KEY.id)) == 1


# Processes

COUNTING = """
import sys
from pathlib import Path
from trnc.compiler.store import ArtifactKey, Store

store, counter, gate = Store(root=Path(sys.argv[1]), log=print), sys.argv[2], Path(sys.argv[3])

def build(folder):
    with open(counter, "a") as file:
        file.write("built\\n")
    print("building", flush=True)
    gate.read_text()  # a pipe: waits until the test opens its other end
    (folder / "stage.so").write_text("done")

print("ready", flush=True)
sys.stdin.readline()
path = store.get_or_build(ArtifactKey.of("stage", {"graph": "abc", "torch": "2.13.0"}), build)
print((path / "stage.so").read_text(), flush=True)
"""


def start(root: Path, tmp_path: Path) -> subprocess.Popen[str]:
    if not (tmp_path / "gate").exists():
        os.mkfifo(tmp_path / "gate")
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(root), tmp_path / "counter", tmp_path / "gate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert read(process) == "ready"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_that_want_one_artifact_build_it_once(store: Store, tmp_path: Path) -> None:
    processes = [start(store.root, tmp_path) for _ in range(3)]
    for process in processes:
        go(process)
    (tmp_path / "gate").write_text("")
    outputs = [process.communicate()[0].split() for process in processes]
    assert [o[-1] for o in outputs] == ["done"] * 3
    assert (tmp_path / "counter").read_text() == "built\n"


def test_a_waiting_process_takes_over_when_the_builder_is_killed(
    store: Store, tmp_path: Path
) -> None:
    victim, heir = start(store.root, tmp_path), start(store.root, tmp_path)
    go(victim)
    assert read(victim) == "building"
    (store.root / "building" / KEY.id / "half-written").write_text("half")
    go(heir)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert store.get(KEY) is None
    assert read(heir) == "building"
    (tmp_path / "gate").write_text("")
    assert heir.communicate()[0].split() == ["done"]
    path = store.get(KEY)
    assert path is not None
    assert sorted(p.name for p in path.iterdir()) == ["artifact.json", "stage.so"]
    assert (tmp_path / "counter").read_text() == "built\n" * 2


def test_gc_removes_a_killed_build_and_leaves_a_running_one(store: Store, tmp_path: Path) -> None:
    builder = start(store.root, tmp_path)
    go(builder)
    assert read(builder) == "building"
    assert store.gc().folders == 0
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert store.gc().folders == 1
    assert list((store.root / "building").iterdir()) == []
    assert list((store.root / "locks").iterdir()) == []


def test_threads_that_want_one_artifact_build_it_once(store: Store) -> None:
    built, barrier = [], threading.Barrier(4)

    def counted(folder: Path) -> None:
        built.append(threading.get_ident())
        build(folder)

    def want() -> None:
        barrier.wait()
        store.get_or_build(KEY, counted)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_lock_that_gc_removed_while_we_waited_is_taken_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = store.root / "locks" / f"{KEY.id}.lock"
    flock, calls = fcntl.flock, []

    def flock_after_gc(file: IO[str], flags: int) -> None:
        if not calls:
            lock.unlink()
        calls.append(flags)
        flock(file, flags)

    def build_alone(folder: Path) -> None:
        with lock.open() as file, pytest.raises(BlockingIOError):
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        build(folder)

    monkeypatch.setattr(fcntl, "flock", flock_after_gc)
    store.get_or_build(KEY, build_alone)
    assert len(calls) == 2


# Collection


def test_gc_keeps_what_it_is_told_to_keep(store: Store) -> None:
    for key in (KEY, OTHER):
        store.get_or_build(key, build)
    assert store.gc().artifacts == ()
    assert store.gc(older_than=timedelta(hours=1)).artifacts == ()
    assert store.gc(keep={KEY.id, OTHER.id}, older_than=timedelta(0)).artifacts == ()
    collected = store.gc(keep={KEY.id})
    assert collected.artifacts == (OTHER.id,)
    assert collected.size == 1205
    assert store.get(KEY) is not None
    assert store.get(OTHER) is None
    assert store.gc(older_than=timedelta(0)).artifacts == (KEY.id,)
    assert store.get_or_build(KEY, build).is_dir()


def test_gc_empties_the_quarantine(store: Store) -> None:
    flip(store.get_or_build(KEY, build) / "stage.so")
    assert store.get(KEY) is None
    assert store.gc().folders == 1
    assert store.quarantined(KEY.id) == []


# Disks


def fill(folder: Path) -> None:
    with (folder / "big").open("wb") as file:
        for _ in range(64):
            file.write(bytes(65536))


@pytest.fixture
def full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A small disk and a build that overfills it: a tmpfs where that can be mounted, otherwise a
    build that fails as on a full disk."""
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False

    def no_space(folder: Path) -> None:
        (folder / "big").write_bytes(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        yield root, fill if is_mounted else no_space
    finally:
        if is_mounted:
            subprocess.run(["umount", str(root)], check=True)


def test_a_full_disk_is_said_and_leaves_the_store_as_it_was(
    full_disk: tuple[Path, Callable[[Path], None]],
) -> None:
    root, overfill = full_disk
    store = Store(root=root, log=pytest.fail)
    store.get_or_build(OTHER, build)
    with pytest.raises(StoreError, match=f"{root} cannot be written.*No space left.*TRNC_STORE"):
        store.get_or_build(KEY, overfill)
    assert store.get(KEY) is None
    assert store.get(OTHER) is not None
    assert list((root / "building").iterdir()) == []
    assert store.get_or_build(KEY, build).is_dir()


def test_a_file_size_limit_is_said(store: Store) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            store.get_or_build(KEY, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.get(KEY) is None


def test_a_disk_that_is_full_at_the_last_moment_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(StoreError, match="No space left"):
            store.get_or_build(KEY, build)
    assert store.get(KEY) is None
    assert list((store.root / "building").iterdir()) == []


def test_an_error_of_the_build_itself_is_not_blamed_on_the_store(store: Store) -> None:
    def no_compiler(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/usr/bin/compiler")

    with pytest.raises(PermissionError, match="/usr/bin/compiler"):
        store.get_or_build(KEY, no_compiler)


READ_ONLY = """
import os, sys
from pathlib import Path
from trnc.compiler.store import ArtifactKey, Store
from trnc.errors import StoreError

if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root may write anywhere
lines = []
store = Store(root=Path(sys.argv[1]), log=lines.append)
key = lambda graph: ArtifactKey.of("stage", {"graph": graph, "torch": "2.13.0"})
assert store.get(key("abc")) is not None
assert store.get_or_build(key("abc"), None) is not None
assert len(store.entries()) == 2
assert store.get(key("def")) is None
print(lines)
for graph in ("def", "absent"):
    try:
        store.get_or_build(key(graph), None)
    except StoreError as error:
        print(error)
"""


def test_a_read_only_store_serves_what_it_has(store: Store, tmp_path: Path) -> None:
    store.get_or_build(KEY, build)
    flip(store.get_or_build(OTHER, build) / "stage.so")
    folders = [store.root, *(p for p in store.root.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):
        ours = parent.name.startswith(("pytest", "popen-", "test_"))  # popen- is pytest-xdist's
        if ours and parent.owner() == tmp_path.owner():
            parent.chmod(0o755)
    for lock in (store.root / "locks").iterdir():
        lock.chmod(0o444)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(store.root)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    log, damaged, absent = done.stdout.splitlines()
    assert "checksum of stage.so" in log
    assert "cannot be set aside" in log
    for line in (damaged, absent):
        assert f"the store {store.root} cannot be written" in line
        assert "TRNC_STORE" in line
    assert store.get(KEY) is not None


# Where it is


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"TRNC_STORE": "/a", "TRNC_CACHE": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"TRNC_CACHE": "/b", "XDG_CACHE_HOME": "/c"}, "/b/store"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/trnc/store"),
        ({"TRNC_STORE": ""}, "/home/someone/.cache/trnc/store"),
    ],
)
def test_the_default_root_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], root: str
) -> None:
    for name in ("TRNC_STORE", "TRNC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_root() == Path(root)
