"""The graph lock: what `graphs/` holds, how it is read and written, and how two of them compare.

    graphs/<model>/<preset>.toml           one line for each variant: its stage calls in order
    graphs/stages/<kind>-<digest[:16]>.txt the canonical text of each distinct stage, once

The files are written for `git diff`: short lines, a fixed order, no machine or time in them. A
stage file's name is bound to its content, so an edit by hand (or a line-ending filter) is noticed.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from trnc.errors import TrncError

SHORT = 16  # hex digits of a digest that name it in the lock
_STAGES = "stages"
_HEADER = "# Written by `tools/graph_equiv.py accept`; see docs/GRAPHS.md.\n"


class StageCall(NamedTuple):
    """`repeat` calls of one stage in a row."""

    kind: str
    digest: str
    repeat: int = 1

    def __str__(self) -> str:
        """Return the lock's word, e.g. `layer-0123456789abcdef*30`."""
        times = f"*{self.repeat}" if self.repeat != 1 else ""
        return f"{self.kind}-{self.digest[:SHORT]}{times}"


class StageText(NamedTuple):
    """A stage's canonical text. `sources` maps its line numbers to `file:line`, where known."""

    kind: str
    text: str
    sources: Mapping[int, str] = MappingProxyType({})

    @property
    def digest(self) -> str:
        """The sha-256 of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """The stage's name in the lock, e.g. `layer-0123456789abcdef`."""
        return f"{self.kind}-{self.digest[:SHORT]}"


@dataclass(frozen=True, slots=True)
class VariantGraphs:
    """A variant's program. `wiring` is a digest of how values are bound to its calls, or empty."""

    name: str
    calls: tuple[StageCall, ...]
    wiring: str = ""


@dataclass(frozen=True, slots=True)
class PresetGraphs:
    """Every program of a model under a preset; `stages` maps digest -> stage."""

    model: str
    preset: str
    variants: tuple[VariantGraphs, ...]
    stages: Mapping[str, StageText]

    @property
    def name(self) -> str:
        """Return `model/preset`."""
        return f"{self.model}/{self.preset}"


@dataclass(frozen=True, slots=True)
class VariantChange:
    """A variant whose program changed: pairs of calls that differ, None where one side has none."""

    name: str
    calls: tuple[tuple[StageCall | None, StageCall | None], ...]
    has_new_wiring: bool


@dataclass(frozen=True, slots=True)
class PresetChange:
    """What changed in one preset. `state` is "added", "removed" or "changed"."""

    name: str
    state: str
    total: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[VariantChange, ...] = ()


@dataclass(frozen=True, slots=True)
class StageChange:
    """A stage that took another's place, and in which variants (`model/preset variant`)."""

    before: StageText | None
    after: StageText | None
    variants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LockDiff:
    """The difference of two locks; false when they are equal."""

    presets: tuple[PresetChange, ...]
    stages: tuple[StageChange, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.presets)


def read_lock(root: Path) -> tuple[PresetGraphs, ...]:
    """Read the lock in `root` (`graphs/`), by model and preset; empty where there is none.

    Raises:
        TrncError: a file is not as `write_lock` wrote it; the message names it.
    """
    stages = {path.stem: _read_stage(path) for path in sorted((root / _STAGES).glob("*.txt"))}
    return tuple(_read_preset(path, stages) for path in sorted(root.glob("*/*.toml")))


def read_stage(root: Path, name: str) -> StageText | None:
    """Read a file of a canonical text, or the only stage of the lock whose label begins so.

    None if it is neither.

    Raises:
        TrncError: several stages begin so.
    """
    if (path := Path(name)).is_file():
        return StageText(path.stem, path.read_text())
    found = sorted((root / _STAGES).glob(f"{glob.escape(name)}*.txt"))
    if len(found) > 1:
        raise TrncError(f"'{name}' is one of {', '.join(p.stem for p in found)}: give more of it")
    return _read_stage(found[0]) if found else None


def write_lock(root: Path, presets: Sequence[PresetGraphs]) -> None:
    """Make `root` hold exactly these presets; files of presets and stages that are gone go too."""
    wanted = {root / p.model / f"{p.preset}.toml": _preset_text(p) for p in presets}
    for preset in presets:
        for stage in preset.stages.values():
            wanted[root / _STAGES / f"{stage.label}.txt"] = stage.text
    for path in {*root.glob("*/*.toml"), *root.glob(f"{_STAGES}/*.txt")} - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="\n")


def read_revision(
    repository: Path, revision: str, folder: str = "graphs"
) -> tuple[PresetGraphs, ...]:
    """Read the lock of a git revision.

    Raises:
        TrncError: git does not know the revision, or it has no such folder.
    """
    command = ["git", "-C", str(repository), "archive", "--format=tar", revision, folder]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        raise TrncError(f"git cannot read {folder}/ of revision '{revision}': {reason}")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(scratch, filter="data")
        return read_lock(Path(scratch) / folder)


