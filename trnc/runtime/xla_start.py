"""Starting the XLA runner: the modules of the Trainium backend, from the store or lowered now.

Only this module and what it imports need jax: `trnc.runtime.start` imports it where it is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from trnc.compiler.backends.stablehlo.build import (
    ModuleManifest,
    build_modules,
    load_modules,
    plan_modules,
)
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.targets import DEFAULT_TARGET, neuron_target
from trnc.compiler.program import ProgramConfig
from trnc.compiler.store import Store
from trnc.core import VariantKey
from trnc.errors import StoreError
from trnc.runtime.xla_client import Devices, prepare_host
from trnc.runtime.xla_runner import XlaRunner

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class XlaModules:
    """What a start on XLA needs of the compiler."""

    manifest: ModuleManifest
    modules: Mapping[VariantKey, Module]


def load_or_lower(
    config: ProgramConfig, store: Store, *, require_cache: bool, report: Report
) -> XlaModules:
    """Return the modules of a configuration; what the store lacks is traced and lowered.

    Raises:
        StoreError: `require_cache`, and something is missing.
    """
    target = neuron_target(DEFAULT_TARGET)
    loaded = load_modules(config, target, store)
    if loaded is None and require_cache:
        raise StoreError(
            f"--require-cache: not every module of preset '{config.preset.name}' is whole in "
            f"{store.root}; run `trnc compile --backend trainium` with the same model and preset"
        )
    if loaded is None:
        report("lowering the variants to StableHLO")
        plan = plan_modules(config, target, report=lambda *_: None)
        build_modules(plan, store, report=lambda *_: None)
        loaded = load_modules(config, target, store)
        assert loaded is not None, "it was built just now"
    return XlaModules(*loaded)


def start_runner(
    config: ProgramConfig,
    found: XlaModules,
    tensors: Mapping[str, Tensor],
    *,
    platform: str,
    report: Report,
) -> XlaRunner:
    """Put the weights on the devices and compile every module for them."""
    ranks = config.preset.trainium.ranks
    if platform == "cpu":
        prepare_host(ranks)

    def compiling(done: int, total: int, variant: str) -> None:
        if done == 0:
            report(f"compiling {total} modules with XLA, the first is {variant}")

    return XlaRunner(
        modules=found.modules,
        tensors=tensors,
        formats=found.manifest.formats,
        model=config.model,
        devices=Devices(platform, ranks),
        report=compiling,
        optimise=platform != "cpu",
    )
