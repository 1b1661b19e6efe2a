"""The Overview page of runs and archives, in every state."""

from __future__ import annotations

import pytest
from inshrink_app import services
from streamlit.testing.v1 import AppTest

import inshrink_core
from tests.app.builders import SAMPLE, explorer, subject, write_run

pytestmark = pytest.mark.usefixtures("jobs")


def test_a_partly_damaged_run_is_shown_with_what_cannot_be_read_above_the_button(root):
    write_run(root / "run")
    (root / "run" / "step_000040.pt").write_bytes(b"PK\x03\x04 cut off")
    (root / "run" / "vocabulary_9.bin").write_bytes(b"other content")
    app = explorer("overview", run=str(root / "run"))
    assert [error.value.partition("\n")[0] for error in app.error] == [
        "1 checkpoint cannot be read. "
        "The archive will hold all others: keep these files, or fetch whole ones."
    ]
    assert "000040" in app.error[0].value
    assert "1 file left out" in [expander.label for expander in app.expander]
    assert {metric.label: metric.value for metric in app.metric}["Checkpoints"] == "3"
    app = explorer("overview", run=str(root / "run"))  # from the headers that were kept
    assert len(app.error) == 1


def test_overview_reads_headers_only(root):
    opened = services.load_subject(str(SAMPLE))
    assert opened.bytes_read < 0.2 * opened.total_bytes


def test_overview_of_a_huge_run_lists_and_filters_its_tensors(root, monkeypatch):
    monkeypatch.setattr(services, "load_subject", lambda _: subject(400, 200))
    app = explorer("overview", run="/runs/huge")
    assert len(app.dataframe) == 2, "drawn once it is asked for"
    app.session_state["tensors"] = True
    app.run()
    assert len(app.dataframe[2].value) == 400
    app.text_input(key="tensor_filter").set_value("layers.39").run()
    assert len(app.dataframe[2].value) == 11


def test_an_archive_that_is_written_or_grows_while_its_run_is_open_is_seen(root):
    def told(app: AppTest) -> dict[str, str]:
        return {metric.label: metric.value for metric in app.metric}

    run = write_run(root / "run", (1, 2, 3))
    app = explorer("overview", run=str(run))
    assert "Compression ratio" not in told(app)
    inshrink_core.compress(run, root / "run.inshrink", codec="lossless", steps=[1])
    first = told(app.run())["Archive"]
    inshrink_core.compress(run, root / "run.inshrink", codec="lossless")
    assert told(app.run())["Archive"] != first


def test_the_archive_of_another_run_is_not_claimed(root):
    inshrink_core.compress(write_run(root / "a" / "run", (1, 2)), root / "run.inshrink", codec="lossless")
    assert services.load_subject(str(write_run(root / "run", (10, 20)))).archive is None
