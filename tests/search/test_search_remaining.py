"""How long a search still takes, from what its strategy will ask for."""

import math
from functools import partial

import pytest

from inshrink_core.search.remaining import Remaining
from inshrink_core.search.space import space_of
from inshrink_core.search.strategies import Bracket, Everything, GuidedExhaustive, Outcome, explore

LINE = space_of("lattice")
N_STEPS = 5


def planned(strategy, space=LINE, budget=None, **more) -> Remaining:
    remaining = Remaining(N_STEPS)
    remaining.plan(partial(explore, strategy, budget=budget), space, **more)
    return remaining


def chain(remaining: Remaining, coarseness: float, usages: list[float], seconds: float = 0.1) -> None:
    for place, usage in enumerate(usages):
        remaining.add(LINE.candidate(coarseness), place, usage, seconds)


def test_a_search_of_everything_asks_for_each_point_once_and_gives_up_what_breaks():
    remaining = planned(Everything(space=LINE), budget=3)
    first, second, third = LINE.points()[:3]
    chain(remaining, first, [1e-4] * 3)
    assert remaining.left()[0] == 2 + 5 + 5
    chain(remaining, first, [1e-4] * 5)
    chain(remaining, second, [7.0])
    trials, seconds = remaining.left()
    assert trials == 1  # the coarser third one breaks at its first step too
    assert seconds == pytest.approx(0.1 * (1 + 2))  # and about two encodings follow
    chain(remaining, third, [7.0])
    assert remaining.left()[0] == 0


def test_a_bracket_is_as_long_as_what_was_measured_lets_one_expect():
    far, near = planned(Bracket(start=1.0)), planned(Bracket(start=1.0))
    chain(far, 1.0, [0.01] * 3)
    chain(near, 1.0, [0.9] * 3)
    assert near.left()[0] < far.left()[0]
    chain(near, 1.0, [0.9] * N_STEPS)
    assert near.left()[0] == 0  # enough of the bound is used


def test_a_trial_takes_what_others_took_whatever_went_before_the_first():
    remaining = planned(Everything(space=LINE), budget=1)
    (point, *_) = LINE.points()
    for place, seconds in enumerate([40.0, 0.1, 0.1]):
        remaining.add(LINE.candidate(point), place, 1e-4, seconds)
    assert remaining.left() == (2, pytest.approx(0.1 * (2 + 2)))


def test_what_a_log_told_is_known_and_takes_no_time():
    remaining = planned(Everything(space=LINE), budget=1)
    for place in range(4):
        remaining.add(LINE.candidate(LINE.points()[0]), place, 1e-4, None)
    assert remaining.evaluations == 0
    assert remaining.left() == (1, 0.0)


@pytest.mark.parametrize("usage", [0.0, math.inf, 1e-30, 1e300])
def test_figures_at_the_ends_of_what_there_is_foretell_something_finite(usage: float):
    remaining = planned(Bracket(start=1.0), budget=8)
    chain(remaining, 1.0, [usage])
    trials, seconds = remaining.left()
    assert 0 <= trials <= 8 * N_STEPS
    assert math.isfinite(seconds)


def test_a_guided_search_is_played_to_its_end():
    cube = space_of("uniform", frozenset())

    def ratio_of(point) -> float:
        return 4.0 * (1 + point.place[0])

    def measure(points) -> list[Outcome]:
        return [Outcome(p, p.place[0] < 3, ratio_of(p), 0.1 * 2.0 ** p.place[0]) for p in points]

    guided = GuidedExhaustive(cube=cube, ratio_of=ratio_of)
    remaining = planned(guided, cube, ratio_of=ratio_of)
    before = remaining.left()[0]
    for outcome in explore(guided, measure).outcomes:
        for place in range(N_STEPS if outcome.kept else 1):
            usage = 0.5 if outcome.kept else 2.0
            remaining.add(cube.candidate(outcome.point), place, usage, 0.1)
    assert before > 0
    assert remaining.left()[0] == 0
