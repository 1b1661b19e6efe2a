"""The place Run: measuring, what the map shows, its choices in the link, and what a link alone starts."""

import dataclasses

import numpy as np
import pytest
import torch
from inshrink_app import services
from inshrink_app.pages.run import view
from inshrink_app.services import measuring
from streamlit.testing.v1 import app_test

import inshrink_core
from tests.app.builders import (
    MEASURING,
    SAMPLE,
    button,
    charts,
    explorer,
    linked,
    sensitivity_table,
    session,
    subject,
    texts,
    write_run,
)
from tests.app.job_stubs import wait


def test_sensitivity_of_a_run_is_measured_in_its_own_process_and_drawn(root):
    write_run(root / "run")
    app = explorer("run", run=str(root / "run"), metric="magnitude")
    shown = services.load_subject(str(root / "run"))
    job = wait(services.job_of(services.sensitivity_work(shown, "magnitude")))
    app.run()
    assert job.problem is None
    assert charts(app) == 1
    app.session_state["run.drawer"] = "table"
    app.run()
    lines = [label.lstrip() for label in app.dataframe[0].value["Layer"]]
    assert lines == ["▼ fc1", "weight", "bias", "fc2.weight"]
    table = job.result
    first = torch.load(root / "run" / "step_000010.pt", weights_only=True)["model"]["fc1.weight"]
    assert table.values["mean"][0, 0] == pytest.approx(first.abs().mean().item(), rel=1e-2)


def test_a_run_of_one_checkpoint_offers_no_metric_that_needs_two_or_an_optimizer(root, jobs):
    run = str(write_run(root / "one", (5,)))
    jobs.answers["sensitivity"] = sensitivity_table(3, 1)
    app = explorer("run", run=run, drawer="compare")
    assert app.selectbox(key="map.metric").options == ["Magnitude"]
    assert "There is one checkpoint" in texts(app)


CHOICES = {"metric": "magnitude", "by": "block", "stat": "p99", "sort": "share"}


def test_the_link_holds_the_choices_of_the_map_and_unknown_ones_are_the_defaults(run):
    app = explorer("run", run=str(run), **CHOICES)
    assert CHOICES.items() <= dict(app.query_params).items()
    app = explorer("run", run=str(run), **dict.fromkeys(CHOICES, "<script>"))
    assert app.query_params["metric"] == "update"
    assert charts(app) == 1


def test_a_cheap_measurement_that_an_ended_explorer_left_goes_on_by_itself(run, jobs):
    work = services.sensitivity_work(services.load_subject(str(run)), "update")
    job = jobs.put(work=work, state="interrupted")
    explorer("run", run=str(run))
    assert jobs.kept[-1].state == "running"
    assert {one.work.key for one in jobs.kept} == {job.work.key}


def test_a_link_starts_no_measurement_until_its_reader_asks(run, jobs, monkeypatch):
    monkeypatch.setattr(services, "warm_up", refuse)
    monkeypatch.setattr(services, "drill_down", refuse)
    link = {"run": str(run), "metric": "magnitude", "layer": "layers.0.weight", "step": "20"}
    app = linked("run", **link)
    assert charts(app) == 1, "the map, from headers"
    assert any(one.label.startswith("Measure") for one in app.button)
    assert "link alone starts nothing" in texts(app)
    app.run()
    assert jobs.started == []
    work = services.sensitivity_work(services.load_subject(str(run)), "magnitude")
    job = jobs.put(work=work, state="interrupted")
    app.run()
    assert jobs.started == []
    assert button(app, "Try again")
    # What was measured before is shown; the tensor that the link names is not looked into.
    job.state, job.result = "finished", sensitivity_table()
    app = linked("run", **link)
    assert any(found.label.startswith("Look inside") for found in app.button)
    monkeypatch.setattr(services, "moved_between", refuse)
    app = linked("run", run=str(run), metric="magnitude", drawer="compare")
    assert any(found.label.startswith("Measure movement") for found in app.button)


