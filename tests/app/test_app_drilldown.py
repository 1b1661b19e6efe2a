"""Inside one tensor: figures, services, and the page in every state."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from inshrink_app import services
from inshrink_app.pages.run import heatmap, tensor
from inshrink_app.widgets import modules

import inshrink_core
from inshrink_core.analysis import moved_between
from inshrink_core.cli import main
from inshrink_core.sensitivity import STATISTICS, Grouping
from tests.app.builders import (
    MEASURING,
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


@pytest.fixture
def run(root, jobs) -> Path:
    """Return a run whose metrics are measured at once."""
    made = sensitivity_table(3, 3)
    rows = tuple(row._replace(name=name) for row, name in zip(made.rows, NAMES, strict=True))
    jobs.answers["sensitivity"] = dataclasses.replace(made, rows=rows)
    return write_run(root / "run")


# Services


def test_a_run_with_an_archive_is_shown_as_archived_first(root):
    path = write_run(root / "run")
    inshrink_core.compress(path, root / "run.inshrink", codec="uniform", config={"bits": 2})
    shown = services.load_subject(str(path))
    assert services.stored_ways(shown, 20)[0] == "archive"
    seen = services.drill_down(shown, 20, "fc1.weight", "archive", None)
    assert (seen.codec, seen.estimated, seen.restored) == ("uniform", False, False)
    assert services.archived_bits(shown, shown.archive).values["mean"].min() > 0
    archive = services.load_subject(str(root / "run.inshrink"))
    assert services.stored_ways(archive, 20) == ("archive",)
    assert not services.drill_down(archive, 20, "fc1.weight", "archive", None).restored


def test_movement_is_that_since_the_previous_checkpoint_and_equal_bins_count_all_values_of_a_step(root):
    shown = services.load_subject(str(write_run(root / "run")))
    run = inshrink_core.open(root / "run")
    moved = [moved_between(run[first], run[second]) for first, second in pairwise(run.steps)]
    found = [services.moved_since(shown, "fc1.weight", step) for step in shown.steps]
    assert found[0] is None
    assert found[1:] == pytest.approx([item.tensors["fc1.weight"][1].relative for item in moved])
    steps, edges, shares = services.values_over_time(shown, "fc1.weight")
    assert (steps, edges.size - 1) == ((10, 20, 30), shares.shape[0])
    assert shares.sum(axis=0) == pytest.approx([1, 1, 1])


def test_neighbours_can_be_laid_over_a_run_and_files_outside_of_the_roots_cannot(root):
    first, second = write_run(root / "a"), write_run(root / "b")
    write_run(root.parent / "elsewhere")
    found = services.other_runs(services.load_subject(str(first)))
    assert second in found
    assert first not in found
    assert root.parent / "elsewhere" not in found


def test_modules_have_the_numbers_of_the_command_line(root, capsys):
    run = write_run(root / "run")
    work = services.sensitivity_work(services.load_subject(str(run)), "magnitude")
    table = wait(services.start_job(work)).result
    names, layers = ([getattr(row, by) for row in table.rows] for by in ("name", "layer_type"))
    for by in Grouping:
        assert main(["sensitivity", str(run), "--by", by, "--json"]) == 0
        printed = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        nodes = modules.rows_at(names, layers, by)
        found = heatmap.aggregate(table, nodes, {"mean", *STATISTICS}).values
        for place, node in enumerate(nodes):
            wanted = printed.get(node.name) or printed[node.name.rpartition(".")[0]]
            for statistic in STATISTICS if len(node.members) == 1 else ["mean"]:
                np.testing.assert_allclose(found[statistic][place], wanted[statistic], rtol=1e-5)
    whole = heatmap.aggregate(table, [modules.Node("", (0, 1, 2))], {"p50"}).values["p50"]
    assert np.isnan(whole).all(), "it is not measured"


# Figures


def test_levels_are_drawn_as_lines_unless_they_are_too_fine(root):
    shown = services.load_subject(str(write_run(root / "run")))
    seen = services.drill_down(shown, 20, "fc1.weight", "uniform", None)
    coded = dataclasses.replace(seen, points=np.array([-100.0, -0.5, 0.5]), level_kind="codebook")
    assert tensor.level_lines(coded).tolist() == [-0.5, 0.5]
    figure = tensor.histogram_figure(coded)
    assert figure.data[-1].name == "2 levels"
    assert sum(trace.y.sum() for trace in figure.data[:-1]) == 12
    fine = dataclasses.replace(seen, points=np.empty(0), level_kind="lattice", step_size=1e-9)
    assert tensor.level_lines(fine).size == 0
    lines = tensor.level_lines(dataclasses.replace(fine, step_size=0.5))
    np.testing.assert_allclose(lines / 0.5, np.round(lines / 0.5))


# The page


def test_a_link_to_a_cell_shows_its_inside_and_marks_its_row_which_is_pinned_and_closed(run):
    app = explorer("run", run=str(run), layer="fc1.weight", step="20", ticked='["fc2.weight"]')
    assert charts(app) == 3  # the map, its line, and the values over time
    assert "bits per weight" in texts(app)
    assert "of the weights and carries" in texts(app)
    assert "rounding error" in texts(app)
    assert app.query_params["layer"] == "fc1.weight"
    app.session_state["panel.view"] = "time"
    assert charts(app.run()) == 3
    button(app, "Pin").click().run()
    assert json.loads(app.query_params["ticked"]) == ["fc2.weight", "fc1.weight"]
    button(app, "Unpin").click().run()
    assert json.loads(app.query_params["ticked"]) == ["fc2.weight"]
    button(app, "Close").click().run()
    assert "layer" not in app.query_params


@pytest.mark.parametrize(
    ("ticked", "step"),
    [("[", "x"), ('{"a": 1}', "-5"), ("7", "21"), ('[1, null, "nope"]', "9" * 18), ("[" * 9999, "")],
)
def test_ticks_and_steps_of_a_link_are_not_trusted(run, ticked, step):
    app = explorer("run", run=str(run), layer="fc1.weight", ticked=ticked, step=step)
    assert charts(app) == 2, "the map and the tensor, without a line"
    assert int(app.query_params["step"]) in (10, 20, 30)


def test_a_link_to_a_layer_of_another_run_says_so(run):
    app = explorer("run", run=str(run), layer="<b>h.7</b>", step="20")
    assert "This run has no layer" in texts(app)
    assert "layer" not in app.query_params


def test_a_layer_type_lists_its_tensors_with_the_largest_first(run):
    app = explorer("run", run=str(run), by="layer_type", layer="linear", step="20")
    assert "the largest share of the total first" in texts(app)
    found = next(b for b in app.button if b.key == "group.fc1.weight")
    found.click().run()
    assert app.query_params["layer"] == "fc1.weight"


def test_a_tensor_that_costs_much_is_looked_into_when_asked(run, monkeypatch):
    monkeypatch.setattr(services, "drill_cost", lambda *_: 7_000_000_000)
    app = explorer("run", run=str(run), layer="fc1.weight", step="20")
    assert charts(app) == 1
    button(app, "Look inside (reads up to 7.00\xa0GB)").click().run()
    assert charts(app) == 2


def test_two_steps_are_compared_with_the_largest_change_first(run):
    app = explorer("run", run=str(run), drawer="compare", a="10", b="20")
    assert charts(app) == 2
    table = app.dataframe[0].value
    change = np.abs(np.log2(table["times"].dropna()))
    assert list(change) == sorted(change, reverse=True)
    assert table["moved"].notna().all()
    assert (app.query_params["drawer"], app.query_params["a"]) == ("compare", "10")
    app.selectbox(key="steps.b").set_value("10").run()
    assert "Choose two different steps" in texts(app)


def test_two_runs_are_laid_over_each_other(run, monkeypatch):
    other = write_run(run.parent / "other")
    app = explorer("run", run=str(run), drawer="compare", compared="runs", other=str(other))
    assert charts(app) == 3
    assert app.query_params["other"] == str(other)
    assert (app.dataframe[0].value["times"].dropna() == 1).all()
    monkeypatch.setattr(services, "other_runs", lambda _: ())
    app = explorer("run", run=str(run), drawer="compare", compared="runs")
    assert "There is no second run" in texts(app)


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


def test_a_huge_model_is_shown_by_module_and_opened_step_by_step(root, jobs, monkeypatch):
    names = [f"h.{i}.{part}" for i in range(400) for part in ("attn.weight", "mlp.weight")]
    made = sensitivity_table(800, 200)
    rows = tuple(row._replace(name=name) for row, name in zip(made.rows, names, strict=True))
    jobs.answers["sensitivity"] = dataclasses.replace(made, rows=rows)
    monkeypatch.setattr(services, "sensitivity_work", lambda *_: MEASURING)
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


def test_codecs_are_tried_on_the_sample(caplog):
    with caplog.at_level("INFO"):
        services.load_ahead()
    assert not caplog.records
