"""A lock's difference as text for a reviewer: what changed where, then each change of ops once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trnc.equiv.diff import DiffLine, changed, diff_texts, format_lines
from trnc.equiv.lock import LockDiff, PresetChange, StageCall, StageChange
from trnc.equiv.text import parse

_NAMED = 4  # names of variants that are printed before "and N more"


def format_diff(diff: LockDiff) -> str:
    """Return the report; empty if nothing differs.

    Stages that differ in the same ops at other shapes (one for each bucket) are shown once.
    """
    lines: list[str] = []
    for preset in diff.presets:
        lines += _preset_lines(preset)
    shown: dict[tuple[str, ...], str] = {}
    for change in diff.stages:
        lines += ["", *_stage_lines(change, shown)]
    return "\n".join(lines)


def _preset_lines(preset: PresetChange) -> list[str]:
    if preset.state != "changed":
        return [f"{preset.name}: {preset.state}, {preset.total} variants"]
    lines = [f"{preset.name}: {len(preset.changed)} of {preset.total} variants changed"]
    lines += [f"  + {name}" for name in preset.added]
    lines += [f"  - {name}" for name in preset.removed]
    for variant in preset.changed:
        words = [f"{call_word(old)} -> {call_word(new)}" for old, new in variant.calls]
        words += ["values bound to other inputs"] if variant.has_new_wiring else []
        lines.append(f"  {variant.name}: {', '.join(words)}")
    return lines


def _stage_lines(change: StageChange, shown: dict[tuple[str, ...], str]) -> list[str]:
    """A stage's heading and its diff, or where an equal one was shown."""
    before, after = change.before, change.after
    users = f"in {list_variants(change.variants)}"
    if before is None or after is None:
        stage = before or after
        assert stage is not None
        verb = "new stage" if before is None else "removed stage"
        return [f"{verb} {stage.label}, {len(parse(stage.text).nodes)} ops, {users}"]
    heading = f"stage {before.label} -> {after.label}, {users}"
    lines = diff_texts(before.text, after.text, after.sources)
    signature = _signature(lines)
    if signature in shown:
        return [heading, f"  the same ops as in {shown[signature]}, at other shapes"]
    shown[signature] = after.label
    return [heading, *("  " + line for line in format_lines(lines).splitlines())]


def _signature(lines: Sequence[DiffLine]) -> tuple[str, ...]:
    """The changed lines without shapes."""
    sizes = re.compile(r"(\[|\{)[^\[\]{}%$]*(\]|\})")
    return tuple(line.tag + sizes.sub(r"\1\2", line.text) for line in changed(lines))


def call_word(call: StageCall | None) -> str:
    """Return a call as the lock has it."""
    return str(call) if call is not None else "(none)"


def list_variants(names: Sequence[str]) -> str:
    """Return how many variants, and the first of them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    noun = "variant" if len(names) == 1 else "variants"
    return f"{len(names)} {noun}: {', '.join(names[:_NAMED])}{more}"
