"""Why an artifact is not in the store: the nearest one that is, and the factors that differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trnc.compiler.store import ArtifactKey, Entry, Store

# What a person can do about a factor that differs; other factors just differ.
_ADVICE = {
    "digest": "the graph itself changed: `tools/graph_equiv.py check` shows how",
    "torch": "another torch compiled it: install that version to use it, or compile again",
    "backend": "it was compiled by another backend: pass the same --backend",
    "target": "it was compiled for another target: compile on this machine or for it",
    "compiler": "another C++ compiler built it: use that one, or compile again",
    "flags": "the flags of the C++ compiler changed: compile again",
    "lowering": "what is fused in a stage changed: compile again",
    "options": "the compile options changed: use the same ones, or compile again",
    "sources": "our own sources changed: compile again (stages with equal graphs are reused)",
    "preset": "the preset changed: pass the same --preset, or compile again",
    "model": "another architecture: pass the same --model, or compile again",
    "formats": "the weights are packed in other formats: use the same checkpoint, or compile again",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A factor that the nearest artifact has and the wanted one does not. None: absent there."""

    name: str
    have: str | None
    want: str | None

    def __str__(self) -> str:
        """Return one line: the two values, and what to do."""
        have, want = ("absent" if v is None else _short(v) for v in (self.have, self.want))
        advice = _ADVICE.get(self.name)
        return f"{self.name}: have {have}, want {want}" + (f" ({advice})" if advice else "")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `explain_miss`; `str()` of it is for people.

    `hit` is the artifact's folder if it is there after all. `nearest` is the artifact of the same
    kind with the fewest differing factors, the newest among equals; None if there is none of the
    kind. `quarantined` are folders of the wanted artifact that were set aside as damaged.
    """

    key: ArtifactKey
    hit: Path | None
    nearest: Entry | None
    differences: tuple[Difference, ...]
    quarantined: tuple[Path, ...]

    def __str__(self) -> str:
        """Return the explanation, one line for each differing factor."""
        name = f"{self.key.kind} {self.key.id[:12]}"
        if self.hit is not None:
            return f"{name}: in the store, {self.hit}"
        lines = [f"{name}: damaged, set aside in {path}" for path in self.quarantined]
        if self.nearest is None:
            lines.append(f"{name}: the store has no {self.key.kind} at all: run `trnc compile`")
            return "\n".join(lines)
        created = self.nearest.created.isoformat(sep=" ", timespec="seconds")
        lines.append(
            f"{name}: not in the store. The nearest is {self.nearest.key.id[:12]} of {created},"
            f" where {len(self.differences)} of {len(self.key.factors)} factors differ:"
        )
        return "\n".join([*lines, *(f"  {difference}" for difference in self.differences)])


def explain_miss(store: Store, key: ArtifactKey) -> Explanation:
    """Compare `key` with what the store has of its kind.

    The artifact itself is checked first; if it is damaged, it is set aside as by `Store.get`.
    """
    hit = store.get(key)
    quarantined = tuple(store.quarantined(key.id))
    same_kind = [e for e in store.entries() if e.key.kind == key.kind and e.key != key]
    if hit is not None or not same_kind:
        return Explanation(key, hit, None, (), quarantined)
    nearest = min(reversed(same_kind), key=lambda e: len(differences(e.key, key)))
    return Explanation(key, None, nearest, differences(nearest.key, key), quarantined)


def differences(have: ArtifactKey, want: ArtifactKey) -> tuple[Difference, ...]:
    """Return the factors that differ, by name."""
    old, new = dict(have.factors), dict(want.factors)
    return tuple(
        Difference(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    )


def _short(value: str) -> str:
    return f"'{value}'" if len(value) <= 80 else f"'{value[:77]}...'"
