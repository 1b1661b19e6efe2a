"""Which measured configuration stands in the table for a codec and a bound."""

import pytest

from inshrink_core.errors import InputError
from inshrink_lab.bench.report import Bound, Point, choose_row, parse_bounds


def point(ratio, drop, divergence=None):
    return Point(
        codec="c",
        metric="loss",
        direction="lower",
        ratio_weights=ratio,
        ratio_total=ratio,
        max_drop=drop,
        mean_divergence=divergence,
    )


DROP = Bound("drop", 0.01)


def test_the_largest_ratio_that_keeps_the_bound_is_chosen():
    points = [point(10, -0.2), point(30, 0.01), point(20, 0.0), point(40, 0.0101)]
    row = choose_row("c", points, DROP)
    assert (row.kept, row.point.ratio_weights) == (True, 30)


def test_each_kind_of_bound_reads_its_own_figure():
    points = [point(10, 0.5, 0.001), point(20, 0.0, 0.5)]
    assert choose_row("c", points, DROP).point.ratio_weights == 20
    assert choose_row("c", points, Bound("divergence", 0.01)).point.ratio_weights == 10


def test_out_of_reach_has_no_ratio_and_shows_what_comes_nearest():
    row = choose_row("c", [point(10, 0.03), point(20, 0.02), point(30, None)], DROP)
    document = row.to_json()
    assert not row.kept
    assert (document["ratio_weights"], document["ratio_total"], document["max_drop"]) == (None, None, 0.02)


def test_what_is_not_known_keeps_no_bound():
    row = choose_row("c", [point(10, None)], DROP)
    assert (row.kept, row.point) == (False, None)
    assert row.to_json()["max_drop"] is None
    assert choose_row("c", [], DROP).point is None


def test_a_stale_copy_that_keeps_the_bound_has_no_ratio_all_the_same():
    row = choose_row("repeat", [point(None, 0.001)], DROP)
    assert (row.kept, row.to_json()["ratio_weights"]) == (True, None)


def test_bounds_are_read_in_order_and_once():
    text = "drop=0.02, divergence=.01,drop=0.005,drop=0.02"
    assert parse_bounds(text) == (Bound("drop", 0.02), Bound("divergence", 0.01), Bound("drop", 0.005))


@pytest.mark.parametrize(
    "text", ["", "drop", "drop=", "drop=x", "drop=nan", "drop=inf", "drop=-1", "loss=1", "drop=1,,drop=2"]
)
def test_what_bounds_nothing_is_refused(text):
    with pytest.raises(InputError):
        parse_bounds(text)
