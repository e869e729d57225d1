"""Every variant of the presets that ship, with every feature on: it lowers, and is clean.

Presets are cut to few and small buckets; what shapes graphs is kept. `tools/lower_config.py` does
the same at their real sizes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainium.tiny_plans import TRN2, config_of, plan_of
from tests.trainium.whole import lower_whole
from trnc.compiler.backends.stablehlo.check import check_modules
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.graphs import config_of as locked_config_of
from trnc.compiler.graphs import read_model
from trnc.compiler.program import ProgramConfig
from trnc.core import VariantKey
from trnc.presets import FEATURES, Preset, load_preset, with_features

GRAPHS = Path(__file__).parents[2] / "graphs"
# In little, the other presets have no stage that one of these has not.
PRESETS = {
    "smollm2-135m": ("default", "mtp-always", "mtp-latency", "mtp-throughput"),
    "glm4_moe": ("mtp-throughput",),
    "deepseek_v3": ("mtp-throughput",),
}


def small(preset: Preset) -> Preset:
    full = with_features(preset, dict.fromkeys(FEATURES, True), (4,))
    sizes = {"decode_rows": (2,), "prefill_tokens": (16,), "max_context": 64}
    return replace(full, name="small", description="", **sizes)  # type: ignore[arg-type]


def configured(model: str, preset: Preset) -> ProgramConfig:
    """A model under a preset; of SmolLM2 two layers and the one that drafts."""
    if model != "smollm2-135m":
        return config_of(model, preset)
    locked = read_model(GRAPHS, model)
    layers = locked.formats.layers
    few = replace(locked.formats, layers=(*layers[:2], layers[-1]))
    shape = replace(locked.model, num_layers=2)
    return locked_config_of(replace(locked, model=shape, formats=few), preset)


@pytest.mark.parametrize("model", PRESETS)
def test_all_variants_of_all_presets_lower_and_are_clean(model):
    for preset in (small(load_preset(name)) for name in PRESETS[model]):
        plan = plan_of(configured(model, preset))
        modules = {key: plan.lower(key) for key in plan.programs}
        checked = check_modules(modules.items(), TRN2, 2)
        assert checked.found == ()
        assert set(checked.needs) == {key.step for key in plan.programs}
        for key, module in modules.items():
            state_is_aliased(key, module)
    # What is kept between variants changes no byte of any of them.
    for key in {key.step: key for key in sorted(plan.programs)}.values():
        assert modules[key].text == lower_whole(plan.lowering(key), modules[key])


def state_is_aliased(key: VariantKey, module: Module) -> None:
    """State keeps its type, and every result that is state has the memory of what it replaces."""
    interface = module.interface
    parameters = re.findall(r"%arg\d+: (tensor<[^>]*>)", module.text.split(") -> (")[0])
    results = re.findall(r"(tensor<[^>]*>) \{jax\.result_info", module.text)
    assert (len(parameters), len(results)) == (len(interface.parameters), len(interface.results))
    for result, parameter in interface.aliases:
        assert results[result] == parameters[parameter], (key, interface.results[result])
        assert interface.results[result] == interface.parameters[parameter].name
    written = [name for name in interface.results if name.startswith("state.")]
    assert len(interface.aliases) == len(written) >= 1
