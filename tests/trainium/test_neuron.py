"""The call of `neuronx-cc`, against a compiler that is a script of ours."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from tests.cli.command import fails, trnc
from tests.trainium.serving import SMALL
from tests.trainium.tiny_plans import config_of
from trnc.compiler.backends.stablehlo import bundle, neuron
from trnc.compiler.backends.stablehlo.build import ModuleManifest
from trnc.compiler.backends.stablehlo.module import Interface, Module
from trnc.compiler.store import Store
from trnc.core import VariantKey
from trnc.errors import CompileError, ConfigError
from trnc.presets import TrainiumOptions
from trnc.runtime import xla_start

# Writes what it is called with, and does what the module says: `fail`, `kill` and `kill part` (the
# first time, all of it or a process that it started), `empty` (says that all is well and writes
# nothing), or else a NEFF. It counts who runs beside it.
SCRIPT = """#!/usr/bin/env python3
import json, os, sys, time
from pathlib import Path
root = Path(__file__).parent
if sys.argv[1:] == ["--version"]:
    print(os.environ.get("FAKE_VERSION", "NeuronX Compiler version 2.25.1"))
    raise SystemExit
arguments = sys.argv[1:]
with (root / "calls").open("a") as file:
    file.write(json.dumps(arguments) + "\\n")
mark = root / f"running-{os.getpid()}"
mark.touch()
at_once = len(list(root.glob("running-*")))
with (root / "at_once").open("a") as file:
    file.write(f"{at_once}\\n")
wanted = Path(arguments[1]).read_text()
out = Path(arguments[arguments.index("--output") + 1])
Path("scratch").mkdir()
print("a line of the log")
deadline = time.monotonic() + 20
while (root / "wait_for").exists() and time.monotonic() < deadline:
    if len(list(root.glob("running-*"))) >= int((root / "wait_for").read_text()):
        (root / "wait_for").unlink(missing_ok=True)
    time.sleep(0.01)
mark.unlink()
if wanted == "fail":
    print("EOOM001 too large", file=sys.stderr)
    raise SystemExit(70)
if wanted.startswith("kill") and not (root / wanted).exists():
    (root / wanted).touch()
    if wanted == "kill":
        os.kill(os.getpid(), 9)
    print("[F137] neuronx-cc was forcibly killed")
    raise SystemExit(70)
if wanted != "empty":
    out.write_text("neff of " + wanted)
