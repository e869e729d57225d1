"""Lower a model of which only the config is at hand, and say what Trainium would make of it.

    python tools/lower_config.py MODEL [--preset default ...] [--features] [--ranks 32] [--all]

MODEL is a config.json, every matrix of which counts as bf16, or the name of a model in `graphs/`.
No weights are read: every shape is abstract. One variant of each step is lowered, the one with
everything on, at the largest bucket and context (`--all` for every variant). `--preset all` means
all that ship, `--features` every feature. Prints the rules that are broken, the memory of one core,
the time, and the peak memory; exit status 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from trnc.cli.trainium_command import print_checked
from trnc.compiler.backends.stablehlo.build import Plan, plan_modules
from trnc.compiler.backends.stablehlo.check import check_modules
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.targets import neuron_target
from trnc.compiler.compile import TracedStage
from trnc.compiler.graphs import LockedModel, config_of, read_model
from trnc.compiler.program import ProgramConfig
from trnc.core import VariantKey
from trnc.models.config import ModelConfig, from_hf
from trnc.models.stage import LayerFormats, StageSpec, WeightFormats
from trnc.models.weights import layer_matrices
from trnc.presets import FEATURES, load_preset, preset_names, with_features

GRAPHS = Path(__file__).resolve().parent.parent / "graphs"

Lowered = tuple[VariantKey, Module]
Traced = dict[StageSpec, TracedStage]


def read(model: str) -> LockedModel:
    """Read a model's shape and the formats of its weights."""
    if not model.endswith(".json"):
        return read_model(GRAPHS, model)
    config = from_hf(json.loads(Path(model).read_text()))
    return LockedModel(config, bf16_formats(config))


def bf16_formats(model: ModelConfig) -> WeightFormats:
    """Every matrix in bf16, as the released checkpoints of large models have them."""
    layers = (
        LayerFormats(**dict.fromkeys(layer_matrices(model, index), "bf16"))
        for index in range(model.num_layers + model.mtp_layers)
    )
    return WeightFormats(embed="bf16", head="bf16", layers=tuple(layers))


def configure(locked: LockedModel, name: str, arguments: argparse.Namespace) -> ProgramConfig:
    """Put a model under a preset, with what the arguments change of it."""
    preset = load_preset(name)
    if arguments.features:
        preset = with_features(preset, dict.fromkeys(FEATURES, True))
    context = min(preset.max_context, locked.model.max_position)
    options = replace(preset.trainium, ranks=arguments.ranks)
    return config_of(locked, replace(preset, max_context=context, trainium=options))


def largest(keys: list[VariantKey]) -> list[VariantKey]:
    """The last variant of each step: the largest bucket and context, with every feature."""
    return list({key.step: key for key in sorted(keys)}.values())


def lowered(plan: Plan, keys: list[VariantKey], console: Console) -> Iterator[Lowered]:
    """Lower one variant after the other."""
    for key in keys:
        began = time.perf_counter()
        module = plan.lower(key)
        seconds = time.perf_counter() - began
        if len(keys) < len(plan.programs):
            console.print(f"{key}: {len(module.text):,} bytes of StableHLO in {seconds:.1f} s")
        yield key, module


def check(config: ProgramConfig, known: Traced, arguments: argparse.Namespace) -> bool:
    """Lower what is asked for of one preset and print what is found; return whether it is clean."""
    console, target = Console(), neuron_target(arguments.target)
    began = time.perf_counter()
    plan = plan_modules(config, target, report=lambda *_: None, known=known)
    traced = time.perf_counter()
    keys = list(plan.programs) if arguments.all else largest(list(plan.programs))
    modules = lowered(plan, keys, console)
    checked = check_modules(modules, target, config.preset.trainium.lnc)
    print_checked(checked, console)
    console.print(
        f"{config.preset.name}: {len(keys)} of {len(plan.programs)} variants are lowered, in "
        f"{traced - began:.1f} s of tracing and {time.perf_counter() - traced:.1f} s of lowering"
    )
    return not checked.found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a config.json, or the name of a model in graphs/")
    parser.add_argument("--preset", nargs="+", default=["default"])
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--features", action="store_true", help="with every feature on")
    parser.add_argument("--all", action="store_true", help="lower every variant")
    arguments = parser.parse_args()

    locked = read(arguments.model)
    names = preset_names() if arguments.preset == ["all"] else arguments.preset
    known: Traced = {}
    clean = [check(configure(locked, name, arguments), known, arguments) for name in names]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.1f} GiB; {clean.count(True)} of {len(names)} presets are clean")
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
