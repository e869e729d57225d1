"""A corpus of graphs: every stage that a run of the test suite traced, by what was asked for.

    <folder>/<sha256 of the spec>.json    {"kind": ..., "spec": ..., "text": ...}

`tests/conftest.py` writes one where `TRNC_CAPTURE_GRAPHS` names a folder. Two of them, of a branch
and of its base, say what a change does to graphs that no preset locks: every family, every format.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from trnc.equiv.diff import diff_texts, format_lines

UNCHANGED = "[graphs-unchanged]"  # in a commit's message: it is a refactor


@dataclass(frozen=True, slots=True)
class Replay:
    """How two corpora differ: labels of changed graphs with their diff, of new and of gone ones."""

    same: int
    changed: tuple[tuple[str, str], ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]


def write_graph(folder: Path, kind: str, spec: object, text: str) -> None:
    """Add a graph to a corpus; the same spec has the same file."""
    plain = json.dumps(plain_spec(spec), sort_keys=True)
    name = hashlib.sha256(plain.encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"kind": kind, "spec": plain, "text": text}, indent=1)
    (folder / f"{name}.json").write_text(content)


def plain_spec(value: Any) -> Any:
    """A spec as plain data, without what has its default: a new field changes no old spec."""
    if is_dataclass(value):
        return {
            f.name: plain_spec(getattr(value, f.name))
            for f in fields(value)
            if f.default is MISSING or getattr(value, f.name) != f.default
        }
    return [plain_spec(item) for item in value] if isinstance(value, list | tuple) else value


def compare_corpora(before: Path, after: Path) -> Replay:
    """Compare the graphs that both corpora have, and name the others."""
    old, new = _read(before), _read(after)
    common = sorted(old.keys() & new.keys())
    changed = [
        (_label(name, new[name]), format_lines(diff_texts(old[name]["text"], new[name]["text"])))
        for name in common
        if old[name]["text"] != new[name]["text"]
    ]
    return Replay(
        same=len(common) - len(changed),
        changed=tuple(changed),
        new=tuple(_label(name, new[name]) for name in sorted(new.keys() - old.keys())),
        gone=tuple(_label(name, old[name]) for name in sorted(old.keys() - new.keys())),
    )


def format_replay(replay: Replay) -> str:
    """Return the comparison for people: each changed graph with its ops."""
    lines = [
        f"{replay.same} graphs are the same, {len(replay.changed)} changed,"
        f" {len(replay.new)} are new, {len(replay.gone)} gone"
    ]
    for label, diff in replay.changed:
        lines += ["", label, *(f"  {line}" for line in diff.splitlines())]
    return "\n".join(lines)


def _read(folder: Path) -> dict[str, dict[str, str]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _label(name: str, graph: dict[str, str]) -> str:
    return f"{graph['kind']} {name[:12]}"
