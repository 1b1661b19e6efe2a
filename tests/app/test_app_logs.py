"""Metrics from another file: chosen by columns, kept by the link, shown on every page."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.services import LogChoice
from inshrink_app.services.inside import dropped_folder
from inshrink_app.widgets import figures
from streamlit.testing.v1 import AppTest

from tests.app.builders import button, charts, explorer, visit, write_run

TABLE = "epoch;wall_time;val/loss;acc\n10;1;0.5;0.1\n20;2;0.25;0.2\n30;3;nan;0.3\n"


@pytest.fixture
def run(root) -> Path:
    folder = write_run(root / "run")
    (folder / "tb").mkdir()
    (folder / "tb" / "tune.csv").write_text(TABLE)
    (root / "beside.jsonl").write_text('{"step": 10, "lr": 0.1}\n')
    (root / "notes.txt").write_text("no metrics")
    return folder


def panel(run: Path, **query: str) -> AppTest:
    app = explorer("run", run=str(run), **query)
    app.session_state["logs"] = True
    app.run()
    return app


def has_curves(app: AppTest) -> bool:
    return any("Curves above the map" in found.label for found in app.multiselect)


def choice(run: Path, *columns: str, step: str = "epoch") -> LogChoice:
    return LogChoice(str(run / "tb" / "tune.csv"), step, columns)


def test_files_of_the_run_and_beside_it_are_offered(run):
    shown = services.load_subject(str(run))
    assert services.log_files(shown) == (run / "tb" / "tune.csv", run.parent / "beside.jsonl")


def test_columns_are_guessed_previewed_and_used(run):
    app = panel(run)
    assert app.selectbox(key=f"log.step.{run}/tb/tune.csv").value == "epoch"
    columns = app.multiselect(key=f"log.columns.{run}/tb/tune.csv")
    assert columns.value == ["val/loss", "acc"]
    columns.set_value(["acc"]).run()
    button(app, "Use these metrics").click().run()
    assert json.loads(app.query_params["log"]) == [str(run / "tb" / "tune.csv"), "epoch", "acc"]
    assert has_curves(app)
    button(app, "Use the run's own").click().run()
    assert "log" not in app.query_params
    assert not has_curves(app)


def test_a_link_brings_its_metrics_and_other_pages_keep_them(run):
    app = explorer("run", run=str(run), log=choice(run, "acc").text)
    assert has_curves(app)
    visit(app, "archives").run()
    assert app.query_params["log"] == choice(run, "acc").text
    visit(app, "run").run()
    assert has_curves(app)


@pytest.mark.parametrize(
    "said",
    [
        "7",
        "{",
        '["a", "b"]',
        '["/etc/passwd", "step", "x"]',
        '["run/tb/gone.csv", "step", "x"]',
        "[[],[],[]]",
    ],
)
def test_a_link_that_names_no_metrics_is_answered_and_the_page_is_drawn(run, said):
    app = panel(run, log=said)
    assert charts(app) >= 1
    with pytest.raises(ServiceError):
        services.with_log(services.load_subject(str(run)), said)


def test_columns_that_are_not_there_are_told(run):
    with pytest.raises(ServiceError, match="no column 'gone'"):
        services.log_of(choice(run, "gone"))
    with pytest.raises(ServiceError, match="fractions"):
        services.log_of(choice(run, "acc", step="val/loss"))


def test_a_dropped_file_is_kept_where_it_holds_metrics(run):
    kept = services.keep_log("../x.csv", io.BytesIO(TABLE.encode()))
    assert kept.parent.parent == dropped_folder()
    assert kept in services.log_files(services.load_subject(str(run)))
    with pytest.raises(ServiceError, match="no metrics"):
        services.keep_log("y.csv", io.BytesIO(b"words"))
    assert [one.is_log for one in services.dropped()] == [True]
    app = panel(run)
    uploader = next(found for found in app.file_uploader if "Drop a file" in found.label)
    uploader.set_value(("z.csv", TABLE.replace("acc", "other").encode(), "")).run()
    assert app.selectbox(key=f"log.file.{run}").value.endswith("z.csv")
    assert len(services.dropped()) == 2


def test_of_very_many_values_those_that_show_are_drawn(run):
    lines = [f"{step},{'9' if step == 7_777 else step / 1e6}" for step in range(20_000)]
    (run / "tb" / "long.csv").write_text("\n".join(["step,acc", *lines]))
    said = LogChoice(str(run / "tb" / "long.csv"), "step", ("acc",)).text
    shown = services.with_log(services.load_subject(str(run)), said)
    (drawn,) = figures.log_figure(shown.log, {"all": list(shown.log)}).data
    assert len(drawn.x) < 3 * figures.CURVE_PARTS
    assert max(drawn.y) == 9
