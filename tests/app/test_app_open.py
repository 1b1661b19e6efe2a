"""The Open page: sample, recent runs, typed paths, and the table of all runs and archives."""

from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.server.recent import load_recent
from streamlit.testing.v1 import AppTest

from tests.app.builders import SAMPLE, button, charts, explorer, header, texts, write_run


def test_opening_the_sample_leads_to_its_run_and_is_remembered(root):
    app = explorer()
    sample = button(app, "Sample: digits\\-cnn")
    sample.click().run()
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
        ("/etc/passwd", "outside of the folders"),
        ("missing-run", "nothing at this path"),
        ("   ", "No path was typed"),
    ],
)
def test_a_typed_path_that_cannot_be_opened_is_answered_here(root, typed, said):
    app = explorer()
    app.text_input(key="typed_path").set_value(typed)
    next(b for b in app.button if b.label == "Open" and b.form_id).click().run()
    assert app.title[0].value == "Open a run or an archive"
    assert said in texts(app)


def opened(**state: object) -> AppTest:
    """Return the Open page, whose table is there at once."""
    app = explorer()
    for key, value in state.items():
        app.session_state[key] = value
    app.run()
    return app


def ticked(*names: str) -> AppTest:
    """Return the Open page after some rows of its table were ticked."""
    listed = list(opened().dataframe[0].value["name"])
    rows = [listed.index(name) for name in names]
    key = f"runs.table.{hash(tuple(listed))}"
    return opened(**{key: {"selection": {"rows": rows, "columns": [], "cells": []}}})


def test_all_runs_and_archives_below_the_roots_are_listed(archived, jobs):
    write_run(archived.parent / "team" / "deep" / "other", (1, 2))
    (archived.parent / "broken").mkdir()
    (archived.parent / "broken" / "step_1.pt").write_bytes(b"PK cut off")
    table = opened().dataframe[0].value
    by_name = {Path(str(name)).name: row for name, row in table.set_index("name").iterrows()}
    assert set(by_name) == {"run", "run.inshrink", "team", "other", "broken"}
    chain = services.chain_of(str(archived.with_name("run.inshrink")))
    for name in ("run", "run.inshrink"):
        assert by_name[name]["bytes of the archive"] == chain.nbytes
        assert by_name[name]["ratio"] == pytest.approx(chain.ratio_total)
        assert by_name[name]["bits per weight"] == pytest.approx(chain.bits_per_weight)
    assert by_name["run"]["steps not archived"] == 0
    assert by_name["other"]["steps not archived"] == 2
    assert (by_name["other"]["steps"], by_name["other"]["last step"]) == (2, 2)
    assert by_name["broken"]["problem"]


def test_two_ticked_runs_lead_to_their_difference_and_one_is_opened(archived, jobs):
    other = write_run(archived.parent / "other", (10, 20))
    for run, loss in ((archived, 1.0), (other, 2.0)):
        (run / "metrics.csv").write_text(f"step,loss\n10,{loss}\n20,nan\n")
    app = ticked("other", "run")
    assert charts(app) == 1
    assert "2 steps in common" in texts(app)
    app.button(key="runs.two").click().run()
    kept = {key: app.session_state[f"inshrink.{key}"] for key in ("run", "compared", "other")}
    assert kept == {"run": str(other), "compared": "runs", "other": str(archived)}
    app = ticked("run")
    button(app, "Open it").click().run()
    assert app.session_state["inshrink.run"] == str(archived)
