"""Lower a model of which only the config is at hand, and say what Trainium would make of it.

    python tools/lower_config.py CONFIG.json --ranks 32 [--preset default] [--target trn2] [--mtp]

No weights are read: every shape is abstract, and every matrix counts as bf16. One variant of each
step is lowered, the one with everything on, at the largest bucket and context (`--all` for every
variant). Prints the rules that are broken, the memory of one core, the time, and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from trnc.cli.trainium_command import print_checked
from trnc.compiler.backends.stablehlo.build import Plan, plan_modules
from trnc.compiler.backends.stablehlo.check import check_modules
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.targets import neuron_target
from trnc.compiler.program import ProgramConfig
from trnc.core import VariantKey
from trnc.models.config import ModelConfig, from_hf
from trnc.models.stage import LayerFormats, WeightFormats
from trnc.models.weights import layer_matrices
from trnc.presets import load_preset


def bf16_formats(model: ModelConfig) -> WeightFormats:
    """Every matrix in bf16, as the released checkpoints of large models have them."""
    layers = (
        LayerFormats(**dict.fromkeys(layer_matrices(model, index), "bf16"))
        for index in range(model.num_layers + model.mtp_layers)
    )
    return WeightFormats(embed="bf16", head="bf16", layers=tuple(layers))


def largest(keys: list[VariantKey]) -> list[VariantKey]:
    """The last variant of each step: the largest bucket and context, with every feature."""
    return list({key.step: key for key in sorted(keys)}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--preset", default="default")
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="lower every variant")
    parser.add_argument("--mtp", action="store_true", help="with the layer that drafts")
    arguments = parser.parse_args()

    model = from_hf(json.loads(arguments.config.read_text()))
    model = model if arguments.mtp else replace(model, mtp_layers=0)
    preset = load_preset(arguments.preset)
    options = replace(preset.trainium, ranks=arguments.ranks)
    limit = min(preset.max_context, model.max_position)
    preset = replace(preset, trainium=options, max_context=limit)
    config = ProgramConfig(model=model, formats=bf16_formats(model), preset=preset)

    console = Console()
    began = time.perf_counter()
    plan = plan_modules(config, neuron_target(arguments.target), report=lambda *_: None)
    traced = time.perf_counter()
    console.print(f"{len(plan.programs)} variants; traced in {traced - began:.1f} s")
    keys = list(plan.programs)
    modules = {key: lower(plan, key, console) for key in (keys if arguments.all else largest(keys))}
    print_checked(check_modules(modules, plan.target, options.lnc), console)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = time.perf_counter() - began
    console.print(f"{len(modules)} modules in {seconds:.1f} s, peak memory {peak:.1f} GiB")


def lower(plan: Plan, key: VariantKey, console: Console) -> Module:
    began = time.perf_counter()
    module = plan.lower(key)
    seconds = time.perf_counter() - began
    console.print(f"{key}: {len(module.text):,} bytes of StableHLO in {seconds:.1f} s")
    return module


if __name__ == "__main__":
    main()
