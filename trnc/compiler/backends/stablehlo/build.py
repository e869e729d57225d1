"""From a configuration to the modules of all its variants, in the store.

The whole model's config is `ProgramConfig.model`; what is traced is the share of one core. A module
is keyed by the graphs of its stages and all else that it is lowered from; a manifest, keyed by the
configuration and our sources, says where the modules are without tracing anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import jax
import msgspec
import torch

from trnc.compiler.backends.stablehlo.functions import Functions
from trnc.compiler.backends.stablehlo.link import lower_step
from trnc.compiler.backends.stablehlo.memory import count_pages
from trnc.compiler.backends.stablehlo.module import Interface, Module, hlo_proto
from trnc.compiler.backends.stablehlo.parallel import local_model
from trnc.compiler.backends.stablehlo.step import (
    Lowering,
    packed_formats,
    read_stages,
    sizes_of,
)
from trnc.compiler.backends.stablehlo.targets import NeuronTarget
from trnc.compiler.compile import TracedStage, trace_all
from trnc.compiler.manifest import source_fingerprint
from trnc.compiler.matrix import context_buckets
from trnc.compiler.program import Call, Program, ProgramConfig
from trnc.compiler.store import ArtifactKey, Store
from trnc.core import VariantKey
from trnc.errors import ConfigError
from trnc.models.config import ModelConfig
from trnc.models.stage import StageSpec

TEXT_FILE = "module.mlir"
HLO_FILE = "module.hlo"
INTERFACE_FILE = "interface.json"
MANIFEST_FILE = "modules.json"

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """All programs of a configuration as one core runs them, ready to lower one by one.

    `config` is one core's, `whole` the model of all cores. `formats` are those of the weights by
    name, `pages` the KV pages of the device, page 0 included.
    """

    config: ProgramConfig
    whole: ModelConfig
    target: NeuronTarget
    programs: Mapping[VariantKey, Program]
    functions: Functions
    digests: Mapping[StageSpec, str]
    formats: Mapping[str, str]
    pages: int

    @property
    def ranks(self) -> int:
        """How many cores share the model."""
        return self.config.preset.trainium.ranks

    def lowering(self, key: VariantKey) -> Lowering:
        """Return all that a variant is lowered from."""
        return Lowering(
            config=self.config,
            program=self.programs[key],
            functions=self.functions,
            sizes=sizes_of(key, self.config.preset, pages=self.pages),
            whole=self.whole,
        )

    def lower(self, key: VariantKey) -> Module:
        """Lower one variant. Raises CompileError naming the op, or the stage, that cannot be."""
        return lower_step(self.lowering(key))

    def key(self, key: VariantKey) -> ArtifactKey:
        """The key of a variant's module: all that its bytes depend on."""
        program, lowering = self.programs[key], self.lowering(key)
        steps = [
            (self.digests[step.stage], step.inputs, step.outputs)
            if isinstance(step, Call)
            else (step.op, step.inputs)
            for step in program.steps
        ]
        factors = {
            "variant": str(key),
            "program": _digest([steps, program.outputs]),
            "sizes": _digest(asdict(lowering.sizes)),
            "model": _digest(asdict(self.whole)),
            "ranks": str(self.ranks),
            "matmul": self.config.preset.trainium.matmul,
            "lowering": lowering_digest(),
            "jax": _jax_version(),
        }
        return ArtifactKey.of("module", factors)


@dataclass(frozen=True, slots=True)
class ModuleManifest:
    """Where the modules of a configuration are: artifact ids, in the order of the matrix."""

    preset: str
    target: str
    pages: int
    formats: dict[str, str]
    modules: tuple[tuple[VariantKey, str], ...]


def plan_modules(
    config: ProgramConfig,
    target: NeuronTarget,
    *,
    report: Report,
    known: dict[StageSpec, TracedStage] | None = None,
) -> Plan:
    """Trace every stage of one core's share of the model; `report` and `known` are as of
    `trace_all`, and what is traced is added to `known`.

    Raises:
        ConfigError: the model cannot be divided by the preset's `ranks`, or a KV page fits nowhere.
    """
    options = config.preset.trainium
    if options.lnc not in target.lnc:
        sizes = " or ".join(map(str, target.lnc))
        raise ConfigError(f"'trainium.lnc' is {options.lnc}; target {target.name} has {sizes}")
    local = replace(
        config,
        model=local_model(config.model, options.ranks),
        contexts=context_buckets(config.preset),
    )
    programs, traced = trace_all(local, report=report, known=known)
    if known is not None:
        known.update(traced)
    graphs = read_stages(traced)
    return Plan(
        config=local,
        whole=config.model,
        target=target,
        programs=programs,
        functions=Functions(graphs),
        digests={spec: stage.digest for spec, stage in traced.items()},
        formats=packed_formats(tuple(programs.values()), graphs),
        pages=count_pages(local, target),
    )


def build_modules(plan: Plan, store: Store, *, report: Report) -> ModuleManifest:
    """Lower what the store lacks, then write the manifest; `report(done, total, variant)`."""
    modules = []
    for done, key in enumerate(plan.programs):
        report(done, len(plan.programs), str(key))
        artifact = plan.key(key)
        store.get_or_build(artifact, lambda out, key=key: write_module(plan.lower(key), out))  # type: ignore[misc]
        modules.append((key, artifact.id))
    manifest = ModuleManifest(
        preset=plan.config.preset.name,
        target=plan.target.name,
        pages=plan.pages,
        formats=dict(plan.formats),
        modules=tuple(modules),
    )
    whole = replace(plan.config, model=plan.whole)
    store.get_or_build(manifest_key(whole, plan.target), lambda out: _write(manifest, out))
    return manifest


def load_modules(
    config: ProgramConfig, target: NeuronTarget, store: Store
) -> tuple[ModuleManifest, dict[VariantKey, Module]] | None:
    """Return the manifest and all of its modules, or None where one of them is missing."""
    folder = store.get(manifest_key(config, target))
    if folder is None:
        return None
    content = (folder / MANIFEST_FILE).read_bytes()
    manifest = msgspec.json.decode(content, type=ModuleManifest)
    modules = {}
    for key, artifact in manifest.modules:
        found = store.find(artifact)
        if found is None:
            return None
        modules[key] = read_module(found)
    return manifest, modules


def manifest_key(config: ProgramConfig, target: NeuronTarget) -> ArtifactKey:
    """The key of the manifest of a configuration (of all cores)."""
    factors = {
        "target": target.name,
        "torch": torch.__version__,
        "jax": _jax_version(),
        "model": _digest(asdict(config.model)),
        "formats": _digest(asdict(config.formats)),
        "preset": _digest(asdict(config.preset)),
        "sources": source_fingerprint(),
    }
    return ArtifactKey.of("modules", factors)


def write_module(module: Module, folder: Path) -> None:
    """Write a module as the files of an artifact."""
    (folder / TEXT_FILE).write_text(module.text)
    (folder / HLO_FILE).write_bytes(hlo_proto(module.text))
    (folder / INTERFACE_FILE).write_bytes(msgspec.json.encode(module.interface))


def read_module(folder: Path) -> Module:
    """Read what `write_module` wrote."""
    interface = msgspec.json.decode((folder / INTERFACE_FILE).read_bytes(), type=Interface)
    return Module((folder / TEXT_FILE).read_text(), interface)


def lowering_digest() -> str:
    """Return a sha-256 of the modules of this package: a factor of every artifact they shape."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _write(manifest: ModuleManifest, folder: Path) -> None:
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))


def _jax_version() -> str:
    return f"{jax.__version__}, jaxlib {version('jaxlib')}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
