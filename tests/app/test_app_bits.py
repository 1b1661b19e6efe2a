"""The drawer Bits: the table of layers, locks, undo, the search and its curve, and settings as text."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from inshrink_app import services
from inshrink_app.model import METRICS
from inshrink_app.model import config as search_config
from inshrink_app.model.subject import Subject
from inshrink_app.pages.run import bits, board
from inshrink_app.pages.run.curve import allocation_figure, clicked_point
from inshrink_app.services import Bound, SearchPoint
from inshrink_app.widgets.figures import TOOLBAR
from streamlit.testing.v1 import AppTest

from inshrink_core.chain.defaults import make_configs
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.cli import main
from inshrink_core.search.rates import Rates, rates_of
from inshrink_core.verbs.search import Search
from inshrink_core.verbs.shared.values import given_settings, read_config_file
from tests.app.builders import (
    EVALUATOR,
    button,
    charts,
    explorer,
    judged,
    snippets,
    subject,
    texts,
    trusted,
    write_run,
)
from tests.app.job_stubs import STEPS, option, performed
from tests.app.search_builders import config, document, point, put, trial

RUN = subject()
HOSTILE = "<b>\u202ex*[0].weight"
OVERRIDE = {"match": 'a"]\n[x]\u007f\\*.é', "layer_type": "linear", "coarseness": 1.5}


def level(value: float, sizes: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Return what ``inshrink estimate --each --by-tensor`` tells of a level, as far as the page asks."""
    tensors = [
        {
            "key": key,
            "layer_type": "vector" if key.endswith("bias") else "linear",
            "n_values": size,
            "bits_per_weight": 5 - math.log2(value),
            "sensitivity": 1e-6 * (1 + place),
            "damage": 1e-6 * (1 + place) * size * value**2,
        }
        for place, (key, size) in enumerate(sizes.items())
    ]
    return {
        "set": config(value),
        "codec": "lattice",
        "tensors": tensors,
        "ratio_weights": 32 / (5.1 - math.log2(value)),
        "ratio_total": 16 / (5.1 - math.log2(value)),
        "drop": 0.001 * value**2,
        "divergence": 4e-4 * value**2,
        "n_steps": 4,
        "n_trials": 0,
        **changes,
    }


def rates_for(*names: str, **changes: Any) -> Rates:
    """Return the rates of layers of a hundred values."""
    sizes = dict.fromkeys(names, 100)
    shapes = [(100,) if name.endswith("bias") else (10, 10) for name in names]
    specs = [
        TensorSpec(name=name, role=TensorRole.WEIGHT, dtype="float32", shape=shape)
        for name, shape in zip(names, shapes, strict=True)
    ]
    return rates_of([level(2.0**i, sizes, **changes) for i in range(-1, 4)], "coarseness", specs)


SIZES = {"fc1.weight": 64 * 48, "fc1.bias": 64}


@pytest.fixture
def app(archived, jobs, asked_for) -> AppTest:
    """Return the place with the layers estimated."""
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    return explorer("run", run=str(archived))


def table(app: AppTest) -> Any:
    """Return the lines of tensors, without those of the modules above them."""
    found = next(one.value for one in app.dataframe if "Bits per weight" in one.value.columns)
    return found[~found["Layer"].str.contains("▼")].reset_index(drop=True)


def edited(run: Path) -> dict[str, Any]:
    """Return the configuration that is kept for a run."""
    return dict(services.chosen(services.load_subject(str(run))).config)


def pick(app: AppTest, run: Path, name: str) -> None:
    """Tick a row, as its box does."""
    app.session_state["run.ticked"] = (str(run), [name])
    app.run()


def test_every_layer_has_its_bits_and_what_it_carries_and_the_strip_shows_each_change(app):
    found = table(app)
    assert list(found["Layer"].str.strip()) == ["weight", "bias"]
    assert found["Bits per weight"].between(3, 7).all()
    for share in ("Share of bytes", "Share of damage"):
        assert found[share].sum() == pytest.approx(100)
    assert "a rule of thumb; a measurement calibrates it" in texts(app)
    assert charts(app) >= 1
    app.select_slider(key="bits.handle.0").set_value(4.0).run()
    app.select_slider(key="bits.handle.0").set_value(8.0).run()
    changed = [line for line in texts(app).splitlines() if "(" in line]
    for label in ("Archive", "Ratio", "Bits", "Drop"):
        assert any(label in line for line in changed), label
    # A pattern narrows the rows, and their shares stay those of all.
    app.text_input(key="row_filter").set_value("*.bias").run()
    found = table(app)
    assert list(found["Layer"]) == ["fc1.bias"]
    assert found["Share of bytes"][0] < 10
    app.text_input(key="row_filter").set_value("nope").run()
    assert "No row matches" in texts(app)


