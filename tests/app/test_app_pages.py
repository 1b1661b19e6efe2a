"""Every page in every state: what it shows, and that nothing is ever a traceback."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from inshrink_app import roots, services
from inshrink_app.job import Job
from inshrink_app.recent import load_recent
from inshrink_app.services import measuring, running
from inshrink_app.tables import ArchiveFacts, FrameRow
from streamlit.testing.v1 import AppTest

from tests.app.builders import (
    PROBLEM,
    SAMPLE,
    FakeJobs,
    button,
    charts,
    explorer,
    sensitivity_table,
    subject,
    texts,
    write_run,
)

ABOUT_A_RUN = ("overview", "sensitivity", "search", "compare", "archive", "export")


def answer(monkeypatch: pytest.MonkeyPatch, jobs: FakeJobs) -> FakeJobs:
    """Let the services find their answers ready."""
    monkeypatch.setattr(running, "jobs", lambda: jobs)
    return jobs


def tables(n_rows: int = 6, n_steps: int = 5, **changes: str) -> dict[str, object]:
    """Return one table per grouping."""
    return {
        by: sensitivity_table(n_rows, n_steps, by=by, **changes) for by in ("tensor", "block", "layer_type")
    }


# No run


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_a_page_without_a_run_leads_to_the_open_page(root: Path, page: str) -> None:
    app = explorer(page)
    assert not app.exception
    assert "No run is open" in texts(app)
    button(app, "Choose a run").click().run()
    assert not app.exception
    assert app.title[0].value == "Open a run"


def test_open_page_offers_the_sample_in_words(root: Path) -> None:
    app = explorer()
    assert not app.exception
    assert "24 checkpoints, steps 10 – 2,000" in texts(app).replace("\u00a0", " ")
    assert button(app, "Open digits\\-cnn")


def test_opening_the_sample_leads_to_its_overview_and_is_remembered(root: Path) -> None:
    app = explorer()
    button(app, "Open digits\\-cnn").click().run()
    assert not app.exception
    assert app.title[0].value == "digits\\-cnn"
    assert app.metric[0].value == "24"
    assert [row.path for row in load_recent()] == [str(SAMPLE)]


def test_open_page_lists_the_folders_of_the_root_and_goes_into_them(root: Path) -> None:
    write_run(root / "team" / "run-a", (1,))
    app = explorer()
    button(app, "team").click().run()
    assert button(app, "run\\-a")
    button(app, "Open").click().run()
    assert not app.exception
    button(app, "Up").click().run()
    assert button(app, "team")


def test_open_page_without_a_sample_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "samples", lambda: ())
    app = explorer()
    assert not app.exception
    assert "came without sample runs" in texts(app)


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
def test_a_typed_path_that_cannot_be_opened_is_answered_here(root: Path, typed: str, said: str) -> None:
    app = explorer()
    app.text_input(key="typed_path").set_value(typed)
    next(b for b in app.button if b.label == "Open" and b.form_id).click().run()
    assert not app.exception
    assert app.title[0].value == "Open a run"
    assert said in texts(app)


# Empty and damaged


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_an_empty_folder_gets_a_panel_that_says_what_to_do(root: Path, page: str) -> None:
    (root / "empty").mkdir()
    app = explorer(page, run=str(root / "empty"))
    assert not app.exception
    assert "No readable checkpoint" in texts(app).replace("\\", "")
    assert "What to do" in texts(app)
    assert button(app, "Open another run")


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_a_damaged_checkpoint_gets_a_panel_with_details(root: Path, page: str) -> None:
    (root / "bad").mkdir()
    (root / "bad" / "step_1.pt").write_bytes(b"PK\x03\x04 this is no zip")
    app = explorer(page, run=str(root / "bad"))
    assert not app.exception
    assert len(app.error) == 1
    assert "step_1.pt" in texts(app)


def test_a_partly_damaged_run_is_shown_with_what_was_left_out(root: Path) -> None:
    write_run(root / "run")
    (root / "run" / "step_000040.pt").write_bytes(b"PK\x03\x04 cut off")
    app = explorer("overview", run=str(root / "run"))
    assert not app.exception
    assert "1 file was left out" in texts(app)
    assert app.metric[0].value == "3"


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_a_link_to_outside_of_the_roots_is_refused(root: Path, page: str) -> None:
    app = explorer(page, run="/etc")
    assert not app.exception
    assert "outside of the folders" in texts(app)


# One checkpoint


def test_one_checkpoint_is_told_that_curves_need_two(root: Path) -> None:
    write_run(root / "one", (5,))
    app = explorer("overview", run=str(root / "one"))
    assert not app.exception
    assert "This run has one checkpoint" in texts(app)
    assert charts(app) == 2


def test_update_of_one_checkpoint_says_that_movement_needs_two(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "one", (5,))
    nothing = tables(3, 1, metric="update")
    for table in nothing.values():
        for values in table.values.values():
            values[:] = np.nan
    answer(monkeypatch, FakeJobs(nothing))
    app = explorer("sensitivity", run=str(root / "one"), metric="update")
    assert not app.exception
    assert "Movement needs two checkpoints" in texts(app)
    assert charts(app) == 0


# A healthy run


def test_overview_of_the_sample_has_facts_curves_and_sizes(root: Path) -> None:
    app = explorer("overview", run=str(SAMPLE))
    assert not app.exception
    assert [metric.label for metric in app.metric] == [
        "Checkpoints",
        "Parameters",
        "Size on disk",
        "Last checkpoint",
        "Read so far",
    ]
    assert app.metric[1].value == "44.8 k"
    assert charts(app) == 3
    assert [s.value for s in app.subheader] == ["Training", "Size by role", "Weights by layer type"]


def test_overview_reads_headers_only(root: Path) -> None:
    opened = services.load_subject(str(SAMPLE))
    assert opened.bytes_read < 0.2 * opened.total_bytes


def test_sensitivity_of_a_run_is_measured_in_its_own_process_and_drawn(root: Path) -> None:
    write_run(root / "run")
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    key = measuring._job_key(str(root / "run"), "magnitude")
    job = running.jobs().get(key)
    deadline = time.monotonic() + 100
    while job.state == "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    app.run()
    assert not app.exception
    assert job.problem is None
    assert charts(app) == 1
    assert list(app.dataframe[0].value["Tensor"]) == ["fc1.weight", "fc1.bias", "fc2.weight"]
    table = job.result["tensor"]
    import torch

    first = torch.load(root / "run" / "step_000010.pt", weights_only=True)["model"]["fc1.weight"]
    assert table.values["mean"][0, 0] == pytest.approx(first.abs().mean().item(), rel=1e-2)


def test_sensitivity_shows_its_choices_in_the_link_and_takes_them_from_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), metric="fisher", by="block", stat="p99")
    assert not app.exception
    assert dict(app.query_params) == {
        "run": str(root / "run"),
        "metric": "fisher",
        "by": "block",
        "stat": "p99",
    }
    assert app.session_state["control.metric"] == "fisher"


def test_a_link_with_unknown_choices_falls_back_to_the_defaults(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), metric="<script>", by="nope", stat="")
    assert not app.exception
    assert app.query_params["metric"] == "magnitude"
    assert charts(app) == 1


def test_the_filter_narrows_rows_and_says_when_none_is_left(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"))
    app.text_input(key="row_filter").set_value("layers.3").run()
    assert list(app.dataframe[0].value["Tensor"]) == ["layers.3.weight"]
    app.text_input(key="row_filter").set_value("no such").run()
    assert not app.exception
    assert "No row matches" in texts(app)


def test_the_run_survives_a_change_of_page(root: Path) -> None:
    write_run(root / "run")
    app = explorer("overview", run=str(root / "run"))
    app.query_params.clear()
    app.switch_page("views/open.py").run()
    assert app.query_params["run"] == str(root / "run")


# Loading, asking, failing


def test_a_measurement_under_way_shows_progress_and_can_be_cancelled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(state="running"))
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert "Measuring magnitude" in texts(app)
    button(app, "Cancel").click().run()
    assert jobs.job is not None
    assert jobs.job.state == "cancelled"
    assert "cancelled" in texts(app)
    jobs.state, jobs.tables = "finished", tables()
    button(app, "Measure again").click().run()
    assert charts(app) == 1


def test_a_failed_measurement_shows_the_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(state="failed", problem=PROBLEM))
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert len(app.error) == 1
    assert PROBLEM.where in texts(app)
    assert button(app, "Measure again")


def test_a_cheap_measurement_that_an_ended_explorer_left_goes_on_by_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    jobs.job = Job(state="interrupted")
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert jobs.started == ["magnitude"]
    assert charts(app) == 1


def test_a_large_run_is_measured_only_when_asked_and_says_what_it_costs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    monkeypatch.setattr(services, "measuring_cost", lambda *_: 3_210_000_000)
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert "3.21 GB" in texts(app)
    assert jobs.started == []
    button(app, "Measure magnitude").click().run()
    assert jobs.started == ["magnitude"]
    assert charts(app) == 1


# Huge


def test_a_huge_run_is_shown_by_block_and_in_at_most_100_columns(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = subject(400, 200)
    monkeypatch.setattr(services, "load_subject", lambda _: huge)
    monkeypatch.setattr(measuring, "_job_key", lambda *_: "key")
    answer(monkeypatch, FakeJobs({**tables(400, 200), "block": sensitivity_table(50, 200, by="block")}))
    app = explorer("sensitivity", run=str(huge.path))
    assert not app.exception
    assert app.query_params["by"] == "block"
    assert "Each column is the mean of up to 2 neighbouring steps" in texts(app)
    app = explorer("sensitivity", run=str(huge.path), by="tensor")
    assert not app.exception
    assert len(app.dataframe[0].value) == 400


def test_overview_of_a_huge_run_lists_and_filters_its_tensors(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "load_subject", lambda _: subject(400, 200))
    app = explorer("overview", run="/runs/huge")
    assert not app.exception
    assert len(app.dataframe[0].value) == 400
    app.text_input(key="tensor_filter").set_value("layers.39").run()
    assert len(app.dataframe[0].value) == 11


# Archives


def archive_facts(n_frames: int = 3) -> ArchiveFacts:
    """Return the sizes of an archive."""
    frames = [
        FrameRow(10 * (i + 1), "keyframe" if i == 0 else "delta", 9000 - i, 4.5) for i in range(n_frames)
    ]
    return ArchiveFacts(
        path=Path("/runs/huge.inshrink"),
        raw_bytes=120_000 * n_frames,
        nbytes=9_000 * n_frames,
        ratio_weights=14.23 if n_frames else None,
        ratio_total=3.3 if n_frames else None,
        frames=tuple(frames),
    )


def test_overview_of_an_archive_shows_its_ratio_and_frames(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = subject(kind="archive", archive=archive_facts(), name="huge.inshrink")
    monkeypatch.setattr(services, "load_subject", lambda _: shown)
    app = explorer("overview", run="/runs/huge.inshrink")
    assert not app.exception
    assert {metric.label: metric.value for metric in app.metric}["Ratio, weights"] == "14.2×"
    assert "Frames" in texts(app)
    assert charts(app) == 3


def test_overview_of_an_archived_run_shows_the_ratio(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "load_subject", lambda _: subject(archive=archive_facts()))
    app = explorer("overview", run="/runs/huge")
    assert not app.exception
    assert {metric.label: metric.value for metric in app.metric}["Ratio, weights"] == "14.2×"


@pytest.mark.parametrize("page", ABOUT_A_RUN)
def test_an_empty_archive_says_how_to_fill_it(root: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    empty = subject(0, 0, kind="archive", archive=archive_facts(0))
    monkeypatch.setattr(services, "load_subject", lambda _: empty)
    app = explorer(page, run="/runs/huge.inshrink")
    assert not app.exception
    assert "This archive is empty" in texts(app)


def test_a_run_finds_its_archive_beside_it_and_both_tell_the_same_ratio(root: Path) -> None:
    import inshrink_core

    run = write_run(root / "run")
    inshrink_core.compress(run, root / "run.inshrink", codec="lossless")
    found = [explorer("overview", run=str(root / name)) for name in ("run", "run.inshrink")]
    ratios = [{metric.label: metric.value for metric in app.metric}["Ratio, weights"] for app in found]
    assert not any(app.exception for app in found)
    assert ratios[0] == ratios[1]
    assert ratios[0].endswith("×")


def test_the_archive_of_another_run_is_not_claimed(root: Path) -> None:
    import inshrink_core

    inshrink_core.compress(write_run(root / "a" / "run", (1, 2)), root / "run.inshrink", codec="lossless")
    assert services.load_subject(str(write_run(root / "run", (10, 20)))).archive is None


def test_checkpoints_written_later_are_seen(root: Path) -> None:
    run = write_run(root / "run", (1, 2))
    assert services.load_subject(str(run)).steps == (1, 2)
    write_run(run, (3,))
    assert services.load_subject(str(run)).steps == (1, 2, 3)


# Untrusted names


def test_names_from_disk_are_shown_as_text(root: Path) -> None:
    name = "**b** [x](javascript:1) <i>"
    write_run(root / name)
    app = explorer("overview", run=str(root / name))
    assert not app.exception
    assert app.title[0].value.startswith("\\*\\*b\\*\\* \\[x\\]")
    assert app.expander[0].label.startswith("Tensors")
    app = explorer()
    assert not app.exception
    assert any(b.label.startswith("\\*\\*b") for b in app.button)


def test_a_pickle_that_wants_to_run_code_is_refused_and_named(root: Path) -> None:
    import os
    import pickle
    import zipfile

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {root / 'owned'}",)

    (root / "evil").mkdir()
    with zipfile.ZipFile(root / "evil" / "step_1.pt", "w") as archive:
        archive.writestr("step_1/data.pkl", pickle.dumps(Evil()))
        archive.writestr("step_1/version", "3")
    app = explorer("overview", run=str(root / "evil"))
    assert not app.exception
    assert "system" in texts(app)
    assert not (root / "owned").exists()


# Every page


@pytest.mark.parametrize("page", [None, *ABOUT_A_RUN])
def test_every_page_shows_the_command_and_the_python_lines(
    root: Path, monkeypatch: pytest.MonkeyPatch, page: str | None
) -> None:
    write_run(root / "it's a run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer(page, run=str(root / "it's a run"))
    codes = [code.value for code in app.code]
    assert any(code.startswith("inshrink ") and "it'\"'\"'s a run" in code for code in codes)
    python = next(code for code in codes if code.startswith("import inshrink_core"))
    compile(python, page or "open", "exec")


def test_every_page_has_at_most_one_primary_button(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    for page in (None, *ABOUT_A_RUN):
        for query in ({}, {"run": str(root / "run")}, {"run": "/etc"}):
            app = explorer(page, **query)
            primary = [b for b in app.button if b.proto.type == "primary"]
            assert len(primary) <= 1


def test_an_error_of_the_explorer_itself_is_a_panel_without_a_traceback() -> None:
    def script() -> None:
        from inshrink_app.components import problem

        problem.show_unexpected(KeyError("<secret>"))

    app = AppTest.from_function(script).run()
    assert not app.exception
    assert "KeyError" in texts(app)
    assert "secret" not in texts(app)


def test_the_first_page_is_the_run_given_on_the_command_line(root: Path) -> None:
    write_run(root / "run")
    roots.configure([root], str(root / "run"))
    app = explorer("overview")
    assert app.title[0].value == "run"
