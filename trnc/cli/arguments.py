"""What an engine is started with: from the command line to the engine process, as JSON.

Light, because the engine process reads it while nothing else is imported yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from trnc.errors import ConfigError
from trnc.presets import Preset, load_preset, with_features

Backend = Literal["inductor", "eager", "xla-cpu", "neuron"]
CompileBackend = Literal["inductor", "eager", "trainium"]
Loop = Literal["overlapped", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureArguments:
    """What the flags change of a preset: the features that they name, and the penalties' sizes."""

    switched: Mapping[str, bool] = field(default_factory=dict)
    penalty_buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """What an engine is started with; every command that runs a model takes these options."""

    model: str
    preset: str
    features: FeatureArguments = field(default_factory=FeatureArguments)
    backend: Backend
    store: str
    jobs: int
    require_cache: bool
    loop: Loop = "overlapped"
    max_waiting: int | None = None
    trace: str | None = None
    mtp: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a wrong preset, before anything slow is loaded or downloaded."""
        preset = self.load_preset()
        check_mtp(self.mtp, preset)
        if preset.structured_outputs:
            _need_xgrammar()

    def load_preset(self) -> Preset:
        """Return the preset, with what the flags change of it; raises ConfigError."""
        features = self.features
        return with_features(load_preset(self.preset), features.switched, features.penalty_buckets)


def _need_xgrammar() -> None:
    if find_spec("xgrammar") is None:
        raise ConfigError(
            "--structured-outputs needs the package xgrammar: pip install 'trnc[grammar]'"
        )


def check_mtp(mtp: str | None, preset: Preset) -> None:
    """Raise ConfigError if `--mtp` is given and the preset has no use for it."""
    if mtp is not None and not preset.mtp_depths:
        raise ConfigError(
            f"--mtp: preset '{preset.name}' does not speculate ('mtp_depths'), so it would not use "
            f"{mtp}; give a preset that does, such as --preset mtp-dynamic"
        )
