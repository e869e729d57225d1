"""Tiny models as configurations, shapes and formats without weights, and their plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tests.models.tiny import tiny_model
from trnc.compiler.backends.stablehlo.build import Plan, plan_modules
from trnc.compiler.backends.stablehlo.targets import neuron_target
from trnc.compiler.compile import TracedStage
from trnc.compiler.program import ProgramConfig
from trnc.models.config import ModelConfig, from_hf
from trnc.models.stage import StageSpec
from trnc.models.weights import exact_formats
from trnc.presets import Preset

TRN2 = neuron_target("trn2")
TRACED: dict[StageSpec, TracedStage] = {}  # what all tests of a process share


def plan_of(config: ProgramConfig) -> Plan:
    """Plan the modules of a configuration; a stage is traced once for all tests."""
    return plan_modules(config, TRN2, report=lambda *_: None, known=TRACED)


@cache
def _shape(family: str) -> ModelConfig:
    layers = {"num_hidden_layers": 2}
    if family.startswith(("glm", "deepseek")):
        layers["num_nextn_predict_layers"] = 1
    model = tiny_model(family, **layers)
    return from_hf(model.config.to_dict() | {"architectures": [type(model).__name__]})


def config_of(family: str, preset: Preset) -> ProgramConfig:
    """A tiny model under a preset, with its MTP layer where the preset speculates."""
    model = _shape(family)
    if not preset.mtp_depths:
        model = replace(model, mtp_layers=0)
    return ProgramConfig(model=model, formats=exact_formats(model), preset=preset)
