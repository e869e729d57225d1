"""Starting the XLA runner: the modules of the Trainium backend, from the store or lowered now.

Only this module and what it imports need jax: `trnc.runtime.start` imports it where it is asked
for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trnc.compiler.backends.stablehlo import neuron
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
    options = config.preset.trainium
    given = os.environ.get("NEURON_CC_FLAGS", "")

    def compile(key: VariantKey, module: Module) -> Any:
        if platform == "cpu":
            return devices.compile(module.text, optimise=False)
        os.environ.update(neuron.environment(options, key.step, given))
        return devices.compile(module.text, optimise=True)

    if platform == "cpu":
        prepare_host(options.ranks)
    else:
        # The size of a core counts from the moment that the devices are looked for.
        os.environ.update(neuron.environment(options, "decode", given))
    devices = Devices(platform, options.ranks)
    report(f"compiling {len(found.modules)} modules with XLA for platform '{platform}'")
    return XlaRunner(
        modules=found.modules,
        tensors=tensors,
        formats=found.manifest.formats,
        model=config.model,
        devices=devices,
        compile=compile,
    )
