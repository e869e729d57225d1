"""The graphs of a committed model config under a preset, as the lock in `graphs/` holds them.

`graphs/<model>/model.json` holds the shape of a model and the packed formats of its weights: all
that its graphs depend on. So a check of the lock needs no weights and no network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import msgspec

from trnc.compiler.program import (
    Call,
    Program,
    ProgramConfig,
    build_programs,
    distinct_specs,
)
from trnc.compiler.texts import stage_texts
from trnc.core import VariantKey
from trnc.equiv.lock import PresetGraphs, StageCall, StageText, VariantGraphs
from trnc.models.config import ModelConfig
from trnc.models.stage import StageSpec, WeightFormats
from trnc.presets import Preset, load_preset

MODEL_FILE = "model.json"


@dataclass(frozen=True, slots=True)
class LockedModel:
    """The committed config of a model."""

    model: ModelConfig
    formats: WeightFormats


def read_model(graphs: Path, name: str) -> LockedModel:
    """Read `graphs/<name>/model.json`."""
    return msgspec.json.decode((graphs / name / MODEL_FILE).read_bytes(), type=LockedModel)


def write_model(graphs: Path, name: str, model: LockedModel) -> None:
    """Write `graphs/<name>/model.json`, for people to read."""
    text = msgspec.json.format(msgspec.json.encode(model), indent=1)
    (graphs / name).mkdir(parents=True, exist_ok=True)
    (graphs / name / MODEL_FILE).write_bytes(text + b"\n")


def locked_config(graphs: Path, name: str, preset: str) -> ProgramConfig:
    """The configuration of a locked model under a shipped preset."""
    locked = read_model(graphs, name)
    return config_of(locked, load_preset(preset))


def config_of(locked: LockedModel, preset: Preset) -> ProgramConfig:
    """The configuration of a model under a preset; the MTP layer is part of it only where the
    preset speculates.
    """
    model, formats = locked.model, locked.formats
    if not preset.mtp_depths:
        model = replace(model, mtp_layers=0, mtp_vocab=0)
        formats = replace(formats, layers=formats.layers[: model.num_layers])
    return ProgramConfig(model=model, formats=formats, preset=preset)


def traced_graphs(
    graphs: Path, pairs: Sequence[tuple[str, str]], *, workers: int
) -> list[PresetGraphs]:
    """Trace every program of each (locked model, shipped preset), each distinct stage once."""
    programs = [build_programs(locked_config(graphs, *pair)) for pair in pairs]
    specs = distinct_specs(program for each in programs for program in each.values())
    texts = stage_texts(specs, workers=workers)
    return [_preset_graphs(*pair, each, texts) for pair, each in zip(pairs, programs, strict=True)]


def _preset_graphs(
    model: str,
    preset: str,
    programs: Mapping[VariantKey, Program],
    texts: Mapping[StageSpec, StageText],
) -> PresetGraphs:
    variants = tuple(_variant(key, program, texts) for key, program in programs.items())
    stages = {texts[spec].digest: texts[spec] for spec in distinct_specs(iter(programs.values()))}
    return PresetGraphs(model=model, preset=preset, variants=variants, stages=stages)


def _variant(
    key: VariantKey, program: Program, texts: Mapping[StageSpec, StageText]
) -> VariantGraphs:
    calls = ((call.stage.kind, texts[call.stage].digest) for call in program.calls)
    runs = tuple(StageCall(kind, digest, len(list(run))) for (kind, digest), run in groupby(calls))
    return VariantGraphs(name=str(key), calls=runs, wiring=_wiring(program))


def _wiring(program: Program) -> str:
    """A digest of how values are bound to calls, and of the updates of the state."""
    bound = [(call.inputs, call.outputs) for call in program.calls]
    updates = [(update.op, update.inputs) for update in program.updates]
    parts: list[object] = [bound, updates, program.outputs]
    if program.steps != (*program.calls, *program.updates):
        parts.append([isinstance(step, Call) for step in program.steps])
    text = msgspec.json.encode(parts)
    return hashlib.sha256(text).hexdigest()