def test_more_bits_for_one_layer_is_an_override_of_it_and_can_be_undone(app, archived):
    before = table(app)["Bits per weight"].tolist()
    pick(app, archived, "fc1.weight")
    button(app, "More bits").click().run()
    after = table(app)["Bits per weight"].tolist()
    assert after[0] == pytest.approx(before[0] + 1)
    assert after[1] == before[1]
    now = edited(archived)
    base = now["settings"]["coarseness"]
    (one,) = now["override"]
    assert {one.get("match"), one.get("layer_type")} & {"fc1.weight", "fc1.bias", "linear", "vector"}
    assert one["coarseness"] in (base / 2, base * 2)
    # Another tab shows the same, with the way back.
    other = explorer("run", run=str(archived))
    assert table(other)["Bits per weight"].tolist() == after
    other.button(key="strip.undo").click().run()
    assert table(app.run())["Bits per weight"].tolist() == before
    assert "Undo" not in [button.label for button in app.button], "nothing is left to undo"


def test_a_locked_layer_keeps_its_bits_when_all_are_moved(app, archived):
    shown = services.load_subject(str(archived))
    services.choose(shown, bound=Bound("drop", 0.01))
    pick(app, archived, "fc1.bias")
    button(app, "Lock or unlock").click().run()
    before = table(app)
    assert before["Lock"].tolist() == ["Lock", "Locked"]
    app.select_slider(key="bits.handle.0").set_value(16.0).run()
    after = table(app)["Bits per weight"].tolist()
    assert after[0] < before["Bits per weight"][0] - 1
    assert after[1] == before["Bits per weight"][1]
    assert "beyond the bound" in texts(app)
    # The slider ended elsewhere than it was moved to; a new one ignores what the browser still sends of it.
    assert app.select_slider(key="bits.handle.1").value < 16
    button(app, "Best bits for this size").click().run()
    assert table(app)["Bits per weight"][1] == before["Bits per weight"][1]
    app.button(key="strip.automatic").click().run()
    assert edited(archived) == {}


@pytest.mark.usefixtures("asked_for")
def test_a_search_leaves_bits_made_by_hand_and_its_result_is_one_step_that_undo_takes_back(archived, jobs):
    marker = archived.parent / "executed"
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n{EVALUATOR}"
    judged(archived, code)
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    app = explorer("run", run=str(archived))
    assert app.button(key="search.start").disabled
    trusted(archived, code)
    pick(app, archived, "fc1.weight")
    button(app, "More bits").click().run()
    by_hand = edited(archived)
    jobs.state = "running"
    app.button(key="search.start").click().run()
    search = next(job for job in reversed(jobs.kept) if job.verb == "search")
    words = search.requests[0].words()
    assert words[:2] == ["search", str(archived)]
    assert option(words, "--max-restore-cost") == "0.003"
    assert "--steps" not in words, "all of them"
    assert len(search.work.trusted) == 64
    assert search.job_id in app.query_params["job"]
    assert edited(archived) == by_hand
    search.state, search.result = "finished", document()
    app.run()
    assert edited(archived) == by_hand
    app.button(key="search.take").click().run()
    assert edited(archived) == config(2.0)
    app.button(key="strip.undo").click().run()
    assert edited(archived) == by_hand
    assert not marker.exists(), "the code of the run is executed by jobs alone"


def test_layers_have_the_same_shares_of_the_sensitivity_as_the_map(app, archived, jobs):
    empty = services.unmeasured(services.load_subject(str(archived)), "magnitude")
    values = dict.fromkeys(empty.values, np.arange(1.0, 1 + empty.values["mean"].size).reshape(2, -1))
    jobs.answers["sensitivity"] = replace(empty, values=values)
    shares = table(explorer("run", run=str(archived), metric="magnitude"))[METRICS["magnitude"].quantity]
    assert list(shares) == pytest.approx(100 * jobs.answers["sensitivity"].shares()[:, -1])


