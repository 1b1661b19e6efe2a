"""Tables look alike on every page, and their files hold what the screen rounds."""

from __future__ import annotations

import json

from streamlit.testing.v1 import AppTest


def listed() -> AppTest:
    def script() -> None:
        import pandas as pd
        from inshrink_app.widgets import listing

        table = pd.DataFrame({"step": [1000, 2000], "drop": [0.0123, None], "kind": ["a", "b"]})
        listing.show(table, "two", alt="Two rows", hidden=["kind"], most=1)

    return AppTest.from_function(script).run()


def test_headings_are_in_sentence_case_and_a_gap_is_a_dash():
    (table,) = listed().dataframe
    looks = json.loads(table.proto.columns)
    assert [looks[name]["label"] for name in ("step", "drop")] == ["Step", "Drop"]
    assert looks["step"]["type_config"]["format"] == "localized"
    assert table.proto.placeholder == "–"
    assert table.proto.alt == "Two rows"


def test_a_share_is_in_percent_on_screen_and_a_fraction_in_both_files_with_every_row():
    app = listed()
    drawn = app.dataframe[0].value
    assert list(drawn.columns) == ["step", "drop"]
    assert list(drawn["drop"]) == [1.23]
    assert [button.proto.label for button in app.get("download_button")] == ["CSV", "JSON"]
