"""The lint and the memory of all modules of a configuration, put together for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trnc.compiler.backends.stablehlo.lint import Finding, Level, lint
from trnc.compiler.backends.stablehlo.memory import Need, hbm_need
from trnc.compiler.backends.stablehlo.module import Module
from trnc.compiler.backends.stablehlo.targets import NeuronTarget
from trnc.core import VariantKey


@dataclass(frozen=True, slots=True)
class Found:
    """One rule over all variants: how many break it, and the first place where one does."""

    rule: str
    code: str
    level: Level
    variants: int
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What the modules break, errors first, and the largest need of each kind of step."""

    found: tuple[Found, ...]
    needs: Mapping[str, Need]

    @property
    def errors(self) -> list[Found]:
        """What the compiler would refuse, and a step that does not fit a core."""
        return [found for found in self.found if found.level == "error"]


def check_modules(
    modules: Iterable[tuple[VariantKey, Module]], target: NeuronTarget, lnc: int
) -> Checked:
    """Check every module against the rules of `target`, and its memory against that of a core.

    They are taken one by one, and none is kept.
    """
    broken: dict[str, list[tuple[VariantKey, Finding]]] = {}
    needs: dict[str, Need] = {}
    known: dict[str, tuple[Finding, ...]] = {}
    largest: dict[str, int] = {}
    for key, module in modules:
        for finding in lint(module.text, target, known):
            broken.setdefault(finding.rule, []).append((key, finding))
        need = hbm_need(module, target, lnc, largest)
        if key.step not in needs or need.total > needs[key.step].total:
            needs[key.step] = need
        if need.total > need.limit:
            broken.setdefault("memory", []).append((key, _too_large(need)))
    found = [_found(entries) for entries in broken.values()]
    return Checked(tuple(sorted(found, key=lambda f: (f.level, f.rule))), needs)


def _found(entries: list[tuple[VariantKey, Finding]]) -> Found:
    key, first = entries[0]
    variants = len({key for key, _ in entries})
    where = f"{key}, {first.function}"
    return Found(first.rule, first.code, first.level, variants, where, first.message)


def _too_large(need: Need) -> Finding:
    message = (
        f"needs {need.total / 2**30:.1f} GiB of {need.limit / 2**30:.0f}: use more 'ranks', a "
        "smaller 'kv_memory_mib', or shorter prefill and context buckets"
    )
    return Finding("memory", "EOOM001/002", "error", "main", 1, message)
