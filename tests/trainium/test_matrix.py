"""All that the presets that ship can need, with every feature on: it lowers, and is clean.

Presets are cut to few and small buckets; what shapes graphs is kept. `tools/lower_config.py` does
the same at their real sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.trainium.serving import TRN2
from tests.trainium.tiny_plans import config_of
from trnc.compiler.backends.stablehlo.build import Plan, plan_modules
from trnc.compiler.backends.stablehlo.check import check_modules
from trnc.compiler.backends.stablehlo.step import build_step
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


def widest(plan: Plan) -> list[VariantKey]:
    """One variant of each step, the one that has everything, and the plainest one."""
    keys = sorted(plan.programs)
    return [keys[0], *{key.step: key for key in keys}.values()]


@pytest.mark.parametrize("model", PRESETS)
def test_all_stages_of_all_presets_lower_and_are_clean(model):
    known: dict[object, object] = {}
    for preset in (small(load_preset(name)) for name in PRESETS[model]):
        plan = plan_modules(configured(model, preset), TRN2, report=lambda *_: None, known=known)
        chosen = widest(plan)
        called = {call.stage.kind for key in chosen for call in plan.programs[key].calls}
        assert called == {call.stage.kind for p in plan.programs.values() for call in p.calls}
        checked = check_modules(((key, plan.lower(key)) for key in chosen), TRN2, 2)
        assert checked.found == ()
        assert set(checked.needs) == {key.step for key in plan.programs}
        for key in plan.programs:
            fits(plan, key)


def fits(plan: Plan, key: VariantKey) -> None:
    """A variant is calls of functions whose types agree, and state keeps its type."""
    step = build_step(plan.lowering(key))
    arguments = [jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype)) for p in step.parameters]
    results = jax.eval_shape(step.function, *arguments)
    for result, parameter in step.aliases:
        assert results[result] == arguments[parameter], (key, step.results[result])
    written = [name for name in step.results if name.startswith("state.")]
    assert len(step.aliases) == len(written) >= 1
