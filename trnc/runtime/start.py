"""Starting an executor: model, manifest, artifacts, weights, state, in that order.

Everything slow is here and is timed; after `start_executor` returns nothing is traced or compiled.
The weights are loaded in a thread of their own, so the seconds of the parts overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trnc.checkpoint.gguf_file import GgufFile
from trnc.checkpoint.source import Source, resolve
from trnc.checkpoint.weights import Weights, load_weights
from trnc.compiler.backends.runner import load_runner
from trnc.compiler.backends.stablehlo import require_jax
from trnc.compiler.manifest import STAGE_FILE, Manifest, manifest_key, read_manifest
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import ProgramConfig
from trnc.compiler.store import Store
from trnc.compiler.tier import open_store
from trnc.core import ExecutorInfo
from trnc.errors import ConfigError, StoreError
from trnc.models.config import ModelConfig, load_config
from trnc.models.weights import bind_tables, choose_formats, exact_formats, pack_weights
from trnc.ops import native
from trnc.presets import Preset
from trnc.runtime.catalog import Catalog
from trnc.runtime.eager_runner import EagerRunner
from trnc.runtime.executor import ProgramExecutor, ProgramRunner
from trnc.runtime.native_runner import NativeRunner
from trnc.runtime.packed import load_packed, packed_key
from trnc.runtime.rounds import measure_rounds
from trnc.runtime.state import allocate_state, count_pages, free_memory_bytes

Report = Callable[[str], None]
Backend = Literal["inductor", "eager", "xla-cpu", "neuron"]
Compiler = Callable[[ProgramConfig, native.Target, Store], Manifest]
WaitForWeights = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StartOptions:
    """What to start, and where compiled artifacts and packed weights are kept.

    `packed` None: packed weights are not kept. `mtp` is the file of an MTP block.
    """

    model: str
    preset: Preset
    backend: Backend
    store: Path
    packed: Path | None = None
    mtp: str | None = None
    require_cache: bool = False


@dataclass(slots=True)
class Timings:
    """Seconds of each part of the start, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Model:
    """A resolved model: its shape, its (not yet loaded) weights and their packed formats."""

    source: Source
    config: ModelConfig
    weights: Weights


def open_model(name: str, *, report: Report, mtp: str | None = None) -> Model:
    """Resolve a model and read its config; raises CheckpointError.

    `mtp` is the file of an MTP block (see `checkpoint.mtp_file`), instead of the one that the model
    comes with.
    """
    source = resolve(name, report=report)
    if mtp is not None:
        source = replace(source, mtp=Path(mtp).expanduser())
    file = GgufFile(source.path) if source.kind == "gguf" else None
    config = load_config(source, file)
    return Model(source=source, config=config, weights=load_weights(source, config, file))


def program_config(model: Model, preset: Preset, backend: Backend) -> ProgramConfig:
    """Return what the programs of a configuration depend on.

    The context is cut to what the model computes; the eager backend keeps everything in f32. The
    MTP layer, its weights and its pages, is part of it only where the preset speculates.

    Raises:
        ConfigError: the preset speculates and the model has no MTP layer.
    """
    without = replace(model.config, mtp_layers=0, mtp_vocab=0)
    config = model.config if preset.mtp_depths else without
    if preset.mtp_depths and not config.mtp_layers:
        raise ConfigError(
            f"preset '{preset.name}' speculates ('mtp_depths'), but model '{model.source.name}' "
            "has no layer for multi-token prediction; give a file with one (--mtp), or take a "
            "preset without it, such as 'default'"
        )
    limit = config.sliding_window or config.max_position
    preset = replace(preset, max_context=min(preset.max_context, limit))
    if backend == "eager":
        exact = replace(preset, kv_dtype="float32")
        return ProgramConfig(config, exact_formats(config), exact)
    stored = {name: model.weights.stored_type(name) for name in model.weights}
    return ProgramConfig(config, choose_formats(stored, config), preset)


def start_executor(
    options: StartOptions, compiler: Compiler, report: Report
) -> tuple[ProgramExecutor, dict[str, float], tuple[str, ...]]:
    """Return a ready executor, the seconds of each part of the start, and its features.

    `compiler` is called only where something is missing from the store.

    Raises:
        TrncError: with a message for the person who started it.
    """
    timings = Timings()
    with timings.measure("model"):
        model = open_model(options.model, report=report, mtp=options.mtp)
        config = program_config(model, options.preset, options.backend)

    def load() -> dict[str, Tensor]:
        with timings.measure("weights"):
            return _load_weights(model, config, options.packed, report)

    with ThreadPoolExecutor(1) as pool:
        weights = pool.submit(load).result
        if options.backend == "eager":
            executor = _start_eager(config, weights, timings)
        elif options.backend in ("xla-cpu", "neuron"):
            executor = _start_xla(config, options, weights, timings, report)
        else:
            store = open_store(options.store, report)
            executor = _start_compiled(config, store, compiler, weights, timings)
    return executor, timings.seconds, options.preset.features


