"""How far to draft: the depth of the next round of speculation, from what rounds gave and cost.

A round is a draft and its verify, or one plain decode at depth 0. With p_j the measured chance
that the j-th draft is accepted when those before it were, a round of depth k yields

    tokens(k) = 1 + p_1 + p_1 p_2 + ... + p_1 .. p_k        for each sequence,

and the depth is the one with the most tokens for its measured time. The times of a round depend on
how many sequences it has, so they are kept for each number; the chances are shared.

The machine's own speed moves as well: its neighbours take turns, and contexts grow. So a time is
taken relative to the pace of the rounds just before it, and what comes of it is what a depth costs
beside the others. The costs that an executor measured when it started are where that begins; a
depth of which nothing is known is tried.

Everything comes from results (`StepResult.micros` is part of them), so a recorded trace replays to
the same depths. A depth that lies idle and may pay is tried again now and then, because costs drift
and texts change, and soon if it was left only just now. A better depth is taken only if it is so
by a margin, so that noise does not make the depth flutter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from operator import mul

TRIALS = 3  # rounds of a depth of which nothing is known; the first does not count
MARGIN = 1.03  # how much better another depth must be
IDLE_ROUNDS = 192  # once in so many rounds another depth is looked at
LOOK_ROUNDS = 2  # the first does not count
_CHANCE_WEIGHT = 0.02  # of one draft in the running mean of its position, once it has many
_PRIOR_DRAFTS = 4  # how many drafts the first chance counts for
_RECENT_LOOKS = 3  # the least of which is the cost of a depth
_RECENT_ROUNDS = 5  # the least of which is the pace
_FIRST_LOOK = 8  # rounds after a change, then twice as many, and so on, up to IDLE_ROUNDS
_FIRST_CHANCE = 0.6


@dataclass(slots=True)
class _Cost:
    """What rounds of a depth take, in microseconds at the pace of the start; 0: not known yet.

    It is the least of a few, not a mean: now and then the machine does something else for some
    steps, which take several times as long and say nothing about the depth.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_LOOKS))
    trials: int = 0

    @property
    def micros(self) -> float:
        return min(self.recent, default=0.0)


@dataclass(slots=True)
class _Choice:
    """What is known and was chosen for one number of sequences.

    `depth` was taken last, `before` is the one before it. A depth may have been left because of a
    bad moment: the first looks come soon and go to it. Each one that changes nothing doubles the
    wait. `others` are in the order in which they were looked at, the last for `looks` more rounds.
    """

    costs: Mapping[int, _Cost]
    others: deque[int]
    depth: int = 0
    before: int = 0
    wait: int = IDLE_ROUNDS
    next_look: int = IDLE_ROUNDS
    looks: int = 0
    last: int | None = None  # the depth of the last round that ended

    def take(self, depth: int, now: int) -> None:
        self.before, self.depth = self.depth, depth
        self.wait, self.next_look = _FIRST_LOOK, now + _FIRST_LOOK

    def look(self, promising: Collection[int], now: int) -> None:
        """Look at the depth before or, of those that may pay, at the one not seen for longest."""
        if self.wait < IDLE_ROUNDS:
            promising = (self.before,)
        other = next((k for k in self.others if k in promising and k != self.depth), None)
        self.wait = min(2 * self.wait, IDLE_ROUNDS)
        self.next_look = now + self.wait
        if other is not None:
            self.others.remove(other)
            self.others.append(other)
            self.looks = LOOK_ROUNDS


@dataclass(slots=True, kw_only=True)
class DepthPolicy:
    """Chooses among `depths` (ascending, 0 not among them); with `always` the deepest, always.

    `measured` are sequences, depth and microseconds of rounds when the executor started. A number
    of sequences that it lacks has the costs of the next larger one.
    """

    depths: tuple[int, ...]
    always: bool
    measured: tuple[tuple[int, int, int], ...] = ()
    _chances: list[float] = field(init=False)
    _checked: list[int] = field(init=False)  # drafts that each chance has seen
    _choices: dict[int, _Choice] = field(init=False, default_factory=dict)
    _paces: deque[float] = field(init=False)  # what the last rounds took, to what they cost
    _round: int = field(init=False, default=0)
    _draft_micros: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Start with hopeful chances: a depth that is never tried cannot show what it is worth."""
        self._chances = [_FIRST_CHANCE] * max(self.depths, default=0)
        self._checked = [_PRIOR_DRAFTS] * len(self._chances)
        self._paces = deque(maxlen=_RECENT_ROUNDS)

    def choose(self, rows: int) -> int:
        """Return the depth of the next round of `rows` sequences; 0 is a plain decode."""
        if self.always or not self.depths:
            return max(self.depths, default=0)
        choice = self._choice(rows)
        untried = [k for k, cost in choice.costs.items() if cost.trials < TRIALS]
        if untried:
            return untried[0]
        if choice.looks == 0:
            rates = {k: _rate(choice, k, self._chances) for k in choice.costs}
            best = max(rates, key=lambda k: rates[k])
            if rates[best] > MARGIN * rates[choice.depth]:
                choice.take(best, self._round)
            elif self._round >= choice.next_look:
                choice.look(self._promising(choice), self._round)
        if choice.looks:
            choice.looks -= 1
            return choice.others[-1]
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
        choice = self._choice(rows)
        cost, is_first, choice.last = choice.costs[depth], choice.last != depth, depth
        cost.trials += 1
        if is_first:
            return  # it warms up what it runs, and is not representative
        if depth == choice.depth and cost.micros:
            self._paces.append(micros / cost.micros)
        else:
            cost.recent.append(micros / min(self._paces, default=1.0))

    def _choice(self, rows: int) -> _Choice:
        if rows not in self._choices:
            options = (0, *self.depths)
            costs = {depth: self._first_cost(rows, depth) for depth in options}
            self._choices[rows] = _Choice(costs, deque(options))
        return self._choices[rows]

    def _first_cost(self, rows: int, depth: int) -> _Cost:
        near = [(n, micros) for n, k, micros in self.measured if k == depth and n >= rows]
        return _Cost(deque([min(near)[1]], _RECENT_LOOKS), TRIALS) if near else _Cost()

    def _promising(self, choice: _Choice) -> set[int]:
        """The depths that might pay: the lower ones, should the depth have become dearer, and those
        that would if half of the guesses that are wrong now were right.
        """
        hopeful = [(1 + chance) / 2 for chance in self._chances]
        now = _rate(choice, choice.depth, self._chances)
        return {k for k in choice.costs if k < choice.depth or _rate(choice, k, hopeful) > now}


def _rate(choice: _Choice, depth: int, chances: Sequence[float]) -> float:
    """Tokens of a sequence a microsecond."""
    tokens = sum(accumulate(chances[:depth], mul, initial=1.0))
    micros = choice.costs[depth].micros
    return tokens / micros if micros else inf