def test_a_search_is_told_from_its_first_trials_to_its_result(root, jobs):
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, "running")
    job.rows[:] = document()["trials"][:6]
    app = explorer("run", run=str(run))
    assert "Best so far 10.0×" in texts(app)
    assert "at most 7 evaluations left" in texts(app)
    button(app, "Cancel").click().run()
    assert job.state == "cancelled"
    assert "Cancelled. Finished work is kept" in texts(app)
    button(app, "Resume").click().run()
    assert job.state == "running"

    job.state, job.result = "finished", document()
    app.session_state["bits.all"] = True
    app.run()
    told = "".join([texts(app), *(found.proto.help for found in app.caption)]).replace("\u2060", "")
    assert "20.0× of the weights, drop 0.20 %" in told.replace("\\", "")
    assert "\\<b\\>note" in told
    assert "At 2 steps of 4 the weights hardly moved" in told
    listed = next(one.value for one in app.dataframe if "check" in one.value.columns)
    assert list(listed["check"]) == ["keeps the bounds", "best", "given up"]
    assert set(listed["figures"]) == {"measured"}
    assert "1 trial ended early" in told

    for keep, basis in (("resume", "measured"), ("weights", "estimated")):
        services.choose(services.load_subject(str(run)), keep=keep, config=config(2.0))
        assert f" {basis}]" in texts(app.run()), "trials use the optimizer state"

    # A repeated search that is interrupted leaves the result and adds its trials.
    later = put(jobs, run, "interrupted")
    later.rows[:] = [trial(step, 3.0) for step in STEPS]
    app.run()
    assert button(app, "Resume")
    assert "Search result: coarseness 2 · 20.0×" in texts(app).replace("\\", "").replace("\u2060", "")
    listed = next(one.value for one in app.dataframe if "figures" in one.value.columns)
    assert "coarseness 3" in list(listed["configuration"])

    put(jobs, run, result=document(best=None, trials=[trial(10, 9.0, divergence=0.5)]))
    assert "No configuration keeps the bound at every step" in texts(app.run())


def test_a_search_and_its_baselines_are_measured_and_what_they_leave_is_read(archived, tmp_path):
    judged(archived)
    asked = Search(str(archived), codec="uniform", budget=2, steps=(10, 20), trust_run=True)
    job = performed(asked)
    found = services.searched(services.load_subject(str(archived)), job)
    assert len(job.rows) == 2 * len(found.points) > 0
    # What was measured is kept beside the run, and is not measured again.
    assert performed(asked).result["evaluations"] == 0
    bench = ["bench", str(archived), "--codecs", "lossless,uniform:bits=8", "--steps", "10,20"]
    points = services.baselines(performed([*bench, "--trust-run", "-o", str(tmp_path / "bench")]))
    assert [one.name for one in points] == ["Lossless", "Uniform, 8 bit"]
    assert all(one.ratio > 0 and one.n_steps == 2 for one in points)


def test_the_file_of_a_configuration_is_read_back_here_and_by_the_command_line(tmp_path):
    wanted = config(2.5, override=[{"layer_type": "vector", "coarseness": 1}, OVERRIDE])
    wanted["settings"] |= {"shaping": "auto", "exact": False}
    path = tmp_path / "config.json"
    path.write_text(search_config.config_text(wanted))
    told = read_config_file(path)
    assert told == wanted == search_config.loaded(path.read_text())
    assert search_config.loaded(json.dumps({"best": {"config": wanted}, "trials": []})) == wanted
    assert given_settings(told, []) == search_config.engine_settings(wanted)
    assert len(make_configs("lattice", given_settings(told, []))[1]) == 2
    assert search_config.loaded("codec = 'qd'\n[[override]]\nbits = 4")["override"] == [{"bits": 4}]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[" * 9999, "codec = 3", "codec = 'x'\nsettings = 1", "codec = 'x'\noverride = 1"),
        *("codec = 'x'\noverride = [1]", "codec = 'x'\nevil = 1", '{"codec": "x", "evil": 1}'),
    ],
)
def test_a_text_that_is_no_configuration_is_refused(text):
    with pytest.raises(ValueError, match="no configuration"):
        search_config.loaded(text)


def test_settings_as_text_are_taken_in_and_those_for_another_model_are_not(archived, jobs):
    app = explorer("run", run=str(archived))
    app.session_state["bits.settings"] = True
    app.run()
    for more in (
        {},
        {"settings": {"rough": 1}},
        {"override": [{"match": "fc1.*", "coarseness": 1}, {"match": "gone.*", "coarseness": 1}]},
        {"override": [{"layer_type": "embedding", "coarseness": 1}]},
    ):
        app.text_area[0].set_value(search_config.config_text(config(7.0) | more)).run()
        button(app, "Use these settings").click().run()
        assert edited(archived) == config(7.0)


