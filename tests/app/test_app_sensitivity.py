"""The Sensitivity page: measuring, choices, filters, one checkpoint and four hundred layers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from inshrink_app import services
from inshrink_app.job import Job
from inshrink_app.services import measuring, running

from tests.app.builders import (
    PROBLEM,
    FakeJobs,
    answer,
    button,
    charts,
    explorer,
    sensitivity_table,
    subject,
    tables,
    texts,
    write_run,
)


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