def refuse(*_: object) -> None:
    raise AssertionError("a link alone did this")


def test_a_large_run_is_measured_only_when_asked_and_says_what_it_costs(run, jobs, monkeypatch):
    monkeypatch.setattr(services, "measuring_cost", lambda *_: 3_210_000_000)
    app = explorer("run", run=str(run))
    assert "3.21 GB" in texts(app)
    assert jobs.started == []
    button(app, "Measure movement").click().run()
    assert [work.topic for work in jobs.started] == ["update"]
    assert charts(app) == 1


def test_of_a_large_run_the_last_step_is_measured_and_drawn_first(root, monkeypatch, jobs):
    run = write_run(root / "run")
    monkeypatch.setattr(measuring, "_LATEST_FIRST_BYTES", 0)
    shown = services.load_subject(str(run))
    work = services.sensitivity_work(shown, "magnitude")
    assert [one["fields"].get("steps") for one in work.documents] == [[30], None]
    job = jobs.put(work=work, state="running")
    assert services.measured_so_far(shown, job) is None
    job.documents = [work.requests[0].perform().to_json()]
    table = services.measured_so_far(shown, job)
    assert table.steps == (10, 20, 30)
    assert np.isnan(table.values["mean"][:, :2]).all()
    assert np.isfinite(table.values["mean"][:, 2]).all()


def test_update_over_weight_is_movement_relative_to_size():
    moved = sensitivity_table(metric="update")
    sizes = dataclasses.replace(moved, metric="magnitude")
    found = services.relative_updates(moved, sizes)
    assert found.metric == "ratio"
    np.testing.assert_allclose(found.values["mean"][:-1], 1, rtol=1e-6)
    assert np.isnan(found.values["mean"][-1, 0])


def test_bits_of_every_step_are_those_of_the_archive(archived):
    shown = services.load_subject(str(archived))
    table = services.archived_bits(shown, shown.archive)
    archive = shown.archive.path
    course = [inshrink_core.analysis.anatomy(archive, step, "fc1.weight") for step in table.steps]
    bits = [seen.bits_per_weight for seen in course]
    np.testing.assert_allclose(table.values["mean"][0], bits, rtol=1e-6)


@pytest.mark.parametrize("colour", ["ratio", "bits", "error"])
def test_every_colour_has_its_map(run, colour):
    app = explorer("run", run=str(run), colour=colour)
    assert charts(app) == 1
    assert app.query_params["colour"] == colour


def test_a_run_with_an_unreadable_checkpoint_says_which(root, jobs):
    write_run(root / "run")
    (root / "run" / "step_000040.pt").write_bytes(b"PK\x03\x04 cut off")
    for _ in range(2):  # The second time from the headers that were kept.
        app = explorer("run", run=str(root / "run"))
        assert "1 checkpoint cannot be read" in app.error[0].value
        assert "000040" in app.error[0].value


def test_opening_reads_headers_only(root):
    found = services.opened(str(SAMPLE))
    assert found.engine.bytes_read < 0.2 * found.subject.total_bytes


def test_all_tensors_are_listed_from_headers_and_filtered(root, jobs, monkeypatch):
    huge = subject(400, 200)
    monkeypatch.setattr(services, "load_subject", lambda _: huge)
    monkeypatch.setattr(services, "sensitivity_work", lambda *_: MEASURING)
    monkeypatch.setattr(view.boards, "gather", lambda *_: None)
    app = explorer("run", run="/runs/huge", drawer="table", table="tensors")
    assert len(app.dataframe[0].value) == 400
    app.text_input(key="row_filter").set_value("39").run()
    assert len(app.dataframe[0].value) == 14


def test_former_addresses_lead_here_with_what_they_say(archived, jobs):
    for former in ("overview", "sensitivity", "allocate", "search"):
        app = session(run=str(archived), stat="p99")
        app._page_hash = app_test.calc_hash(former)
        app.run()
        assert app.query_params["stat"] == "p99", former
        assert charts(app) >= 1
    assert jobs.started == []
