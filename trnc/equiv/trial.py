"""The prover on random variations of real stages: is it sound, and how often does it succeed?"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trnc.equiv.prove import prove
from trnc.equiv.rewrites import REWRITES
from trnc.equiv.variations import MUTATIONS, vary

MOST_REWRITES = 3  # in one graph


@dataclass(frozen=True, slots=True)
class Trial:
    """Verdicts by what was done; `wrong` are mutations that were proved and rewrites refuted."""

    rewrites: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    unproved: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no answer was wrong."""
        return not self.wrong


def run_trial(
    stages: Mapping[str, str], numbers: range, seed: int, report: Callable[[int, Trial], None]
) -> Trial:
    """Vary the stages in turn, each time once by rewrites and once by one mutation.

    What is done at a number depends on that and on the seed alone, so a trial can be run in parts.
    `report(number, so far)` is called after each.
    """
    trial = Trial()
    usable = [label for label, text in stages.items() if _can_vary(text)]
    for number in numbers:
        dice = random.Random(f"{seed} {number}")
        label = usable[number % len(usable)]
        _try_rewrites(trial, label, stages[label], dice)
        _try_mutation(trial, label, stages[label], dice)
        report(number, trial)
    return trial


def format_trial(trial: Trial) -> str:
    """Return the counts for people.

    The text of a mutation is another one, or it would be proved at once: so what is unknown is told
    apart by its digest.
    """
    lines = [_counts("rewrites", trial.rewrites), _counts("mutations", trial.mutations)]
    told = trial.mutations.total() - trial.mutations["proved"]
    lines[1] += f"; {told} told apart"
    if trial.unproved:
        lines.append(f"in rewrites not proved: {dict(trial.unproved)}")
    return "\n".join([*lines, *(f"WRONG: {line}" for line in trial.wrong)])


def _counts(name: str, counts: Counter[str]) -> str:
    words = ", ".join(f"{counts[v]} {v}" for v in ("proved", "unknown", "refuted"))
    return f"{counts.total()} {name}: {words}"


def _can_vary(text: str) -> bool:
    dice = random.Random(0)
    return vary(text, REWRITES, dice) is not None and vary(text, MUTATIONS, dice) is not None


def _try_rewrites(trial: Trial, label: str, text: str, dice: random.Random) -> None:
    names, varied = [], text
    for _ in range(dice.randint(1, MOST_REWRITES)):
        if (step := vary(varied, REWRITES, dice)) is not None:
            names.append(step[0])
            varied = step[1]
    verdict = prove(text, varied, explain=False).verdict
    trial.rewrites[verdict] += 1
    if verdict != "proved":
        trial.unproved.update(names)
    if verdict == "refuted":
        trial.wrong.append(f"{label} {' and '.join(names)} refuted")


def _try_mutation(trial: Trial, label: str, text: str, dice: random.Random) -> None:
    step = vary(text, MUTATIONS, dice)
    assert step is not None, "a usable stage can be mutated"
    verdict = prove(text, step[1], explain=False).verdict
    trial.mutations[verdict] += 1
    if verdict == "proved":
        trial.wrong.append(f"{label} {step[0]} proved")