def test_the_commands_and_the_lines_of_the_place_do_what_they_say(archived, jobs, monkeypatch, capsys):
    judged(archived)
    services.change_bits(services.load_subject(str(archived)), {"codec": "uniform", "settings": {"bits": 8}})
    services.choose(services.load_subject(str(archived)), bound=Bound("drop", 0.01))
    monkeypatch.chdir(archived.parent)
    commands, python = snippets(explorer("run", run=str(archived), drawer="code"))
    assert [words[0] for words in commands] == [
        "inspect",
        "sensitivity",
        "compress",
        "verify",
        "search",
        "estimate",
    ]
    assert option(commands[2], "--set") == "bits=8"
    assert not [word for word in commands[2] if word.startswith("--max-")], "bits by hand are written as such"
    for words in commands:
        assert main(words) == 0, words
    assert "'codec': 'uniform'" in python or "codec='uniform'" in python


def test_an_allocation_is_read_from_a_configuration_and_written_into_it():
    shown = subject(3)
    keys = [row.key for row in shown.tensors]
    start = config(2.0, override=[{"match": "layers.1.*", "coarseness": 4.0, "gamma": 1.0}])
    assert [board.numbers_of(shown, start)[key] for key in keys] == [2.0, 4.0, 2.0]
    changed = board.with_allocation(shown, start, keys, [1.0, 4.0, 2.0])
    assert [board.numbers_of(shown, changed)[key] for key in keys] == [1.0, 4.0, 2.0]
    assert changed["override"][0] == {"match": "layers.1.*", "gamma": 1.0}


@pytest.mark.usefixtures("asked_for")
def test_the_mark_of_a_bounded_archive_has_size_and_cost_of_the_same_archive(archived, jobs, monkeypatch):
    trusted(archived)
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    tried = {"tried": [20], "nbytes": 1000, "bits_per_weight": 2.0, "basis": "measured", "divergence": 0.001}
    row = {
        "set": {"codec": "lattice", "optimizer": "compressed", "settings": {}},
        "archive": tried,
        "ratio_weights": 16.0,
    }
    jobs.answers["estimate"] = {**row, "device": "cpu", "each": []}
    drawn = []
    monkeypatch.setattr(bits, "allocation_figure", lambda *of, **more: drawn.append(more) or go.Figure())
    explorer("run", run=str(archived))
    assert drawn[-1]["here"] == (32 / 2.0, 0.001)


def drawn_at(rates: Rates, *values: float, **changes: Any) -> Any:
    """Return the picture with an allocation in it."""
    figure, told = changes.pop("figure", "divergence"), rates.predict(values)
    here = (told.ratio_weights, getattr(told, figure))
    return allocation_figure(changes.pop("points", ()), figure, 1e9, here=here, **{"limit": 0.003, **changes})


def test_all_that_was_measured_of_these_steps_is_in_one_picture_and_nothing_of_others():
    points = [
        point(10.0, 0.02, divergence=0.004, label=HOSTILE),
        point(11.0, 0.02, divergence=0.005, n_steps=2, is_complete=False),
        point(12.0, 0.02, divergence=0.006, keeps=False),
        point(13.0, 0.02, divergence=0.007, kind="codec", name="QD"),
        point(14.0, 0.02, divergence=0.008, kind="archive", name="run.inshrink", n_steps=2),
        point(15.0, 0.02, divergence=0.009, kind="archive", name="old.inshrink", is_complete=False),
        point(16.0, 0.0, divergence=0.0, config=config(2.0), kind="estimate"),
    ]
    drawn = drawn_at(rates_for("a", "b"), 2.0, 2.0, points=points)
    assert "<b>" not in str([trace.customdata for trace in drawn.data])
    assert drawn.data[-1].name == "These bits"
    assert "beyond" in drawn_at(rates_for("a", "b"), 8.0, 8.0).data[-1].name
    told = {trace.name: list(trace.y) for trace in drawn.data[1:-1]}
    assert told == {
        "Archives, measured": [0.008],
        "Measured": [0.004],
        "Measured, breaks the bound": [0.006],
        "Published codecs, measured": [0.007],
    }
    assert drawn.layout.margin.t >= 3 * 20 + TOOLBAR, "six names take three lines below the buttons"
    places = [row[0] for trace in drawn.data[:-1] for row in trace.customdata]
    assert sorted(places) == [0, 2, 3, 4, 6], "a click loads a point"


@pytest.mark.parametrize("wild", [None, math.nan, math.inf, 0.0, -1.0, 1e30])
def test_any_quality_can_be_drawn(wild):
    rates = rates_for("a", "b", divergence=wild)
    points = [SearchPoint("x", {}, 0.0, wild, wild, 1, True, True), point(1e30, wild, divergence=wild)]
    drawn = drawn_at(rates, 1.0, 1e-3, points=points)
    assert all(math.isfinite(end) for end in drawn.layout.yaxis.range)
    drawn.to_json()


