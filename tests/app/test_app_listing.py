"""Tables look alike on every page, their files hold what the screen rounds, and names are text."""

from __future__ import annotations

import json

import pytest
from inshrink_app.widgets import fmt
from streamlit.testing.v1 import AppTest


def test_a_table_has_headings_and_percent_on_screen_an_alternative_text_and_two_files():
    def script() -> None:
        import pandas as pd
        from inshrink_app.widgets import listing

        table = pd.DataFrame({"step": [1000, 2000], "drop": [0.0123, None], "kind": ["a", "b"]})
        listing.show(table, "two", alt="Two rows", hidden=["kind"], most=1)

    app = AppTest.from_function(script).run()
    drawn = app.dataframe[0].value
    assert list(drawn.columns) == ["step", "drop"]
    assert list(drawn["drop"]) == pytest.approx([1.23])
    looks = json.loads(app.dataframe[0].proto.columns)
    assert [looks[name]["label"] for name in ("step", "drop")] == ["Step", "Drop"]
    assert [looks[name]["type_config"]["format"] for name in ("step", "drop")] == ["localized", "%.2f %%"]
    assert app.dataframe[0].proto.placeholder == "–"
    assert app.dataframe[0].proto.alt == "Two rows"
    assert [button.proto.label for button in app.get("download_button")] == ["CSV", "JSON"]


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
