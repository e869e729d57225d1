"""How far to draft: the depth of the next round of speculation, from what rounds gave and cost.

A round is a draft and its verify, or one plain decode at depth 0. With p_j the measured chance
that the j-th draft is accepted when those before it were, a round of depth k yields

    tokens(k) = 1 + p_1 + p_1 p_2 + ... + p_1 .. p_k        for each sequence,

and the depth is the one with the most tokens for its measured time. The times of a round depend on
how many sequences it has, so they are kept for each number; the chances are shared.

Everything comes from results (`StepResult.micros` is part of them), so a recorded trace replays to
the same depths. A depth that was never tried is tried; one that lies idle is tried again now and
then, because times drift and texts change. A better depth is taken only if it is better by a
margin, so that noise does not make the depth flutter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

TRIALS = 2  # rounds of a depth before its time is believed
MARGIN = 1.03  # how much better another depth must be
IDLE_ROUNDS = 192  # after so many rounds without it, the most promising other depth is tried again
_CHANCE_WEIGHT = 0.02  # of one draft in the running mean of its position, once it has many
_PRIOR_DRAFTS = 4  # how many drafts the first chance counts for
_TIME_WEIGHT = 0.2  # of one round in the running mean of its time
_FIRST_CHANCE = 0.6


@dataclass(slots=True)
class _Cost:
    """The running mean of a round's time in microseconds, and when it was last measured."""

    micros: float = 0.0
    trials: int = 0
    last_round: int = 0

    def add(self, micros: float, round_: int) -> None:
        # The first round of a shape warms it up and is not representative: the second replaces it.
        weight = 1.0 if self.trials <= 1 else _TIME_WEIGHT
        self.micros += weight * (micros - self.micros)
        self.trials += 1
        self.last_round = round_


@dataclass(slots=True, kw_only=True)
class DepthPolicy:
    """Chooses among `depths` (ascending, 0 not among them); with `always` the deepest, always."""

    depths: tuple[int, ...]
    always: bool
    _chances: list[float] = field(init=False)
    _checked: list[int] = field(init=False)  # drafts that each chance has seen
    _costs: dict[tuple[int, int], _Cost] = field(init=False, default_factory=dict)
    _current: dict[int, int] = field(init=False, default_factory=dict)
    _round: int = field(init=False, default=0)
    _draft_micros: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Start with hopeful chances: a depth that is never tried cannot show what it is worth."""
        self._chances = [_FIRST_CHANCE] * max(self.depths, default=0)
        self._checked = [_PRIOR_DRAFTS] * len(self._chances)

    def choose(self, rows: int) -> int:
        """Return the depth of the next round of `rows` sequences; 0 is a plain decode."""
        if self.always or not self.depths:
            return max(self.depths, default=0)
        options = (0, *self.depths)
        untried = [k for k in options if self._cost(rows, k).trials < TRIALS]
        if untried:
            return untried[0]
        current = self._current.get(rows, 0)
        ranked = sorted(options, key=lambda k: -self._rate(rows, k))
        if self._rate(rows, ranked[0]) > MARGIN * self._rate(rows, current):
            current = self._current[rows] = ranked[0]
        idle = [k for k in ranked if k != current]
        if all(self._round - self._cost(rows, k).last_round > IDLE_ROUNDS for k in idle):
            return idle[0]
        return current

    def decoded(self, rows: int, micros: int) -> None:
        """Take in a plain decode."""
        self._finish(rows, 0, micros)

    def drafted(self, micros: int) -> None:
        """Take in the first half of a round."""
        self._draft_micros = micros

    def verified(
        self, rows: int, depth: int, micros: int, outcomes: Iterable[tuple[int, int]]
    ) -> None:
        """Take in the second half: how many drafts of each sequence were checked and accepted."""
        self._finish(rows, depth, self._draft_micros + micros)
        self._draft_micros = 0
        for checked, accepted in outcomes:
            for position in range(min(checked, accepted + 1)):
                self._checked[position] += 1
                weight = max(_CHANCE_WEIGHT, 1 / self._checked[position])
                self._chances[position] += weight * (
                    (position < accepted) - self._chances[position]
                )

    def _finish(self, rows: int, depth: int, micros: int) -> None:
        self._round += 1
        self._cost(rows, depth).add(micros, self._round)

    def _cost(self, rows: int, depth: int) -> _Cost:
        return self._costs.setdefault((rows, depth), _Cost())

    def _rate(self, rows: int, depth: int) -> float:
        """Tokens of a sequence a microsecond."""
        tokens, chance = 1.0, 1.0
        for position in range(depth):
            chance *= self._chances[position]
            tokens += chance
        micros = self._cost(rows, depth).micros
        return tokens / micros if micros else inf
