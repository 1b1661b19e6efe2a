"""The Sensitivity page: measuring, choices, filters, one checkpoint and four hundred layers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.pages.sensitivity import ahead
from inshrink_app.services import measuring
from streamlit.testing.v1 import AppTest

from tests.app.builders import (
    MEASURING,
    PROBLEM,
    FakeJobs,
    answer,
    button,
    charts,
    explorer,
    linked,
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
    app = explorer("sensitivity", run=str(root / "one"))
    assert not app.exception
    assert "Movement needs two checkpoints" in texts(app)
    assert "update" not in app.selectbox(key="control.metric").options


def test_sensitivity_of_a_run_is_measured_in_its_own_process_and_drawn(root: Path) -> None:
    write_run(root / "run")
    app = explorer("sensitivity", run=str(root / "run"), metric="magnitude")
    assert not app.exception
    job = services.sensitivity_job(str(root / "run"), "magnitude")
    deadline = time.monotonic() + 100
    while job is not None and job.is_running and time.monotonic() < deadline:
        time.sleep(0.05)
        job = services.sensitivity_job(str(root / "run"), "magnitude")
    app.run()
    assert not app.exception
    assert job is not None
    assert job.problem is None
    assert charts(app) == 1
    lines = [label.lstrip() for label in app.dataframe[0].value["Layer"]]
    assert lines == ["▼ fc1", "weight", "bias", "fc2.weight"]
    table = job.result["tensor"]
    import torch

    first = torch.load(root / "run" / "step_000010.pt", weights_only=True)["model"]["fc1.weight"]
    assert table.values["mean"][0, 0] == pytest.approx(first.abs().mean().item(), rel=1e-2)


def test_sensitivity_shows_its_choices_in_the_link_and_takes_them_from_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), metric="magnitude", by="block", stat="p99")
    assert not app.exception
    assert dict(app.query_params) == {
        "run": str(root / "run"),
        "metric": "magnitude",
        "by": "block",
        "stat": "p99",
    }
    assert app.session_state["control.metric"] == "magnitude"


def test_every_view_ends_with_the_next_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(write_run(root / "run")))
    for view in ("steps", "diff"):
        app.session_state["control.view"] = view
        app.run()
        assert not app.exception
        keys = [str(found.key) for found in app.button]
        assert [key for key in keys if key.startswith("next.")] == ["next.allocate", "next.export"]


def test_a_link_with_unknown_choices_falls_back_to_the_defaults(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), metric="<script>", by="nope", stat="")
    assert not app.exception
    assert app.query_params["metric"] == "update"
    assert charts(app) == 1


def test_the_filter_narrows_rows_and_says_when_none_is_left(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"))
    app.text_input(key="row_filter").set_value("layers.3").run()
    assert list(app.dataframe[0].value["Layer"]) == ["layers.3.weight"]
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
    assert "Measuring movement" in texts(app)
    button(app, "Cancel").click().run()
    assert jobs.job is not None
    assert jobs.job.state == "cancelled"
    assert "cancelled" in texts(app)
    jobs.state, jobs.tables = "finished", tables()
    button(app, "Try again").click().run()
    assert charts(app) == 1


def test_a_failed_measurement_shows_the_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(state="failed", problem=PROBLEM))
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert len(app.error) == 1
    assert PROBLEM.where in texts(app)
    assert button(app, "Try again")


def test_a_cheap_measurement_that_an_ended_explorer_left_goes_on_by_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    jobs.job = Job(MEASURING, state="interrupted")
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert jobs.started == ["update"]
    assert charts(app) == 1


def test_a_link_starts_no_measurement_until_its_reader_asks(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    monkeypatch.setattr(ahead, "warm_up", refuse)
    monkeypatch.setattr(services, "drill_down", refuse)
    link = {"run": str(root / "run"), "metric": "magnitude", "layer": "layers.0.weight", "step": "20"}
    app = linked("sensitivity", **link)
    assert not app.exception
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
    assert not app.exception
    assert any(found.label.startswith("Look inside") for found in app.button)


def refuse(*_: object) -> None:
    raise AssertionError("a link alone did this")


def test_a_link_to_two_steps_reads_no_weights_until_its_reader_asks(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    jobs.job = Job(MEASURING, state="finished", result=tables())
    monkeypatch.setattr(services, "moved_between", refuse)
    app = linked("sensitivity", run=str(root / "run"), metric="magnitude", view="diff")
    assert not app.exception
    assert any(found.label.startswith("Measure movement") for found in app.button)


def test_once_the_reader_has_asked_for_one_measurement_the_next_comes_by_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(tables()))
    app = linked("sensitivity", run=str(root / "run"), metric="magnitude")
    button(app, "Measure magnitude").click().run()
    assert jobs.started == ["magnitude"]
    jobs.job = None
    app.session_state["control.metric"] = "update"
    app.run()
    assert jobs.started == ["magnitude", "update"]


def test_a_queued_measurement_says_what_goes_before_it_and_can_be_cancelled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    jobs = answer(monkeypatch, FakeJobs(state="queued"))
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert "Queued: 1 job before it" in progress_texts(app)
    button(app, "Cancel").click().run()
    assert jobs.job is not None
    assert jobs.job.state == "cancelled"


def progress_texts(app: AppTest) -> str:
    return "\n".join(str(found.proto.text) for found in app.get("progress"))


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
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: dict[str, int],
    steps: tuple[int, ...],
    metric: str,
) -> None:
    write_trained_run(root / "run", steps, tuple(optimizer))
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"))
    assert not app.exception
    assert app.session_state["control.metric"] == metric
    assert app.query_params["metric"] == metric


def test_a_metric_carried_from_another_run_gives_way_where_this_one_does_not_tell_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "plain", (10,))
    write_trained_run(root / "trained", (10, 20), ("exp_avg", "exp_avg_sq"))
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "trained"))
    assert app.query_params["metric"] == "fisher"
    app.query_params["run"] = str(root / "plain")
    app.run()
    assert app.query_params["metric"] == "magnitude"
    assert explorer("sensitivity", run=str(root / "plain"), metric="fisher").query_params["metric"] == (
        "magnitude"
    )


def write_trained_run(folder: Path, steps: tuple[int, ...], moments: tuple[str, ...]) -> None:
    import torch

    folder.mkdir()
    for step in steps:
        weight = torch.randn(4, 3)
        state = {0: {name: torch.rand(4, 3) for name in moments}}
        groups = [{"params": [0], "lr": 0.1}]
        document = {"model": {"fc.weight": weight}, "step": step}
        document |= {"optimizer": {"state": state, "param_groups": groups}} if moments else {}
        torch.save(document, folder / f"step_{step:06}.pt")


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
    button(app, "Measure movement").click().run()
    assert jobs.started == ["update"]
    assert charts(app) == 1


def test_a_huge_run_is_shown_by_block_and_in_at_most_100_columns(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = subject(400, 200)
    monkeypatch.setattr(services, "load_subject", lambda _: huge)
    monkeypatch.setattr(measuring, "_work", lambda *_: MEASURING)
    answer(monkeypatch, FakeJobs({**tables(400, 200), "block": sensitivity_table(50, 200, by="block")}))
    app = explorer("sensitivity", run=str(huge.path))
    assert not app.exception
    assert app.query_params["by"] == "block"
    assert "Each column is the mean of up to 2 neighbouring steps" in texts(app)
    app = explorer("sensitivity", run=str(huge.path), by="tensor")
    assert not app.exception
    assert len(app.dataframe[0].value) == 1 + 400
