"""How far to draft: the depth of the next round of speculation, from what rounds gave and cost.

A round is a draft and its verify, or one plain decode at depth 0. With p_j the measured chance
that the j-th draft is accepted when those before it were, a round of depth k yields

    tokens(k) = 1 + p_1 + p_1 p_2 + ... + p_1 .. p_k        for each sequence,

and the depth is the one with the most tokens for its measured time. The times of a round depend on
how many sequences it has, so they are kept for each number; the chances are shared.

Everything comes from results (`StepResult.micros` is part of them), so a recorded trace replays to
the same depths. A depth that was never tried is tried; one that lies idle is tried again now and
then, because times drift and texts change, and soon if it was left only just now. A better depth is
taken only if it is better by a margin, so that noise does not make the depth flutter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

TRIALS = 3  # rounds of a depth before its time is believed; the first does not count
MARGIN = 1.03  # how much better another depth must be
IDLE_ROUNDS = 192  # once in so many rounds the most promising other depth is tried again
_CHANCE_WEIGHT = 0.02  # of one draft in the running mean of its position, once it has many
_PRIOR_DRAFTS = 4  # how many drafts the first chance counts for
_RECENT_ROUNDS = 5  # the least of which is the time of a depth
_FIRST_LOOK = 8  # rounds after a change, then twice as many, and so on, up to IDLE_ROUNDS
_FIRST_CHANCE = 0.6


@dataclass(slots=True)
class _Cost:
    """What the last rounds took, in microseconds.

    Their time is the least of a few, not a mean: now and then the machine does something else for
    some steps, which take several times as long and say nothing about the depth.
    """

    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT_ROUNDS))
    trials: int = 0

    @property
    def micros(self) -> int:
        return min(self.recent, default=0)

    def add(self, micros: int) -> None:
        if self.trials:  # the first round of a shape warms it up and is not representative
            self.recent.append(micros)
        self.trials += 1


@dataclass(slots=True)
class _Choice:
    """The depth that was taken last, the one before it, and when to look at another.

    A depth may have been left because of a bad moment: the first looks come soon and go to it. Each
    one that changes nothing doubles the wait.
    """

    depth: int = 0
    before: int = 0
    wait: int = IDLE_ROUNDS
    next_look: int = IDLE_ROUNDS


@dataclass(slots=True, kw_only=True)
class DepthPolicy:
    """Chooses among `depths` (ascending, 0 not among them); with `always` the deepest, always."""

    depths: tuple[int, ...]
    always: bool
    _chances: list[float] = field(init=False)
    _checked: list[int] = field(init=False)  # drafts that each chance has seen
    _costs: dict[tuple[int, int], _Cost] = field(init=False, default_factory=dict)
    _choices: dict[int, _Choice] = field(init=False, default_factory=dict)
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
        choice = self._choices.setdefault(rows, _Choice())
        ranked = sorted(options, key=lambda k: -self._rate(rows, k))
        if self._rate(rows, ranked[0]) > MARGIN * self._rate(rows, choice.depth):
            look = self._round + _FIRST_LOOK
            choice = self._choices[rows] = _Choice(ranked[0], choice.depth, _FIRST_LOOK, look)
        elif self._round >= choice.next_look:
            other = next(k for k in ranked if k != choice.depth)
            looked_at = choice.before if choice.wait < IDLE_ROUNDS else other
            choice.wait = min(2 * choice.wait, IDLE_ROUNDS)
            choice.next_look = self._round + choice.wait
            return looked_at
        return choice.depth

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
        self._cost(rows, depth).add(micros)

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
