"""Numbers and names as text."""

from __future__ import annotations

import pytest
from inshrink_app.widgets import fmt


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.25, "0.250"),
        (1234.0, "1,230"),
        (3.4e-7, "3.40e-7"),
        (5e12, "5.00e12"),
        (float("nan"), "–"),
        (float("-inf"), "−∞"),
    ],
)
def test_values_have_three_digits(value, text):
    assert fmt.value(value) == text


def test_ratios_shares_shapes_and_steps_read_as_a_person_writes_them():
    assert fmt.ratio(14.23) == "14.2×"
    assert fmt.ratio(1234.5) == "1234×"
    assert fmt.ratio(None) == "–"
    assert fmt.share(0.004) == "<1 %"
    assert fmt.share(0.0) == "0 %"
    assert fmt.shape(()) == "scalar"
    assert fmt.shape((16, 1, 3)) == "16×1×3"
    assert fmt.steps(()) == "no steps"
    assert fmt.steps((1500,)) == "step 1,500"
    assert fmt.compact(44_812) == "44.8 k"
    assert [fmt.duration(t) for t in (0.4, 119, 219, 9000)] == ["0 s", "119 s", "4 min", "2.5 h"]


@pytest.mark.parametrize(
    "name",
    ["**bold**", "[x](http://evil)", "$x$", ":red[x]", "<b>", "a_b_", "`code`", "# x", "![i](u)", "~~x~~"],
)
def test_markdown_in_a_name_is_escaped(name):
    escaped = fmt.markdown(name)
    for sign in "*[]()$<>_`#~!:":
        assert escaped.count(sign) == escaped.count("\\" + sign)
    assert escaped.replace("\\", "").replace("\u2060", "") == name


@pytest.mark.parametrize("name", ["https://evil.example", "www.evil.example", "a@evil.example", ":smile:"])
def test_links_and_icons_without_brackets_are_broken_up(name):
    assert "\u2060" in fmt.markdown(name)


@pytest.mark.parametrize("sign", ["\u202e", "\x1b", "\0", "\n", "\u200b", "\ud800"])
def test_signs_that_could_forge_a_name_are_replaced(sign):
    assert sign not in fmt.markdown(f"a{sign}b")
    assert sign not in fmt.html(f"a{sign}b")
