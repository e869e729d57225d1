"""What an engine is started with: from the command line to the engine process, as JSON.

Light, because the engine process reads it while nothing else is imported yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trnc.errors import ConfigError
from trnc.presets import Preset, load_preset

Backend = Literal["inductor", "eager"]
Loop = Literal["overlapped", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """What an engine is started with; every command that runs a model takes these options."""

    model: str
    preset: str
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
        check_mtp(self.mtp, load_preset(self.preset))


def check_mtp(mtp: str | None, preset: Preset) -> None:
    """Raise ConfigError if `--mtp` is given and the preset has no use for it."""
    if mtp is not None and not preset.mtp_depths:
        raise ConfigError(
            f"--mtp: preset '{preset.name}' does not speculate ('mtp_depths'), so it would not use "
            f"{mtp}; give a preset that does, such as --preset mtp-dynamic"
        )
