"""Inside one tensor: figures, services, and the page in every state."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.model.sensitivity import Sensitivity
from inshrink_app.pages.run import ahead, heatmap, picture, rows, tensor_figures
from inshrink_app.pages.run.rows import Look
from inshrink_app.pages.run.selection import Selection
from inshrink_app.services import jobs as job_services
from inshrink_app.services import measuring
from inshrink_app.theme import MARK
from inshrink_app.widgets import modules

import inshrink_core
from inshrink_core.analysis.anatomy import Anatomy
from tests.app.builders import (
    MEASURING,
    FakeJobs,
    button,
    charts,
    explorer,
    sensitivity_table,
    subject,
    texts,
    write_run,
)
from tests.app.job_stubs import wait

NAMES = ("fc1.weight", "fc1.bias", "fc2.weight")


def tables(n_steps: int = 3, metric: str = "magnitude") -> dict[str, Sensitivity]:
    """Return the tables of the run that `write_run` writes."""
    made = {}
    for by in ("tensor", "block", "layer_type"):
        table = sensitivity_table(3, n_steps, by=by, metric=metric)
        names = [row.layer_type for row in table.rows] if by == "layer_type" else NAMES
        rows = tuple(row._replace(name=name) for row, name in zip(table.rows, names, strict=True))
        made[by] = dataclasses.replace(table, rows=rows)
    return made


@pytest.fixture
def run(root, monkeypatch) -> Path:
    """Return a run whose metrics are measured already."""
    jobs = FakeJobs(tables())
    monkeypatch.setattr(job_services, "registry", lambda: jobs)
    monkeypatch.setattr(ahead, "warm_up", lambda _: None)
    return write_run(root / "run")


# Services


def test_a_run_with_an_archive_is_shown_as_archived_first(root):
    path = write_run(root / "run")
    inshrink_core.compress(path, root / "run.inshrink", codec="uniform", config={"bits": 2})
    shown = services.load_subject(str(path))
    assert services.stored_ways(shown, 20)[0] == "archive"
    seen = services.drill_down(shown, 20, "fc1.weight", "archive", None)
    assert (seen.codec, seen.estimated, seen.restored) == ("uniform", False, False)
    assert services.course(shown, "fc1.weight").bits_per_weight.min() > 0
    archive = services.load_subject(str(root / "run.inshrink"))
    assert services.stored_ways(archive, 20) == ("archive",)
    assert not services.drill_down(archive, 20, "fc1.weight", "archive", None).restored


def test_a_course_of_a_large_tensor_reads_some_steps_evenly():
    large = subject(1, 100)
    tensor = dataclasses.replace(large.tensors[0], shape=(5_000_000,))
    large = dataclasses.replace(large, tensors=(tensor,))
    steps = services.course_steps(large, tensor.name, every=False)
    assert (len(steps), steps[0], steps[-1]) == (10, large.steps[0], large.steps[-1])
    assert services.course_steps(large, tensor.name, every=True) == large.steps
    assert services.drill_cost(large, tensor.name) == 6 * 20_000_000


def test_neighbours_can_be_laid_over_a_run_and_files_outside_of_the_roots_cannot(root):
    first, second = write_run(root / "a"), write_run(root / "b")
    write_run(root.parent / "elsewhere")
    found = services.other_runs(services.load_subject(str(first)))
    assert second in found
    assert first not in found
    assert root.parent / "elsewhere" not in found


def test_what_was_measured_is_kept_beside_the_document(root, jobs):
    services.start_sensitivity(str(write_run(root / "run")), "magnitude")
    registry = JobRegistry(job_services.start_process, root.parent / "jobs", load=measuring.load_tables)
    (request,) = jobs.started
    job = wait(registry.start(request))
    found = job.result["magnitude"]
    assert found["tensor"].steps == (10, 20, 30)
    assert [row.name for row in found["block"].rows] == ["fc1", "fc2"]

    # A second reading takes what was kept beside the document; damaged, it counts for nothing.
    kept = job.folder / "tables.npz"
    for spoil in (None, b"", b"PK", kept.read_bytes()[:-40]):
        if spoil is not None:
            kept.write_bytes(spoil)
        again = measuring.load_tables(job)
        for metric, grouped in job.result.items():
            for by, table in grouped.items():
                same = again[metric][by]
                assert (same.rows, same.steps, same.note) == (table.rows, table.steps, table.note)
                for name, values in table.values.items():
                    np.testing.assert_array_equal(same.values[name], values)


# Figures


def inside(root: Path, codec: str) -> Anatomy:
    """Look into a tensor of a small run."""
    shown = services.load_subject(str(write_run(root / "run")))
    return services.drill_down(shown, 20, "fc1.weight", codec, None)


def test_levels_are_drawn_as_lines_over_the_values(root):
    seen = dataclasses.replace(
        inside(root, "uniform"), points=np.array([-100.0, -0.5, 0.5]), level_kind="codebook"
    )
    assert tensor_figures.level_lines(seen).tolist() == [-0.5, 0.5]
    figure = tensor_figures.histogram_figure(seen, log=True)
    assert figure.data[-1].name == "2 levels"
    assert sum(trace.y.sum() for trace in figure.data[:-1]) == 12


def test_a_lattice_too_fine_to_see_is_not_drawn(root):
    seen = dataclasses.replace(
        inside(root, "lattice"), points=np.empty(0), level_kind="lattice", spacing=1e-9
    )
    assert tensor_figures.level_lines(seen).size == 0
    coarse = dataclasses.replace(seen, spacing=0.5)
    lines = tensor_figures.level_lines(coarse)
    np.testing.assert_allclose(lines / 0.5, np.round(lines / 0.5))


# The page


def test_a_link_to_a_cell_shows_its_inside_and_marks_its_row(run):
    app = explorer("run", run=str(run), layer="fc1.weight", step="20", ticked='["fc2.weight"]')
    assert charts(app) == 3  # the map, its line, and the values over time
    (marks,) = app.get("bidi_component")
    told = json.loads(marks.proto.json)
    assert (told["chart"], told["colour"], told["rows"]) == ("heatmap", MARK, [[1, 1]])
    assert (told["column"], told["ticked"]) == (1, [3])
    assert (told["n_rows"], told["edges"]) == (4, [5, 15, 25, 35])
    assert "bits per weight" in texts(app)
    assert "of the weights and carries" in texts(app)
    assert app.query_params["layer"] == "fc1.weight"


def test_every_figure_of_a_tensor_is_drawn_when_it_is_chosen(run):
    app = explorer("run", run=str(run), layer="fc1.weight", step="20")
    for view, n_charts in {"values": 2, "course": 2, "time": 2}.items():
        app.session_state["panel.view"] = view
        app.run()
        assert charts(app) == n_charts, view


def test_close_and_pin_move_the_selection_everywhere(run):
    app = explorer("run", run=str(run), layer="fc2.weight", step="30")
    button(app, "Pin").click().run()
    assert json.loads(app.query_params["ticked"]) == ["fc2.weight"]
    button(app, "Unpin").click().run()
    assert "ticked" not in app.query_params
    button(app, "Close").click().run()
    assert "layer" not in app.query_params


@pytest.mark.parametrize("said", ["[", '{"a": 1}', "7", '[1, null, "nope"]', "[" * 9999])
def test_what_a_link_ticks_is_not_trusted(run, said):
    assert charts(explorer("run", run=str(run), ticked=said)) == 1


def test_the_same_bins_count_the_values_of_every_step(run):
    steps, edges, shares = services.values_over_time(services.load_subject(str(run)), "fc1.weight")
    assert (steps, edges.size - 1) == ((10, 20, 30), shares.shape[0])
    assert shares.sum(axis=0) == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("step", ["x", "-5", "21", "999999999999999999"])
def test_a_step_of_a_link_becomes_one_that_is_there(run, step):
    app = explorer("run", run=str(run), layer="fc1.weight", step=step)
    assert int(app.query_params["step"]) in (10, 20, 30)


def test_a_link_to_a_layer_of_another_run_says_so(run):
    app = explorer("run", run=str(run), layer="<b>h.7</b>", step="20")
    assert "This run has no layer" in texts(app)
    assert "layer" not in app.query_params


def test_a_layer_type_lists_its_tensors_with_the_largest_first(run):
    app = explorer("run", run=str(run), by="layer_type", layer="linear", step="20")
    assert "the largest first" in texts(app)
    found = next(b for b in app.button if b.key == "group.fc1.weight")
    found.click().run()
    assert app.query_params["layer"] == "fc1.weight"


def test_a_tensor_that_costs_much_is_looked_into_when_asked(run, monkeypatch):
    monkeypatch.setattr(services, "drill_cost", lambda *_: 7_000_000_000)
    app = explorer("run", run=str(run), layer="fc1.weight", step="20")
    assert charts(app) == 1
    button(app, "Look inside (reads up to 7.00 GB)").click().run()
    assert charts(app) == 2


def test_another_steps_values_are_laid_over_the_histogram(run):
    app = explorer("run", run=str(run), layer="fc1.weight", step="20")
    app.session_state["panel.view"] = "values"
    app.run()
    assert "rounding error" in texts(app)
    app.selectbox(key="panel.over").set_value(30).run()
    shown = services.load_subject(str(run))
    seen = services.drill_down(shown, 20, "fc1.weight", "lattice", None)
    other = services.values_at(shown, 30, "fc1.weight")
    line = tensor_figures.histogram_figure(seen, log=False, other=(30, other)).data[-1]
    assert line.name == "step 30"
    widths = [float(one.edges[1] - one.edges[0]) for one in (seen.histogram, other)]
    assert line.y.sum() == pytest.approx(12 * widths[0] / widths[1], rel=1e-5)


def test_two_steps_are_compared_with_the_largest_change_first(run):
    app = explorer("run", run=str(run), drawer="compare", a="10", b="20")
    assert charts(app) == 2
    table = app.dataframe[0].value
    change = np.abs(np.log2(table["times"].dropna()))
    assert list(change) == sorted(change, reverse=True)
    assert table["moved"].notna().all()
    assert (app.query_params["drawer"], app.query_params["a"]) == ("compare", "10")
    button(app, "Swap").click().run()
    assert (app.query_params["a"], app.query_params["b"]) == ("20", "10")
    app.selectbox(key="steps.a").set_value("10").run()
    assert "Choose two different steps" in texts(app)


def test_one_checkpoint_has_no_two_steps(root, monkeypatch):
    jobs = FakeJobs(tables(1))
    monkeypatch.setattr(job_services, "registry", lambda: jobs)
    app = explorer("run", run=str(write_run(root / "one", (10,))), drawer="compare")
    assert "There is one checkpoint" in texts(app)


def test_two_runs_are_laid_over_each_other(run):
    other = write_run(run.parent / "other")
    app = explorer("run", run=str(run), drawer="compare", compared="runs", other=str(other))
    assert charts(app) == 3
    assert app.query_params["other"] == str(other)
    assert (app.dataframe[0].value["times"].dropna() == 1).all()


def test_a_damaged_second_run_is_laid_over_whatever_its_values(run, monkeypatch):
    mine, damaged = tables(metric="fisher"), tables(metric="fisher")
    mine["tensor"].values["mean"][:] = np.float32(1e-45)
    damaged["tensor"].values["mean"][:] = np.asarray([3.4e38, np.inf, np.nan], np.float32)
    other = write_run(run.parent / "other")
    found = {str(run): mine, str(other): damaged}
    jobs = {path: Job(MEASURING, state="finished", result=result) for path, result in found.items()}
    monkeypatch.setattr(services, "sensitivity_job", lambda path, _metric: jobs[path])
    app = explorer("run", run=str(run), drawer="compare", compared="runs", other=str(other), metric="fisher")
    assert not app.error
    assert charts(app) == 3


def test_a_second_run_stays_though_others_were_opened_since_and_is_told_from_one_of_like_name(
    run, monkeypatch
):
    long = "x" * 100
    first, second = (write_run(run.parent / long / name / long / "run") for name in ("a", "b"))
    monkeypatch.setattr(services, "other_runs", lambda _: (first, second))
    app = explorer("run", run=str(run), drawer="compare", compared="runs", other=str(first))
    picker = app.selectbox(key="runs.other")
    assert len(set(picker.options)) == 2
    assert picker.value == app.query_params["other"] == str(first)
    monkeypatch.setattr(services, "other_runs", lambda _: (second,))
    app.run()
    assert app.selectbox(key="runs.other").value == app.query_params["other"] == str(first)


def test_without_another_run_the_page_says_where_one_comes_from(run, monkeypatch):
    monkeypatch.setattr(services, "other_runs", lambda _: ())
    app = explorer("run", run=str(run), drawer="compare", compared="runs")
    assert "There is no second run" in texts(app)


def test_a_huge_model_is_shown_by_module_and_opened_step_by_step(root, monkeypatch):
    names = [f"h.{i}.{part}" for i in range(400) for part in ("attn.weight", "mlp.weight")]
    table = sensitivity_table(800, 200)
    rows = tuple(row._replace(name=name) for row, name in zip(table.rows, names, strict=True))
    made = {by: dataclasses.replace(table, by=by, rows=rows) for by in ("tensor", "block")}
    jobs = FakeJobs({**made, "layer_type": sensitivity_table(3, 200, by="layer_type")})
    monkeypatch.setattr(job_services, "registry", lambda: jobs)
    monkeypatch.setattr(measuring, "_work", lambda *_: MEASURING)
    monkeypatch.setattr(ahead, "warm_up", lambda _: None)
    huge = subject(400, 200)
    monkeypatch.setattr(services, "load_subject", lambda _: huge)
    app = explorer("run", run=str(huge.path), by="1", layer="h.7", step="1000", drawer="table")
    found = app.dataframe[0].value
    assert len(found) == 1 + 400
    button(app, "Open this module").click().run()
    found = app.dataframe[0].value
    assert [label.lstrip() for label in found["Layer"][8:11]] == ["▼ 7", "attn.weight", "mlp.weight"]
    assert found["Share of the total"][0] == pytest.approx(100)
    assert found["Size"][8] == pytest.approx(found["Size"][9:11].sum())
    button(app, "Close this module").click().run()
    assert len(app.dataframe[0].value) == 1 + 400
    app.select_slider(key="map.by").set_value("tensor").run()
    assert app.query_params["by"] == "tensor"
    assert len(app.dataframe[0].value) == 1 + 400 + 800 - 2, "what was closed by hand stays so"


@pytest.mark.parametrize(
    ("level", "marked"),
    [("tensor", (0, 1)), ("block", (0,)), ("layer_type", (0, 1))],
)
def test_a_module_is_marked_by_the_rows_that_it_holds_or_lies_in(level, marked):
    names = ["fc1.weight", "fc1.bias", "fc2.weight"]
    table = sensitivity_table(3, 4)
    tensors = dataclasses.replace(
        table, rows=tuple(row._replace(name=name) for row, name in zip(table.rows, names, strict=True))
    )
    nodes = modules.rows_at(names, [row.layer_type for row in tensors.rows], level)
    table = heatmap.aggregate(tensors, nodes)
    shares = np.zeros(len(nodes), np.float32)
    view = rows.View(subject(3), tensors, Look("sensitivity", "fisher", level), table, table, nodes, shares)
    assert picture._rows_of(view, Selection("fc1", 10)) == marked
    assert picture._rows_of(view, Selection("fc1.bias", 10))
    assert picture._rows_of(view, None) == ()


def test_codecs_are_tried_on_the_sample():
    ahead._try_codecs(str(inshrink_core.sample("digits-cnn")))