def rated(run: Path) -> tuple[Subject, Rates]:
    """Return a run and the rates of its layers."""
    shown = services.load_subject(str(run))
    return shown, rates_of([level(2.0**i, SIZES) for i in range(-1, 4)], "coarseness", shown.model_tensors)


def test_what_was_measured_calibrates_what_is_edited_next(archived):
    shown, rates = rated(archived)
    told = rates.predict([2.0] * len(rates.keys))
    seen = point(9.0, None, config=config(2.0), divergence=3 * (told.divergence or 0))
    passed_over = [seen._replace(is_complete=False)]
    passed_over += [seen._replace(config={"codec": "qd", "settings": {}})]
    passed_over += [seen._replace(config={"codec": "lattice", "settings": {"bogus": 1}})]
    found = board.calibrated(shown, rates, [seen, *passed_over])
    assert found.n_measured == 1
    assert found.predict([4.0] * len(rates.keys)).divergence == pytest.approx(3 * 4e-4 * 16)
    drawn = drawn_at(found, *([2.0] * len(rates.keys)), points=[seen])
    assert drawn.data[-1].y[0] == pytest.approx(seen.divergence)


def test_a_setting_that_the_codecs_number_is_not_has_no_figures_of_the_curve(archived):
    shown, rates = rated(archived)
    plain = board.predicted(shown, rates, config(2.0, override=[{"match": "fc1.*", "coarseness": 2.0}]))
    assert plain.drop == rates.predict([2.0] * len(rates.keys)).drop
    usual = services.codec_settings("lattice")
    same = {"codec": "lattice", "settings": {**usual, "coarseness": 2.0}}
    assert board.predicted(shown, rates, same) is not None
    other = {"codec": "lattice", "settings": {"coarseness": 2.0, "gamma": 0.5}}
    assert board.predicted(shown, rates, other) is None
    assert board.predicted(shown, rates, {"codec": "qd", "settings": {}}) is None
    assert board.predicted(shown, None, config(2.0)) is None


def test_trials_of_a_configuration_become_one_point_and_the_last_word_counts(jobs):
    rows = [*document()["trials"], trial(10, 1.0, drop=0.009)]
    # A failure or a missing figure keeps no bound.
    rows += [trial(10, 5.0, failure="NaN", drop=None, divergence=None), trial(10, 6.0, divergence=None)]
    found = services.searched(RUN, put(jobs, RUN.path, result=document(trials=rows)))
    assert [one.n_steps for one in found.points] == [4, 4, 1, 1, 1]
    assert [one.is_complete for one in found.points] == [True, True, False, False, False]
    assert [one.keeps for one in found.points] == [True, True, False, False, False]
    assert found.points[0].drop == 0.009
    assert found.best is found.points[1]
    # A search of all steps that has just begun has no trial of the whole chain.
    job = put(jobs, RUN.path, "running", steps=False)
    job.rows = [trial(step, 1.0) for step in RUN.steps[:2]]
    found = services.searched(RUN, job)
    assert [(one.n_steps, one.is_complete) for one in found.points] == [(2, False)]
    assert found.best is None


@pytest.mark.parametrize(
    "points", [[], [{}], [{"customdata": [7]}], [{"customdata": ["x"]}], [{"customdata": [math.nan]}], ["x"]]
)
def test_a_click_that_makes_no_sense_picks_nothing(points):
    assert clicked_point(points, 3) is None


def test_estimates_go_from_fine_to_coarse(archived):
    shown = services.load_subject(str(archived))
    asked = services.estimating_work(shown, (10, 20), "uniform")
    job = performed(*asked.requests)
    points = services.estimates(job)
    assert points[0].config == {"codec": "uniform", "settings": {"bits": 8}}
    assert all(one.kind == "estimate" and one.is_complete for one in points)
    assert [one.ratio for one in points] == sorted(one.ratio for one in points)
    assert len(points) == 7
    job.state, job.rows = "running", job.rows[:3]
    assert services.estimates(job) == points[:3]


def test_estimates_that_the_engine_knew_already_are_read_from_the_result():
    first, *others = (level(2.0**i, SIZES) for i in range(-1, 4))
    job: Any = SimpleNamespace(state="finished", partial_rows=list, result={**first, "each": others})
    assert services.estimate_rows(job) == [{**first, "each": others}, *others]
