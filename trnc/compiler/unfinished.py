"""What a build host could not compile for another target, recorded in the store.

    unfinished/<target>-<preset>.json   the artifacts that are left, each with the reason

`trnc compile` on a machine of the target finishes them and removes the record; `trnc explain-miss`
reads it meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_FOLDER = "unfinished"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An artifact that was left: its id, what it is, and why."""

    id: str
    label: str
    reason: str


def write_unfinished(root: Path, target: str, preset: str, left: tuple[Unfinished, ...]) -> Path:
    """Record what is left of a build, or that nothing is any more."""
    path = root / _FOLDER / f"{target}-{preset}.json"
    if not left:
        path.unlink(missing_ok=True)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"target": target, "preset": preset, "artifacts": [asdict(item) for item in left]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read_unfinished(root: Path) -> Mapping[str, Unfinished]:
    """Return everything that build hosts left, by id."""
    found = {}
    for path in sorted((root / _FOLDER).glob("*.json")):
        for item in json.loads(path.read_text())["artifacts"]:
            found[item["id"]] = Unfinished(**item)
    return found
