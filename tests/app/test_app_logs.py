"""Metrics from another file: kept by the link, shown on every page."""

from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from streamlit.testing.v1 import AppTest

from tests.app.builders import charts, explorer, visit, write_run

TABLE = "epoch;wall_time;val/loss;acc\n10;1;0.5;0.1\n20;2;0.25;0.2\n30;3;nan;0.3\n"


@pytest.fixture
def run(root, jobs) -> Path:
    folder = write_run(root / "run")
    (folder / "tb").mkdir()
    (folder / "tb" / "tune.csv").write_text(TABLE)
    (root / "beside.jsonl").write_text('{"step": 10, "lr": 0.1}\n')
    (root / "notes.txt").write_text("no metrics")
    return folder


def has_curves(app: AppTest) -> bool:
    return any("Curves above the map" in found.label for found in app.multiselect)


def test_metrics_of_another_file_are_drawn_and_kept_by_the_link(run):
    tune = str(run / "tb" / "tune.csv")
    app = explorer("run", run=str(run))
    assert not has_curves(app)
    app.text_input(key="map.log.").set_value("run/tb/tune.csv").run()
    assert app.query_params["log"] == "run/tb/tune.csv"
    assert has_curves(app)
    visit(app, "archives").run()
    assert app.query_params["log"] == "run/tb/tune.csv"
    app = explorer("run", run=str(run), log=tune)
    assert has_curves(app)
    app.text_input(key=f"map.log.{tune}").set_value("").run()
    assert "log" not in app.query_params
    assert not has_curves(app)


def test_a_link_that_names_no_metrics_is_answered_and_the_page_is_drawn(run):
    shown = services.load_subject(str(run))
    for said in ("7", "{", "/etc/passwd", "run/tb/gone.csv", "notes.txt", "[[],[],[]]"):
        with pytest.raises(ServiceError):
            services.with_log(shown, said)
    assert charts(explorer("run", run=str(run), log="/etc/passwd")) >= 1