"""
OPTIONS = TrainiumOptions()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / neuron.COMPILER
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(root=tmp_path / "store", log=print)


def job(tmp_path: Path, name: str, content: str = "", **changes: object) -> neuron.Job:
    hlo = tmp_path / f"{name}.hlo"
    hlo.write_text(content or name)
    flags = neuron.flags(OPTIONS, "decode", "trn2")
    return replace(neuron.Job(name, hlo, flags, "trn2", 1), **changes)  # type: ignore[arg-type]


def build(store: Store, *jobs: neuron.Job, workers: int = 2) -> dict[str, Path | None]:
    version = neuron.compiler_version()
    assert version is not None
    keys = neuron.compile_all(
        jobs, version=version, store=store, workers=workers, report=lambda *_: None
    )
    return {label: store.get(key) for label, key in keys.items()}


def calls(compiler: Path) -> list[list[str]]:
    path = compiler / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_line_is_what_the_preset_states(compiler, store, tmp_path):
    options = TrainiumOptions(lnc=1, prefill_opt_level=3, auto_cast="matmult")
    flags = neuron.flags(options, "prefill", "trn2")
    wanted = job(tmp_path, "a", flags=flags)
    found = build(store, wanted)["a"]
    assert found is not None
    (arguments,) = calls(compiler)
    assert arguments[:2] == ["compile", str(wanted.hlo)]
    assert arguments[2:8] == [
        *("--framework=XLA", "--target=trn2", "--model-type=transformer", "--auto-cast=matmult"),
        *("--lnc=1", "-O3"),
    ]
    assert neuron.flags(options, "decode", "trn2")[-1] == "-O2"
    assert (found / neuron.NEFF_FILE).read_text() == "neff of a"
    assert sorted(p.name for p in found.iterdir()) == ["artifact.json", "compile.log", "model.neff"]


def test_what_is_compiled_is_not_compiled_again(compiler, store, tmp_path, monkeypatch):
    jobs = [job(tmp_path, name) for name in "ab"]
    first = build(store, *jobs)
    assert build(store, *jobs) == first
    assert len(calls(compiler)) == 2
    # Other ranks, flags, bytes, or another compiler: another NEFF.
    build(store, job(tmp_path, "a", ranks=32))
    build(store, job(tmp_path, "a", flags=("-O1",)))
    build(store, job(tmp_path, "a", "other bytes"))
    monkeypatch.setenv("FAKE_VERSION", "NeuronX Compiler version 2.26.0")
    build(store, job(tmp_path, "a"))
    assert len(calls(compiler)) == 6


def test_as_many_at_once_as_are_allowed(compiler, store, tmp_path):
    (compiler / "wait_for").write_text("3")
    build(store, *(job(tmp_path, str(i)) for i in range(5)), workers=3)
    at_once = [int(line) for line in (compiler / "at_once").read_text().split()]
    assert max(at_once) == 3


@pytest.mark.parametrize(("free", "wanted"), [(0, 1), (20, 1), (33, 2), (500, 4)])
def test_jobs_are_limited_by_memory(free, wanted):
    assert neuron.job_limit(4, free << 30) == wanted


def test_a_failure_is_told_with_its_log_and_never_kept(compiler, store, tmp_path):
    jobs = [job(tmp_path, "good"), job(tmp_path, "bad", "fail"), job(tmp_path, "silent", "empty")]
    with pytest.raises(CompileError, match="failed for 2 of 3 modules") as raised:
        build(store, *jobs)
    logs = {p.read_text() for p in (store.root / "logs").iterdir()}
    assert any("EOOM001 too large" in log and "--target=trn2" in log for log in logs)
    assert "bad: status 70" in str(raised.value)
    assert all(str(p) in str(raised.value) for p in (store.root / "logs").iterdir())
    before = len(calls(compiler))
    with pytest.raises(CompileError, match="failed for 2 of 2 modules"):
        build(store, *jobs)  # the good one is there, the others are tried again
    assert len(calls(compiler)) == before + 2
    jobs[1].hlo.write_text("mended")
    jobs[2].hlo.write_text("mended, too")
    assert all(build(store, *jobs).values())


@pytest.mark.parametrize("what", ["kill", "kill part"])
def test_a_job_that_was_killed_runs_again_alone(compiler, store, tmp_path, what):
    jobs = [job(tmp_path, "killed", what), *(job(tmp_path, str(i)) for i in range(3))]
    assert all(build(store, *jobs).values())
    tried = [Path(arguments[1]).stem for arguments in calls(compiler)]
    assert sorted(tried) == ["0", "1", "2", "killed", "killed"]
    assert tried[-1] == "killed"
    assert int((compiler / "at_once").read_text().split()[-1]) == 1


@dataclass(frozen=True)
class FakeDevices:
    """One device that notes what the environment is when it is looked for, and at each compile."""

    seen: list[dict[str, str]] = field(default_factory=list)
    ranks: int = 1

    def note(self, *_: object, **__: object) -> FakeDevices:
        names = ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG")
        self.seen.append({name: os.environ.get(name, "") for name in names})
        return self

    compile = note

    def put(self, shares: object) -> object:
        return shares


def test_the_plugin_of_jax_compiles_with_the_same_flags(monkeypatch):
    devices = FakeDevices()
    monkeypatch.setattr(xla_start, "Devices", devices.note)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--verbose=35")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "7")
    config = config_of("llama", replace(SMALL, trainium=replace(OPTIONS, lnc=1)))
    module = Module("", Interface((), (), (), ranks=1))
    manifest = ModuleManifest("small", "trn2", 1, {}, ())
    found = xla_start.XlaModules(manifest, dict.fromkeys(KEYS, module))
    xla_start.start_runner(config, found, {}, platform="neuron", report=print)
    assert [seen["NEURON_LOGICAL_NC_CONFIG"] for seen in devices.seen] == ["1", "1", "1"]
    flags = "--model-type=transformer --auto-cast=none --lnc=1"
    wanted = [f"{flags} -O{level} --verbose=35" for level in (2, 2, 1)]
    assert [seen["NEURON_CC_FLAGS"] for seen in devices.seen] == wanted


# Bundles


KEYS = [
    VariantKey("decode", 2, 2, context=64),
    VariantKey("prefill", 16, 2, "sample", True, context=64),
]


@pytest.fixture
def modules(tmp_path: Path) -> dict[VariantKey, Path]:
    folders = {}
    for key in KEYS:
        folder = tmp_path / key.step
        folder.mkdir()
        for name in ("module.hlo", "module.mlir", "interface.json"):
            (folder / name).write_text(f"{name} of {key.step}")
        folders[key] = folder
    return folders


def write(folder: Path, modules: dict[VariantKey, Path]) -> bundle.Bundle:
    return bundle.write_bundle(folder, modules, preset="p", target="trn2", options=OPTIONS)


def test_a_bundle_is_finished_on_another_machine(compiler, modules, store, tmp_path):
    written = write(tmp_path / "bundle", modules)
    moved = (tmp_path / "bundle").rename(tmp_path / "elsewhere")
    assert bundle.read_bundle(moved) == written
    assert str(tmp_path) not in (moved / bundle.BUNDLE_FILE).read_text()
    ran = trnc("compile", "--finish", moved, "--store", tmp_path / "store", "--jobs", "1")
    assert ran.status == 0, ran.err
    assert "Finished: 2 modules" in ran.out
    neffs = {e.variant: (moved / e.folder / neuron.NEFF_FILE).read_text() for e in written.entries}
    assert neffs == {key: f"neff of module.hlo of {key.step}" for key in KEYS}
    levels = [next(a for a in arguments if a.startswith("-O")) for arguments in calls(compiler)]
    assert levels == ["-O2", "-O1"]
    bundle.finish(moved, store=store, workers=1, report=lambda *_: None)
    assert len(calls(compiler)) == 2


def test_the_script_of_a_bundle_runs_the_same_commands(compiler, modules, tmp_path):
    folder = tmp_path / "bundle"
    write(folder, modules)
    subprocess.run(["sh", "compile.sh"], cwd=folder, check=False)
    arguments = calls(compiler)[0]
    assert arguments[1] == f"{bundle.read_bundle(folder).entries[0].folder}/model.hlo"
    assert "--model-type=transformer" in arguments


def test_what_is_no_bundle_and_what_has_no_compiler(modules, store, tmp_path, monkeypatch):
    folder = tmp_path / "bundle"
    write(folder, modules)
    with pytest.raises(ConfigError, match="is not empty"):
        write(folder, modules)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(CompileError, match="needs neuronx-cc"):
        bundle.finish(folder, store=store, workers=1, report=lambda *_: None)
    with pytest.raises(ConfigError, match="is no bundle"):
        bundle.read_bundle(tmp_path)
    file = folder / bundle.BUNDLE_FILE
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {"format": 9}))
    with pytest.raises(ConfigError, match="has format 9"):
        bundle.read_bundle(folder)
    said = fails("compile", "--bundle", tmp_path / "other")
    assert "--bundle goes with --backend trainium" in said


def test_a_bundle_that_fails_is_gone_on_with(compiler, modules, store, tmp_path):
    folder = tmp_path / "bundle"
    (modules[KEYS[1]] / "module.hlo").write_text("fail")
    entries = write(folder, modules).entries
    for _ in range(2):  # a failure is tried again, what is compiled is not
        with pytest.raises(CompileError, match=r"prefill-16x2@64/sample\+logprobs: status 70"):
            bundle.finish(folder, store=store, workers=2, report=lambda *_: None)
    assert len(calls(compiler)) == 3
    (folder / entries[1].folder / bundle.MODEL_FILE).write_text("mended")
    assert bundle.finish(folder, store=store, workers=2, report=lambda *_: None) == 2
    assert (folder / entries[1].folder / neuron.NEFF_FILE).read_text() == "neff of mended"
