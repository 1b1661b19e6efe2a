"""The Sensitivity page: measuring, choices, filters, one checkpoint and four hundred layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.pages.sensitivity import ahead

from tests.app.builders import (
    MEASURING,
    FakeJobs,
    answer,
    button,
    charts,
    explorer,
    linked,
    tables,
    texts,
    write_run,
)
from tests.app.job_stubs import wait


def test_update_of_one_checkpoint_says_that_movement_needs_two(root, monkeypatch):
    write_run(root / "one", (5,))
    nothing = tables(3, 1, metric="update")
    for table in nothing.values():
        for values in table.values.values():
            values[:] = np.nan
    answer(monkeypatch, FakeJobs(nothing))
    app = explorer("sensitivity", run=str(root / "one"))
    assert "Movement needs two checkpoints" in texts(app)
    assert "update" not in app.selectbox(key="control.metric").options


def test_sensitivity_of_a_run_is_measured_in_its_own_process_and_drawn(root):
    write_run(root / "run")
    app = explorer("sensitivity", run=str(root / "run"), metric="magnitude")
    wait(services.sensitivity_job(str(root / "run"), "magnitude"))
    job = services.sensitivity_job(str(root / "run"), "magnitude")
    app.run()
    assert job.problem is None
    assert charts(app) == 1
    lines = [label.lstrip() for label in app.dataframe[0].value["Layer"]]
    assert lines == ["▼ fc1", "weight", "bias", "fc2.weight"]
    table = job.result["tensor"]
    first = torch.load(root / "run" / "step_000010.pt", weights_only=True)["model"]["fc1.weight"]
    assert table.values["mean"][0, 0] == pytest.approx(first.abs().mean().item(), rel=1e-2)


def test_sensitivity_shows_its_choices_in_the_link_and_takes_them_from_it(root, monkeypatch):
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), metric="magnitude", by="block", stat="p99")
    assert dict(app.query_params) == {
        "run": str(root / "run"),
        "metric": "magnitude",
        "by": "block",
        "stat": "p99",
    }
    assert app.session_state["control.metric"] == "magnitude"


def test_a_link_with_unknown_choices_falls_back_to_the_defaults(root, monkeypatch):
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), metric="<script>", by="nope", stat="")
    assert app.query_params["metric"] == "update"
    assert charts(app) == 1


def test_a_measurement_under_way_shows_progress_and_can_be_cancelled(root, monkeypatch):
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(state="running"))
    app = explorer("sensitivity", run=str(root / "run"))
    assert "Measuring movement" in texts(app)
    button(app, "Cancel").click().run()
    assert jobs.job.state == "cancelled"
    assert "cancelled" in texts(app)
    jobs.state, jobs.tables = "finished", tables()
    button(app, "Try again").click().run()
    assert charts(app) == 1


def test_a_cheap_measurement_that_an_ended_explorer_left_goes_on_by_itself(root, monkeypatch):
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    jobs.job = Job(MEASURING, state="interrupted")
    app = explorer("sensitivity", run=str(root / "run"))
    assert jobs.started == ["update"]
    assert charts(app) == 1


def test_a_link_starts_no_measurement_until_its_reader_asks(root, monkeypatch):
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    monkeypatch.setattr(ahead, "warm_up", refuse)
    monkeypatch.setattr(services, "drill_down", refuse)
    link = {"run": str(root / "run"), "metric": "magnitude", "layer": "layers.0.weight", "step": "20"}
    app = linked("sensitivity", **link)
    assert "a link alone starts nothing" in texts(app)
    app.run()
    assert jobs.started == []
    jobs.job = Job(MEASURING, state="interrupted")
    app.run()
    assert jobs.started == []
    assert button(app, "Try again")
    # What was measured before is shown; the tensor that the link names is not looked into.
    jobs.job = Job(MEASURING, state="finished", result=tables())
    app.run()
    assert any(found.label.startswith("Look inside") for found in app.button)


def refuse(*_: object) -> None:
    raise AssertionError("a link alone did this")


def test_a_link_to_two_steps_reads_no_weights_until_its_reader_asks(root, monkeypatch):
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    jobs.job = Job(MEASURING, state="finished", result=tables())
    monkeypatch.setattr(services, "moved_between", refuse)
    app = linked("sensitivity", run=str(root / "run"), metric="magnitude", view="diff")
    assert any(found.label.startswith("Measure movement") for found in app.button)


@pytest.mark.parametrize(
    ("optimizer", "steps", "metric"),
    [
        ({"exp_avg": 1, "exp_avg_sq": 1}, (10, 20), "fisher"),
        ({"exp_avg": 1}, (10, 20), "taylor"),
        ({}, (10, 20), "update"),
        ({}, (10,), "magnitude"),
    ],
)
def test_the_heatmap_opens_on_the_most_telling_metric_that_the_run_tells(
    root,
    monkeypatch,
    optimizer,
    steps,
    metric,
):
    write_trained_run(root / "run", steps, tuple(optimizer))
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"))
    assert app.session_state["control.metric"] == metric
    assert app.query_params["metric"] == metric


def write_trained_run(folder: Path, steps: tuple[int, ...], moments: tuple[str, ...]) -> None:
    folder.mkdir()
    for step in steps:
        weight = torch.randn(4, 3)
        state = {0: {name: torch.rand(4, 3) for name in moments}}
        groups = [{"params": [0], "lr": 0.1}]
        document = {"model": {"fc.weight": weight}, "step": step}
        document |= {"optimizer": {"state": state, "param_groups": groups}} if moments else {}
        torch.save(document, folder / f"step_{step:06}.pt")


def test_a_large_run_is_measured_only_when_asked_and_says_what_it_costs(root, monkeypatch):
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    monkeypatch.setattr(services, "measuring_cost", lambda *_: 3_210_000_000)
    app = explorer("sensitivity", run=str(root / "run"))
    assert "3.21 GB" in texts(app)
    assert jobs.started == []
    button(app, "Measure movement").click().run()
    assert jobs.started == ["update"]
    assert charts(app) == 1
