"""The policy of depths: it finds the best one, stays with it, and notices when that changes."""

from __future__ import annotations

from collections import Counter

import pytest

from trnc.engine.depth import DepthPolicy

DEPTHS = (1, 2, 3)


def run(
    policy: DepthPolicy, rounds: int, *, chance: float, costs: dict[int, int], rows: int = 1
) -> Counter[int]:
    """Play rounds of a device on which each draft is right in `chance` of the cases."""
    chosen: Counter[int] = Counter()
    luck = 0.0
    for _ in range(rounds):
        depth = policy.choose(rows)
        chosen[depth] += 1
        if depth == 0:
            policy.decoded(rows, costs[0])
            continue
        policy.drafted(costs[depth] // 4)
        accepted = 0
        while accepted < depth:
            luck = (luck + 0.6180339887) % 1.0  # evenly spread
            if luck >= chance:
                break
            accepted += 1
        policy.verified(rows, depth, costs[depth] - costs[depth] // 4, [(depth, accepted)])
    return chosen


def policy() -> DepthPolicy:
    return DepthPolicy(depths=DEPTHS, always=False)


CHEAP = {0: 100, 1: 115, 2: 130, 3: 145}
DEAR = {0: 100, 1: 150, 2: 260, 3: 370}


@pytest.mark.parametrize(
    ("chance", "costs", "best"),
    [(0.95, CHEAP, 3), (0.05, CHEAP, 0), (0.9, DEAR, 1), (0.4, DEAR, 0)],
)
def test_it_settles_on_the_depth_that_pays(chance: float, costs: dict[int, int], best: int) -> None:
    chosen = policy()
    run(chosen, 300, chance=chance, costs=costs)
    assert run(chosen, 400, chance=chance, costs=costs)[best] >= 390


def test_bad_guesses_are_found_out_within_a_few_dozen_rounds() -> None:
    costs = {0: 100, 1: 125, 2: 150, 3: 175}
    assert run(policy(), 60, chance=0.1, costs=costs)[0] >= 40


def test_a_change_of_the_text_is_noticed() -> None:
    chosen = policy()
    run(chosen, 400, chance=0.95, costs=CHEAP)
    run(chosen, 600, chance=0.02, costs=CHEAP)
    assert run(chosen, 300, chance=0.02, costs=CHEAP)[0] >= 290
    run(chosen, 40_000, chance=0.95, costs=CHEAP)
    assert run(chosen, 300, chance=0.95, costs=CHEAP)[3] >= 290


def test_a_change_of_the_cost_is_noticed() -> None:
    chosen = policy()
    run(chosen, 300, chance=0.9, costs=CHEAP)
    run(chosen, 300, chance=0.9, costs={**CHEAP, 2: 400, 3: 500})
    assert run(chosen, 300, chance=0.9, costs={**CHEAP, 2: 400, 3: 500})[1] >= 290


def test_what_held_the_machine_up_is_forgotten_soon() -> None:
    chosen = policy()
    run(chosen, 300, chance=0.4, costs=DEAR)
    run(chosen, 3, chance=0.4, costs={**DEAR, 0: 5000})
    assert run(chosen, 100, chance=0.4, costs=DEAR)[0] >= 98  # a few steps change nothing
    run(chosen, 12, chance=0.4, costs={**DEAR, 0: 5000})
    assert run(chosen, 100, chance=0.4, costs=DEAR)[0] >= 80


def test_the_pace_of_the_machine_changes_nothing() -> None:
    chosen = policy()
    run(chosen, 300, chance=0.9, costs=CHEAP)
    for pace in (4, 1, 2, 7) * 10:
        costs = {depth: pace * micros for depth, micros in CHEAP.items()}
        assert run(chosen, 40, chance=0.9, costs=costs)[3] >= 38  # and a look at another


def test_what_was_measured_at_the_start_is_where_it_begins() -> None:
    measured = tuple((4, depth, micros) for depth, micros in DEAR.items())
    chosen = DepthPolicy(depths=DEPTHS, always=False, measured=measured)
    for rows in (4, 3, 1):  # the next larger number is near enough
        depths = run(chosen, 100, chance=0.2, costs=DEAR, rows=rows)
        assert depths[0] >= 90
        assert depths[2] + depths[3] <= 4
    assert run(chosen, 12, chance=0.2, costs=DEAR, rows=5)[3] == 3  # of more, nothing is known


def test_small_differences_do_not_make_it_flutter() -> None:
    chosen = policy()
    costs = {0: 100, 1: 149, 2: 197, 3: 246}
    run(chosen, 300, chance=0.5, costs=costs)
    depths = run(chosen, 150, chance=0.5, costs=costs)
    assert max(depths.values()) >= 140  # the others are looks at another depth


def test_times_are_kept_for_each_number_of_sequences() -> None:
    chosen = policy()
    for _ in range(300):
        run(chosen, 1, chance=0.9, costs=CHEAP, rows=1)
        run(chosen, 1, chance=0.9, costs={0: 100, 1: 300, 2: 500, 3: 700}, rows=4)
    assert run(chosen, 20, chance=0.9, costs=CHEAP, rows=1)[3] >= 19
    assert run(chosen, 20, chance=0.9, costs={0: 100, 1: 300, 2: 500, 3: 700}, rows=4)[0] >= 19


def test_always_is_the_deepest_and_no_depths_is_none() -> None:
    assert DepthPolicy(depths=DEPTHS, always=True).choose(4) == 3
    assert DepthPolicy(depths=(), always=False).choose(4) == 0
