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


DIVERGENCE = Bound("divergence", 0.01)


@pytest.mark.parametrize(
    ("points", "bound", "kept", "ratio", "drop"),
    [
        # The largest ratio that keeps the bound, each kind of which reads its own figure.
        ([(10, -0.2), (30, 0.01), (20, 0.0), (40, 0.0101)], DROP, True, 30, 0.01),
        ([(10, 0.5, 0.001), (20, 0.0, 0.5)], DROP, True, 20, 0.0),
        ([(10, 0.5, 0.001), (20, 0.0, 0.5)], DIVERGENCE, True, 10, 0.5),
        # Out of reach: no ratio, and the figures of what comes nearest.
        ([(10, 0.03), (20, 0.02), (30, None)], DROP, False, None, 0.02),
        # Unknown figures keep no bound; the previous checkpoint keeps one without a ratio.
        ([(10, None)], DROP, False, None, None),
        ([], DROP, False, None, None),
        ([(None, 0.001)], DROP, True, None, 0.001),
    ],
)
def test_a_row_is_the_largest_ratio_that_keeps_the_bound(points, bound, kept, ratio, drop):
    document = choose_row("c", [point(*values) for values in points], bound).to_json()
    found = [document[key] for key in ("kept", "ratio_weights", "ratio_total", "max_drop")]
    assert found == [kept, ratio, ratio, drop]


def test_bounds_are_read_in_order_and_once():
    text = "drop=0.02, divergence=.01,drop=0.005,drop=0.02"
    assert parse_bounds(text) == (Bound("drop", 0.02), Bound("divergence", 0.01), Bound("drop", 0.005))


@pytest.mark.parametrize(
    "text", ["", "drop", "drop=", "drop=x", "drop=nan", "drop=inf", "drop=-1", "loss=1", "drop=1,,drop=2"]
)
def test_what_bounds_nothing_is_refused(text):
    with pytest.raises(InputError):
        parse_bounds(text)
