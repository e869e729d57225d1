"""What a store holds, in numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trnc.compiler.store import Entry

_MANIFEST = "manifest.json"  # `trnc.compiler.manifest` has it, which imports torch


def by_kind(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Group artifacts by kind, the largest kind first."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(entry.key.kind, []).append(entry)
    return dict(sorted(kinds.items(), key=lambda item: -sum(e.size for e in item[1])))


def unreferenced(entries: Sequence[Entry]) -> list[Entry]:
    """Return the artifacts that no manifest among them names: of old graphs or toolchains."""
    named: set[str] = set()
    for entry in entries:
        if entry.key.kind == "manifest":
            with suppress(OSError, ValueError, KeyError):
                manifest = json.loads((entry.path / _MANIFEST).read_bytes())
                named |= {manifest["kernels"], manifest["runner"], *manifest["stages"]}
    return [e for e in entries if e.key.kind != "manifest" and e.key.id not in named]


def folder_size(folder: Path) -> int:
    """Return the bytes of all files below a folder, 0 where there is none."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
