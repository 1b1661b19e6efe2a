"""The Open page: sample, recent runs, folders and typed paths."""

from __future__ import annotations

import pytest
from inshrink_app.server.recent import load_recent

from tests.app.builders import SAMPLE, button, explorer, header, texts, write_run


def test_open_page_offers_the_sample_in_words(root):
    app = explorer()
    assert "24 checkpoints" in button(app, "Sample: digits\\-cnn").help


def test_opening_the_sample_leads_to_its_run_and_is_remembered(root):
    app = explorer()
    button(app, "Sample: digits\\-cnn").click().run()
    assert header(app)[0].startswith("**digits\\-cnn**")

    assert [row.path for row in load_recent()] == [str(SAMPLE)]


def test_open_page_lists_the_folders_of_the_root_and_goes_into_them(root):
    write_run(root / "team" / "run-a", (1,))
    (root / "empty").mkdir()
    app = explorer()
    listed = app.dataframe[0].value
    assert list(zip(listed["name"], listed["kind"], strict=True)) == [
        ("empty", "folder"),
        ("team", "folder"),
        ("team/run-a", "run"),
    ]
    app.session_state["runs.clicked"] = 1
    app.run()
    assert list(app.dataframe[0].value["name"]) == ["team/run-a"]
    button(app, "Up").click().run()
    assert len(app.dataframe[0].value) == 3
    assert button(app, "Up").disabled


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("../../etc", "outside of the folders"),
        ("/etc/passwd", "outside of the folders"),
        ("missing-run", "nothing at this path"),
        ("a\0b", "not a path"),
        ("   ", "No path was typed"),
    ],
)
def test_a_typed_path_that_cannot_be_opened_is_answered_here(root, typed, said):
    app = explorer()
    app.text_input(key="typed_path").set_value(typed)
    next(b for b in app.button if b.label == "Open" and b.form_id).click().run()
    assert app.title[0].value == "Open a run or an archive"
    assert said in texts(app)