def compare(locked: Iterable[PresetGraphs], current: Iterable[PresetGraphs]) -> LockDiff:
    """Say what `current` changes. Stages are compared by digest, so equal texts never differ."""
    old, new = {p.name: p for p in locked}, {p.name: p for p in current}
    presets, stages = [], dict[tuple[str | None, str | None], list[str]]()
    for name in sorted(old.keys() | new.keys()):
        change = _compare_preset(name, old.get(name), new.get(name))
        if change is None:
            continue
        presets.append(change)
        for variant in change.changed:
            for before, after in variant.calls:
                pair = (before and before.digest, after and after.digest)
                if pair[0] != pair[1]:
                    users = stages.setdefault(pair, [])
                    users.append(f"{name} {variant.name}")
    before_texts = {d: s for p in old.values() for d, s in p.stages.items()}
    after_texts = {d: s for p in new.values() for d, s in p.stages.items()}
    return LockDiff(
        tuple(presets),
        tuple(
            StageChange(
                before_texts[before] if before else None,
                after_texts[after] if after else None,
                tuple(dict.fromkeys(users)),
            )
            for (before, after), users in stages.items()
        ),
    )


def _compare_preset(
    name: str, old: PresetGraphs | None, new: PresetGraphs | None
) -> PresetChange | None:
    if old is None or new is None:
        some = old or new
        assert some is not None
        return PresetChange(name, "added" if old is None else "removed", len(some.variants))
    before = {v.name: v for v in old.variants}
    after = {v.name: v for v in new.variants}
    changed = [
        VariantChange(
            name=key,
            calls=tuple(_paired(before[key].calls, after[key].calls)),
            has_new_wiring=before[key].wiring != after[key].wiring,
        )
        for key in after
        if key in before and _program(before[key]) != _program(after[key])
    ]
    added = tuple(key for key in after if key not in before)
    removed = tuple(key for key in before if key not in after)
    if not (changed or added or removed):
        return None
    return PresetChange(name, "changed", len(after), added, removed, tuple(changed))


def _program(variant: VariantGraphs) -> tuple[str, str]:
    """What must be equal for two variants to be the same program."""
    return _line(variant), variant.wiring


def _paired(
    before: Sequence[StageCall], after: Sequence[StageCall]
) -> Iterator[tuple[StageCall | None, StageCall | None]]:
    """Pair calls of one kind in order; yield the pairs that differ."""
    kinds = SequenceMatcher(None, [c.kind for c in before], [c.kind for c in after], autojunk=False)
    for tag, a, a_end, b, b_end in kinds.get_opcodes():
        if tag == "equal":
            pairs = zip(before[a:a_end], after[b:b_end], strict=True)
            yield from ((old, new) for old, new in pairs if old != new)
        else:
            yield from ((call, None) for call in before[a:a_end])
            yield from ((None, call) for call in after[b:b_end])


# Files


def _line(variant: VariantGraphs) -> str:
    return " ".join(str(call) for call in variant.calls)


def _preset_text(preset: PresetGraphs) -> str:
    lines = [_HEADER, "[variants]\n"]
    lines += [f"{json.dumps(v.name)} = {json.dumps(_line(v))}\n" for v in preset.variants]
    if any(v.wiring for v in preset.variants):
        lines.append("\n[wiring]\n")
        lines += [f"{json.dumps(v.name)} = {json.dumps(v.wiring)}\n" for v in preset.variants]
    return "".join(lines)


def _read_stage(path: Path) -> StageText:
    data = path.read_bytes()
    stage = StageText(path.stem.rpartition("-")[0], data.decode(errors="replace"))
    if stage.label != path.stem:
        raise TrncError(
            f"{path}: its content does not have the digest in its name; it was edited, or git"
            " changed its line endings. Restore it, or write the lock again with"
            " tools/graph_equiv.py accept"
        )
    return stage


def _read_preset(path: Path, stages: Mapping[str, StageText]) -> PresetGraphs:
    try:
        data = tomllib.loads(path.read_text())
        wiring = data.get("wiring", {})
        variants = tuple(
            VariantGraphs(
                name=name,
                calls=tuple(_read_call(word, stages) for word in line.split()),
                wiring=wiring.get(name, ""),
            )
            for name, line in data["variants"].items()
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise TrncError(
            f"{path}: not a graph lock ({error}); restore it, or write the lock again with"
            " tools/graph_equiv.py accept"
        ) from error
    used = {call.digest for variant in variants for call in variant.calls}
    return PresetGraphs(
        model=path.parent.name,
        preset=path.stem,
        variants=variants,
        stages={stage.digest: stage for stage in stages.values() if stage.digest in used},
    )


def _read_call(word: str, stages: Mapping[str, StageText]) -> StageCall:
    label, _, repeat = word.partition("*")
    if label not in stages:
        raise ValueError(f"there is no {_STAGES}/{label}.txt")
    stage = stages[label]
    return StageCall(stage.kind, stage.digest, int(repeat or 1))
