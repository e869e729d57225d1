"""The manifest: every variant of one configuration, its program and its artifacts, as data.

It is all that a serving process needs to link programs: no stage is built or traced again. Its key
holds the configuration and a fingerprint of our own sources, so it is only a hint of where to look:
a changed source traces again, and finds by digest every artifact that is still right.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

import msgspec
import torch

from trnc.compiler.program import ProgramConfig
from trnc.compiler.store import ArtifactKey
from trnc.core import VariantKey
from trnc.ops.native import Target
from trnc.presets import TrainiumOptions

MANIFEST_FILE = "manifest.json"
STAGE_FILE = "stage.so"  # of the artifact of a stage
_SOURCES = ("core.py", "presets.py", "models", "ops", "compiler")


class LinkedCall(msgspec.Struct, frozen=True, tag="call"):
    """A stage call: the id of the stage's artifact, and the names of its values."""

    artifact: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class LinkedUpdate(msgspec.Struct, frozen=True, tag="update"):
    """A write to the device state by one of our operators."""

    op: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant and its program; `outputs` are read back by the host."""

    key: VariantKey
    steps: tuple[LinkedCall | LinkedUpdate, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Artifact ids. `stages` maps the id of each compiled stage to the digest of its graph."""

    preset: str
    backend: str
    kernels: str
    runner: str
    stages: dict[str, str]
    variants: tuple[Variant, ...]


def manifest_key(config: ProgramConfig, target: Target) -> ArtifactKey:
    """The key under which the manifest of a configuration is kept.

    The C++ compiler is not in it, so that a machine without one can serve what another compiled.
    """
    factors = {
        "backend": "inductor",
        "target": target.name,
        "torch": torch.__version__,
        "model": _digest(asdict(config.model)),
        "formats": _digest(asdict(config.formats)),
        "preset": _digest(asdict(replace(config.preset, trainium=TrainiumOptions()))),
        "sources": source_fingerprint(),
    }
    return ArtifactKey.of("manifest", factors)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write the manifest into an artifact's folder."""
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest that `write_manifest` wrote."""
    return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)


def source_fingerprint() -> str:
    """Return a digest of every source that takes part in tracing or is compiled, C++ included."""
    root = Path(str(resources.files("trnc")))
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