def require_cache(config: ProgramConfig, target: native.Target, store: Store) -> Manifest:
    """A compiler that refuses: what `--require-cache` asks for."""
    raise StoreError(
        f"--require-cache: not every artifact of preset '{config.preset.name}' for target "
        f"'{target.name}' is whole in {store.root}; run `trnc compile` with the same --model and "
        "--preset first, or see what differs with `trnc explain-miss`"
    )


def load_manifest(config: ProgramConfig, target: native.Target, store: Store) -> Manifest | None:
    """Return the manifest of a configuration if it and all of its artifacts are in the store."""
    folder = store.get(manifest_key(config, target))
    if folder is None:
        return None
    manifest = read_manifest(folder)
    ids = [manifest.kernels, manifest.runner, *manifest.stages]
    return manifest if all(store.find(artifact) is not None for artifact in ids) else None


def _start_compiled(
    config: ProgramConfig,
    store: Store,
    compiler: Compiler,
    weights: WaitForWeights,
    timings: Timings,
) -> ProgramExecutor:
    target = native.detect_target()
    with timings.measure("artifacts"):
        manifest = load_manifest(config, target, store)
    if manifest is None:
        with timings.measure("compile"):
            manifest = compiler(config, target, store)
    with timings.measure("artifacts"):
        _load_libraries(manifest, store)
    tensors = weights()
    with timings.measure("state"):
        num_pages = count_pages(config.model, config.preset, free_bytes=free_memory_bytes())
        tensors |= allocate_state(config.model, config.preset, num_pages=num_pages)
    with timings.measure("link"):
        paths = {a: str(_found(store, a) / STAGE_FILE) for a in manifest.stages}
        runner = NativeRunner(manifest=manifest, stage_paths=paths, tensors=tensors)
    built = store.builds
    keys = tuple(variant.key for variant in manifest.variants)
    executor = _executor(
        config, Catalog.of(keys), runner, num_pages, count_compiles=lambda: store.builds - built
    )
    if config.speculates and not config.preset.mtp_always:
        with timings.measure("rounds"):
            rounds = tuple(measure_rounds(executor, config.preset.decode_rows))
        executor.info = replace(executor.info, rounds=rounds)
    return executor


def _load_libraries(manifest: Manifest, store: Store) -> None:
    native.load_kernels(_found(store, manifest.kernels) / native.LIBRARY_NAME)
    load_runner(_found(store, manifest.runner))


def _found(store: Store, artifact: str) -> Path:
    folder = store.find(artifact)
    if folder is None:
        raise StoreError(f"artifact {artifact[:12]} vanished from {store.root}; start again")
    return folder


def _start_eager(
    config: ProgramConfig, weights: WaitForWeights, timings: Timings
) -> ProgramExecutor:
    tensors = weights()
    with timings.measure("state"):
        num_pages = count_pages(config.model, config.preset, free_bytes=free_memory_bytes())
        tensors |= allocate_state(config.model, config.preset, num_pages=num_pages)
    runner = EagerRunner(config=config, tensors=tensors)
    catalog = Catalog.of(variant_matrix(config.preset))
    return _executor(config, catalog, runner, num_pages, count_compiles=lambda: 0)


def _start_xla(
    config: ProgramConfig,
    options: StartOptions,
    weights: WaitForWeights,
    timings: Timings,
    report: Report,
) -> ProgramExecutor:
    """Start on the Trainium backend's modules, on the CPU or on Neuron cores."""
    require_jax(f"--backend {options.backend}")
    from trnc.runtime.xla_start import load_or_lower, start_runner

    store = open_store(options.store, report)
    with timings.measure("artifacts"):
        found = load_or_lower(config, store, require_cache=options.require_cache, report=report)
    tensors = weights()
    with timings.measure("link"):
        platform = "cpu" if options.backend == "xla-cpu" else "neuron"
        runner = start_runner(config, found, tensors, platform=platform, report=report)
    catalog = Catalog.of(found.modules)
    return _executor(config, catalog, runner, found.manifest.pages, count_compiles=lambda: 0)


def _load_weights(
    model: Model, config: ProgramConfig, packed: Path | None, report: Report
) -> dict[str, Tensor]:
    def pack() -> Iterator[tuple[str, Tensor]]:
        return pack_weights(model.weights, config.model, config.formats)

    with torch.inference_mode():
        tables = bind_tables(config.model, max_context=config.preset.positions)
        if packed is None:
            return tables | dict(pack())
        key = packed_key(model.source, config.model, config.formats)
        return tables | load_packed(key, packed, pack, report)


def _executor(
    config: ProgramConfig,
    catalog: Catalog,
    runner: ProgramRunner,
    num_pages: int,
    *,
    count_compiles: Callable[[], int],
) -> ProgramExecutor:
    preset = config.preset
    info = ExecutorInfo(
        max_rows=preset.max_rows,
        max_prefill_tokens=preset.max_prefill_tokens,
        max_context=preset.max_context,
        page_size=preset.page_size,
        num_pages=num_pages,
        vocab_size=config.model.vocab_size,
        mtp_depths=preset.mtp_depths,
        mtp_always=preset.mtp_always,
    )
    return ProgramExecutor(
        info=info,
        catalog=catalog,
        runner=runner,
        max_pages=preset.max_pages,
        spare_slot=preset.max_rows,
        speculates=config.speculates,
        count_compiles=count_compiles,
    )
