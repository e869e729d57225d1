"""What a machine without Neuron's SDK hands to one that has it: modules, commands, a manifest.

    bundle.json                 the preset, the target, and each module's variant and flags
    compile.sh                  the same commands for people
    modules/<n>-<variant>/      model.hlo, module.mlir, interface.json

`trnc compile --finish BUNDLE` compiles what is missing, on any machine with `neuronx-cc`, and puts
each `model.neff` beside its module. Nothing in a bundle is an absolute path.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trnc.compiler.backends.stablehlo import neuron
from trnc.compiler.store import Store
from trnc.core import VariantKey
from trnc.errors import CompileError, ConfigError
from trnc.presets import TrainiumOptions

BUNDLE_FILE = "bundle.json"
MODEL_FILE = "model.hlo"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One module: its variant, its folder in the bundle, and the compiler's flags."""

    variant: VariantKey
    folder: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """The content of `bundle.json`."""

    format: int
    preset: str
    target: str
    ranks: int
    entries: tuple[Entry, ...]


def write_bundle(
    folder: Path,
    modules: dict[VariantKey, Path],
    *,
    preset: str,
    target: str,
    options: TrainiumOptions,
) -> Bundle:
    """Write a bundle of module artifacts (folders with `module.hlo`) into a new folder.

    Raises:
        ConfigError: the folder is there and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--bundle {folder}: is not empty; give another folder")
    entries = []
    for number, (key, source) in enumerate(modules.items()):
        name = f"modules/{number:03d}-{_file_name(key)}"
        (folder / name).mkdir(parents=True)
        shutil.copyfile(source / "module.hlo", folder / name / MODEL_FILE)
        for file in ("module.mlir", "interface.json"):
            shutil.copyfile(source / file, folder / name / file)
        entries.append(Entry(key, name, neuron.flags(options, key.step, target)))
    bundle = Bundle(FORMAT, preset, target, options.ranks, tuple(entries))
    text = msgspec.json.format(msgspec.json.encode(bundle), indent=1)
    (folder / BUNDLE_FILE).write_bytes(text + b"\n")
    script = [
        "#!/bin/sh",
        "# `trnc compile --finish` runs these in parallel and goes on where it was.",
        "set -e",
    ]
    script += [shlex.join(_command(bundle, entry)) for entry in entries]
    (folder / "compile.sh").write_text("\n".join(script) + "\n")
    return bundle


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle; raises ConfigError where the folder is none."""
    try:
        bundle = msgspec.json.decode((folder / BUNDLE_FILE).read_bytes(), type=Bundle)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--finish {folder}: is no bundle: {error}") from None
    if bundle.format != FORMAT:
        raise ConfigError(
            f"--finish {folder}: has format {bundle.format}, this trnc reads {FORMAT}"
        )
    return bundle


def finish(
    folder: Path, *, store: Store, workers: int, report: Callable[[int, int, str], None]
) -> int:
    """Compile every module of a bundle and put its NEFF beside it; return how many there are.

    Raises:
        CompileError: there is no compiler here, or it failed for some modules.
    """
    bundle = read_bundle(folder)
    version = neuron.compiler_version()
    if version is None:
        raise CompileError(
            f"--finish needs {neuron.COMPILER}, which is not on PATH; run it on a machine with "
            "AWS's Neuron SDK"
        )
    jobs = [_job(folder, bundle, entry) for entry in bundle.entries]
    keys = neuron.compile_all(jobs, version=version, store=store, workers=workers, report=report)
    for job in jobs:
        found = store.get(keys[job.label])
        if found is None:
            raise CompileError(f"{job.label} vanished from {store.root}; run it again")
        shutil.copyfile(found / neuron.NEFF_FILE, job.hlo.parent / neuron.NEFF_FILE)
    return len(jobs)


def _job(folder: Path, bundle: Bundle, entry: Entry) -> neuron.Job:
    hlo = (folder / entry.folder / MODEL_FILE).resolve()
    return neuron.Job(str(entry.variant), hlo, entry.flags, bundle.target, bundle.ranks)


def _command(bundle: Bundle, entry: Entry) -> list[str]:
    job = _job(Path(), bundle, entry)
    paths = [f"{entry.folder}/{name}" for name in (MODEL_FILE, neuron.NEFF_FILE, neuron.LOG_FILE)]
    return neuron.command(job, *paths)


def _file_name(key: VariantKey) -> str:
    return str(key).replace("/", "-").replace("+", "-").replace("@", "-")
