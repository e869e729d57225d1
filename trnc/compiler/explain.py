"""Why an artifact is not in the store: the nearest one that is, and the factors that differ.

Not every factor that differs is a reason. One that another one decides (a graph's text names the
torch that traced it, options follow from the target) is noise beside it, and so is one that costs
no compile. The others are causes: undo them, and the artifact is a hit again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trnc.compiler.store import ArtifactKey, Entry, Store
from trnc.equiv.text import TORCH_PREFIX

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

# Factors that follow from another one, and factors that alone compile nothing.
_FOLLOWS = {"options": "target", "flags": "target"}
_HARMLESS = {
    ("manifest", "sources"): "noise: it costs a trace of a few seconds, and compiles nothing where"
    " the graphs are the same",
}
_ANOTHER_GRAPH = 10  # differences that another graph counts as: same graphs are nearer


@dataclass(frozen=True, slots=True)
class Difference:
    """A factor that the nearest artifact has and the wanted one does not. None: absent there.

    `noise` says why it is no cause of the miss; empty where it is one.
    """

    name: str
    have: str | None
    want: str | None
    noise: str = ""

    def __str__(self) -> str:
        """Return one line: the two values, and what to do."""
        have, want = ("absent" if v is None else _short(v) for v in (self.have, self.want))
        advice = self.noise or _ADVICE.get(self.name)
        return f"{self.name}: have {have}, want {want}" + (f" ({advice})" if advice else "")


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `explain_miss`; `str()` of it is for people.

    `hit` is the artifact's folder if it is there after all. `nearest` is the artifact of the same
    kind with the fewest causes, the newest among equals; None if there is none of the kind.
    `quarantined` are folders of the wanted artifact that were set aside as damaged.
    """

    key: ArtifactKey
    hit: Path | None
    nearest: Entry | None
    differences: tuple[Difference, ...]
    quarantined: tuple[Path, ...]

    @property
    def causes(self) -> tuple[Difference, ...]:
        """The differences that made the miss."""
        return tuple(d for d in self.differences if not d.noise)

    def __str__(self) -> str:
        """Return the explanation, one line for each differing factor, and what to do."""
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
        lines += [f"  {difference}" for difference in self.differences]
        return "\n".join([*lines, f"  => {_conclusion(self.causes)}"])


def explain_miss(store: Store, key: ArtifactKey, text: str | None = None) -> Explanation:
    """Compare `key` with what the store has of its kind.

    The artifact itself is checked first; if it is damaged, it is set aside as by `Store.get`.
    `text` is the canonical text of a stage: with it, a graph that differs by the torch that traced
    it alone is told from another graph.
    """
    hit = store.get(key)
    quarantined = tuple(store.quarantined(key.id))
    same_kind = [e for e in store.entries() if e.key.kind == key.kind and e.key != key]
    if hit is not None or not same_kind:
        return Explanation(key, hit, None, (), quarantined)
    compared = [(differences(entry.key, key, text), entry) for entry in reversed(same_kind)]
    found, nearest = min(compared, key=lambda pair: _distance(pair[0]))
    return Explanation(key, None, nearest, found, quarantined)


def differences(
    have: ArtifactKey, want: ArtifactKey, text: str | None = None
) -> tuple[Difference, ...]:
    """Return the factors that differ, by name, each with why it is noise if it is."""
    old, new = dict(have.factors), dict(want.factors)
    names = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    found = []
    for name in names:
        difference = Difference(name, old.get(name), new.get(name))
        noise = _HARMLESS.get((want.kind, name), "")
        if _FOLLOWS.get(name) in names:
            noise = f"noise: it follows from the {_FOLLOWS[name]}"
        if name == "digest" and _is_retraced(text, old):
            noise = "noise: the same graph, whose text names the torch that traced it"
        found.append(replace(difference, noise=noise))
    return tuple(found)


def _is_retraced(text: str | None, have: dict[str, str]) -> bool:
    """Whether the graph had the other digest when the other torch traced it."""
    if text is None or "torch" not in have:
        return False
    version = have["torch"].split("+")[0].split(" ")[0]
    line = re.compile(f"^{re.escape(TORCH_PREFIX)}.*$", re.MULTILINE)
    retraced = line.sub(f"{TORCH_PREFIX}{version}", text, count=1)
    return hashlib.sha256(retraced.encode()).hexdigest() == have.get("digest")


def _distance(found: Sequence[Difference]) -> tuple[int, int]:
    causes = [d.name for d in found if not d.noise]
    return sum(_ANOTHER_GRAPH if name == "digest" else 1 for name in causes), len(found)


def _conclusion(causes: Sequence[Difference]) -> str:
    """What would bring the hit back."""
    names = [d.name for d in causes]
    if not names:
        return "nothing of it is a cause: run `trnc compile`, which finds what is still right"
    if names == ["digest"]:
        return (
            "no artifact of this graph exists, by any toolchain; the toolchain is not the cause."
            " Compile it, or go back to the graph that was compiled"
        )
    if "digest" in names:
        return "no artifact of this graph exists, by any toolchain: compile it"
    wanted = " and ".join(f"{d.name} {_short(d.have or 'absent')}" for d in causes)
    return f"the hit comes back with {wanted}, or after `trnc compile`"


def _short(value: str) -> str:
    return f"'{value}'" if len(value) <= 80 else f"'{value[:77]}...'"
