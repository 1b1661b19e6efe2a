"""The drawer Bits: the table of layers, locks, undo, the search and its curve, and settings as text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.jobs.job import jobs_folder
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.model import config as search_config
from inshrink_app.model.problem import ServiceError
from inshrink_app.pages.run import board
from inshrink_app.pages.run.curve import Here, Marks, allocation_figure, clicked_point
from inshrink_app.services import Bound, Searched, SearchPoint
from inshrink_app.services import jobs as job_services
from streamlit.testing.v1 import AppTest

from inshrink_core.chain.defaults import make_configs
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.cli import main
from inshrink_core.search.rates import Rates, rates_of
from inshrink_core.verbs.search import Search
from inshrink_core.verbs.shared.values import given_settings, read_config_file
from tests.app.builders import SAMPLE, button, charts, explorer, judged, linked, subject, texts, write_run
from tests.app.job_stubs import STEPS, option, wait, work
from tests.app.search_builders import config, document, point, put, trial
from tests.app.test_app_compare import with_evaluator
from tests.app.test_app_snippets import snippets

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


def trusted(run: Path) -> None:
    """Give a run an evaluator that may run."""
    from inshrink_app.server.recent import trust

    with_evaluator(run)
    judge = services.named_evaluator(services.load_subject(str(run)))
    assert judge is not None
    trust(judge.path, judge.digest)


def pick(app: AppTest, run: Path, name: str) -> None:
    """Tick a row, as its box does."""
    app.session_state["run.ticked"] = (str(run), [name])
    app.run()


@pytest.mark.usefixtures("asked_for")
def test_layers_are_estimated_by_themselves_but_for_who_came_by_a_bare_link(archived, jobs):
    linked("run", run=str(archived))
    assert jobs.started == []
    explorer("run", run=str(archived))
    assert [work.topic for work in jobs.started] == ["update", "goals", "estimates"]
    assert [len(work.documents) for work in jobs.started] == [1, 1, 1], "one process each"
    assert jobs.last.count("--each") == 6
    assert not {"--evaluator", "--trust-run"} & set(jobs.last)


def test_every_layer_has_its_bits_and_what_it_carries(app):
    found = table(app)
    assert list(found["Layer"].str.strip()) == ["weight", "bias"]
    assert found["Bits per weight"].between(3, 7).all()
    for share in ("Movement", "Share of bytes", "Share of damage"):
        assert found[share].sum() == pytest.approx(100)
    assert "a rule of thumb until something is measured" in texts(app)
    assert charts(app) >= 1


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
    assert app.button(key="strip.undo").disabled


def test_a_locked_layer_keeps_its_bits_when_all_are_moved(app, archived):
    shown = services.load_subject(str(archived))
    services.choose(shown, bound=Bound("drop", 0.01))
    pick(app, archived, "fc1.bias")
    button(app, "Lock or unlock").click().run()
    before = table(app)
    assert before["Lock"].tolist() == ["Lock", "Locked"]
    app.select_slider(key="bits.handle").set_value(16.0).run()
    after = table(app)["Bits per weight"].tolist()
    assert after[0] < before["Bits per weight"][0] - 1
    assert after[1] == before["Bits per weight"][1]
    assert "beyond the bound" in texts(app)
    app.button(key="strip.automatic").click().run()
    assert edited(archived) == {}


def test_the_strip_shows_what_each_change_makes_of_every_figure(app, archived):
    app.select_slider(key="bits.handle").set_value(4.0).run()
    app.select_slider(key="bits.handle").set_value(8.0).run()
    told = texts(app)
    for label in ("Archive", "Ratio", "Bits", "Largest drop"):
        assert any(label in line and "(" in line for line in told.splitlines()), label


@pytest.mark.usefixtures("asked_for")
def test_a_search_leaves_bits_made_by_hand_and_its_result_is_one_step_that_undo_takes_back(archived, jobs):
    trusted(archived)
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    app = explorer("run", run=str(archived))
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


def test_the_best_bits_take_no_more_than_those_before(app):
    button(app, "Best bits for this size").click().run()
    assert table(app)["Bits per weight"].notna().all()


def test_a_pattern_narrows_the_rows_and_shares_stay_those_of_all(app):
    app.text_input(key="row_filter").set_value("*.bias").run()
    found = table(app)
    assert list(found["Layer"]) == ["fc1.bias"]
    assert found["Share of bytes"][0] < 10
    app.text_input(key="row_filter").set_value("nope").run()
    assert "No row matches" in texts(app)


def test_no_code_of_a_run_is_executed_before_it_is_trusted(root, jobs):
    run = write_run(root / "run")
    marker = with_evaluator(run)
    app = explorer("run", run=str(run))
    assert app.button(key="search.start").disabled
    assert not marker.exists()


def test_the_bundled_sample_needs_no_consent(root, jobs):
    app = explorer("run", run=str(SAMPLE), chain="range", codec="uniform")
    first, *_, last = services.load_subject(str(SAMPLE)).steps[-8:]
    app.select_slider(key="search.range").set_value((first, last))
    app.toggle(key="search.by_ratio").set_value(True).run()
    app.button(key="search.start").click().run()
    assert not jobs.started[-1].trusted
    assert (option(jobs.last, "--target-ratio"), option(jobs.last, "--codec")) == ("30.0", "uniform")
    assert not {"--max-drop", "--max-restore-cost", "--trust-run"} & set(jobs.last)
    assert len(str(option(jobs.last, "--steps")).split(",")) == 8


def test_trials_are_drawn_as_they_arrive_with_what_is_left_and_a_way_to_cancel(root, jobs):
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, "running")
    job.rows[:] = document()["trials"][:6]
    app = explorer("run", run=str(run))
    assert "Best so far 10.0×" in texts(app)
    assert "about 7 evaluations left" in texts(app)
    button(app, "Cancel").click().run()
    assert job.state == "cancelled"
    assert "Cancelled. Finished work stays" in texts(app)
    button(app, "Resume").click().run()
    assert job.state == "running"


def test_what_was_found_is_told_and_listed_and_a_row_loads_it(root, jobs):
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, result=document())
    app = explorer("run", run=str(run), job=job.job_id)
    assert "20.0× of the weights, drop 0.20 %" in texts(app).replace("\\", "").replace("\u2060", "")
    assert "\\<b\\>note" in texts(app)
    assert "At 2 steps of 4 the weights hardly moved" in texts(app).replace("\\", "")
    app.session_state["bits.all"] = True
    app.run()
    listed = next(one.value for one in app.dataframe if "verdict" in one.value.columns)
    assert list(listed["verdict"]) == ["keeps the bounds", "best", "given up"]
    assert set(listed["figures"]) == {"measured"}
    assert "1 trial ended early" in texts(app)


def test_a_search_that_found_nothing_says_what_to_do(root, jobs):
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=document(best=None, trials=[trial(10, 9.0, divergence=0.5)]))
    assert "No configuration keeps the bound at every step" in texts(explorer("run", run=str(run)))


def test_a_finished_search_stays_when_a_repeated_one_is_interrupted_and_gets_its_trials(root, jobs):
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=document())
    later = put(jobs, run, "interrupted")
    later.rows[:] = [trial(step, 3.0) for step in STEPS]
    app = explorer("run", run=str(run))
    assert button(app, "Resume")
    assert "Search result: coarseness 2 · 20.0×" in texts(app).replace("\\", "").replace("\u2060", "")
    app.session_state["bits.all"] = True
    app.run()
    listed = next(one.value for one in app.dataframe if "figures" in one.value.columns)
    assert "coarseness 3" in list(listed["configuration"])


def test_what_is_edited_is_measured_in_the_background_until_the_next_change(root, jobs):
    run = write_run(root / "run", STEPS)
    jobs.state = "running"
    trusted(run)
    app = explorer("run", run=str(run))
    app.toggle(key="search.measuring").set_value(True).run()
    (first,) = [job for job in jobs.kept if job.work.topic == "measured"]
    compress, compare = (one.words() for one in first.requests)
    assert compress[:2] == ["compress", str(run)]
    assert compare[:1] + compare[2:4] == ["compare", "--against", str(run)]
    assert option(compress, "--output") == compare[1]
    assert len(first.work.trusted) == 64
    services.change_bits(services.load_subject(str(run)), config(9.0))
    app.run()
    measured = [job for job in jobs.kept if job.work.topic == "measured"]
    assert [job.state for job in measured] == ["cancelled", "running"]
    assert "coarseness=9.0" in measured[1].requests[0].words()
    assert services.describe(first).page == "run"
    app.toggle(key="search.measuring").set_value(False).run()
    assert [job.state for job in measured] == ["cancelled", "cancelled"]


def test_a_configuration_that_was_measured_is_a_point_beside_those_of_the_search(archived, monkeypatch):
    judged(archived)
    registry = JobRegistry(job_services.start_process, jobs_folder())
    monkeypatch.setattr(job_services, "registry", lambda: registry)
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    assert judge is not None
    config = {"codec": "uniform", "settings": {"bits": 4}, "override": [{"match": "*.bias", "bits": 8}]}
    job = wait(services.start_measuring(services.measuring_work(shown, (10, 20), judge, config)))
    assert job.state == "finished", job.problem
    assert not Path(job.requests[0].archive).exists()
    (point,) = services.measured_configs(shown, (10, 20), judge, Searched(points=(), limits={"drop": 0.01}))
    assert (point.config, point.n_steps, point.drop, point.keeps) == (config, 2, 0.0, True)
    assert point.ratio > 4
    assert not services.measured_configs(shown, (10, 20, 30), judge, None)


def test_a_search_and_its_baselines_are_measured_and_what_they_leave_is_read(archived, tmp_path):
    judged(archived)
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    assert judge is not None
    asked = Search(str(archived), codec="uniform", budget=3, steps=(10, 20), **judge.fields)
    job = work(tmp_path / "a", asked, trusted=judge.trusted)
    assert len(job.rows) == 4
    assert len(services.searched(job, (10, 20)).points) == 2
    # What was measured is kept beside the run, and is not measured again.
    assert work(tmp_path / "b", asked, trusted=judge.trusted).result["evaluations"] == 0
    bench = ["bench", str(archived), "--codecs", "lossless,uniform:bits=8", "--steps", "10,20"]
    job = work(tmp_path / "c", [*bench, "--trust-run", "-o", str(tmp_path / "bench")], trusted=judge.trusted)
    found = services.baselines(job)
    assert [one.baseline for one in found] == ["Lossless", "Uniform, 8 bit"]
    assert all(one.ratio > 0 and one.n_steps == 2 for one in found)


def test_a_setting_that_no_codec_has_and_a_pattern_that_means_nothing_are_told(root):
    shown = services.load_subject(str(write_run(root / "run")))
    with pytest.raises(ServiceError, match="no setting"):
        services.check_config({"codec": "lattice", "settings": {"rough": 1}})
    services.check_config(config(2.0, override=[{"match": "fc1.*", "coarseness": 1}]))
    overrides = [{"match": "fc1.*", "coarseness": 1}, {"match": "gone.*", "coarseness": 1}]
    assert services.unmatched_overrides(shown, config(2.0, override=overrides)) == ("gone.*",)
    assert services.unmatched_overrides(shown, config(2.0, override=[{"layer_type": "embedding"}]))


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_file_of_a_configuration_is_what_the_command_line_reads(tmp_path, form):
    wanted = config(2.5, override=[{"layer_type": "vector", "coarseness": 1}, OVERRIDE])
    wanted["settings"] |= {"shaping": "auto", "exact": False}
    path = tmp_path / f"config.{form}"
    path.write_text(search_config.toml_text(wanted) if form == "toml" else json.dumps(wanted))
    told = read_config_file(path)
    assert told == wanted
    assert given_settings(told, []) == search_config.engine_settings(wanted)
    assert len(make_configs("lattice", given_settings(told, []))[1]) == 2


@pytest.mark.parametrize("form", ["toml", "json"])
def test_a_configuration_that_was_saved_is_loaded_as_it_was(form):
    wanted = config(2.5, override=[OVERRIDE])
    text = search_config.toml_text(wanted) if form == "toml" else json.dumps(wanted)
    assert search_config.loaded(text) == wanted
    found = json.dumps({"best": {"config": wanted}, "trials": []})
    assert search_config.loaded(found) == wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[" * 9999, "codec = 3", "codec = 'x'\nsettings = 1", "codec = 'x'\noverride = 1"),
        *("codec = 'x'\noverride = [1]", "codec = 'x'\nevil = 1", '{"codec": "x", "evil": 1}'),
    ],
)
def test_a_text_that_is_no_configuration_is_refused(text):
    with pytest.raises(ValueError, match=r"the (text|overrides)"):
        search_config.loaded(text)


def test_settings_as_text_are_taken_in_and_those_for_another_model_are_not(archived, jobs):
    app = explorer("run", run=str(archived))
    app.session_state["bits.settings"] = True
    app.run()
    for text, wanted in (
        (search_config.toml_text(config(7.0)), config(7.0)),
        (json.dumps(config(7.0, override=[{"match": "gone.*", "coarseness": 1}])), config(7.0)),
        ("evil = 1", config(7.0)),
    ):
        app.text_area[0].set_value(text).run()
        button(app, "Use these settings").click().run()
        assert edited(archived) == wanted


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
    services.check_config(changed)


def drawn_at(rates: Rates | None, *values: float, **changes: Any) -> Any:
    """Return the picture with an allocation in it."""
    told = None if rates is None else rates.predict(values)
    figure = changes.pop("figure", "divergence")
    here = Here(None, None) if told is None else Here(told.ratio_weights, getattr(told, figure))
    marks = changes.pop("marks", Marks(0.003, "Bound"))
    course = [] if rates is None else rates.course(figure).tolist()
    return allocation_figure(changes.pop("points", ()), rates, here, figure, marks, 1e9, course)


@pytest.mark.parametrize("figure", ["drop", "divergence"])
def test_the_picture_has_the_bound_and_the_allocation_on_it(figure):
    rates = rates_for("a", HOSTILE)
    measured = [point(10.0, 0.02, label=HOSTILE, divergence=0.004)]
    inside = drawn_at(rates, 1.0, 1.0, points=measured, figure=figure)
    assert [trace.name for trace in inside.data][-1] == "These bits"
    beyond = drawn_at(rates, 8.0, 8.0, points=measured, figure=figure)
    assert "beyond" in beyond.data[-1].name
    assert beyond.data[-1].x[0] < inside.data[-1].x[0]
    assert "<b>" not in str(beyond.data[1].customdata[0][1])
    assert {shape.type for shape in beyond.layout.shapes} == {"rect", "line"}
    named = drawn_at(rates, 1.0, 1.0, marks=Marks(default_ratio=14.0, target_ratio=30.0))
    assert [note.text for note in named.layout.annotations] == ["Default 14.0×", "Target 30.0×"]
    assert not [shape for shape in named.layout.shapes if shape.type == "rect"], "no bound, no red"


def test_all_that_was_measured_of_these_steps_is_in_one_picture_and_nothing_of_others():
    points = [
        point(10.0, 0.02, divergence=0.004),
        point(11.0, 0.02, divergence=0.005, n_steps=2, is_complete=False),
        point(12.0, 0.02, divergence=0.006, keeps=False),
        point(13.0, 0.02, divergence=0.007, baseline="QD"),
        point(14.0, 0.02, divergence=0.008, archive="run.inshrink", is_complete=True, n_steps=2),
        point(15.0, 0.02, divergence=0.009, archive="old.inshrink", is_complete=False),
        point(16.0, 0.0, divergence=0.0, config=config(2.0), is_estimated=True),
    ]
    drawn = drawn_at(rates_for("a", "b"), 2.0, 2.0, points=points)
    told = {trace.name: list(trace.y) for trace in drawn.data[1:-1]}
    assert told == {
        "Archives, measured": [0.008],
        "Measured": [0.004],
        "Measured, breaks the bound": [0.006],
        "Published codecs, measured": [0.007],
    }
    places = [row[0] for trace in drawn.data[:-1] for row in trace.customdata]
    assert sorted(places) == [-1, -1, -1, -1, 0, 2, 3, 4, 6], "a click loads a point, and levels that are one"


@pytest.mark.parametrize("wild", [None, math.nan, math.inf, 0.0, -1.0, 1e30])
def test_any_quality_can_be_drawn(wild):
    rates = rates_for("a", "b", divergence=wild)
    points = [SearchPoint("x", {}, 0.0, wild, wild, 1, True, True), point(1e30, wild, divergence=wild)]
    drawn = drawn_at(rates, 1.0, 1e-3, points=points)
    assert all(math.isfinite(end) for end in drawn.layout.yaxis.range)
    drawn.to_json()


def test_what_was_measured_calibrates_what_is_edited_next(archived, jobs):
    shown = services.load_subject(str(archived))
    specs = shown.model_tensors
    sizes = {spec.key: spec.numel for spec in specs}
    rates = rates_of([level(2.0**i, sizes) for i in range(-1, 4)], "coarseness", specs)
    told = rates.predict([2.0] * len(rates.keys))
    seen = point(9.0, None, config=config(2.0), divergence=3 * (told.divergence or 0))
    passed_over = [seen._replace(is_complete=False), seen._replace(is_estimated=True)]
    passed_over += [seen._replace(config={"codec": "qd", "settings": {}})]
    passed_over += [seen._replace(config={"codec": "lattice", "settings": {"bogus": 1}})]
    found = board.calibrated(shown, rates, [seen, *passed_over])
    assert found.n_measured == 1
    assert found.predict([4.0] * len(rates.keys)).divergence == pytest.approx(3 * 4e-4 * 16)
    drawn = drawn_at(found, *([2.0] * len(rates.keys)), points=[seen])
    assert drawn.data[-1].y[0] == pytest.approx(seen.divergence)


def test_a_setting_that_the_codecs_number_is_not_has_no_figures_of_the_curve(archived):
    shown = services.load_subject(str(archived))
    specs = shown.model_tensors
    sizes = {spec.key: spec.numel for spec in specs}
    rates = rates_of([level(2.0**i, sizes) for i in range(-1, 4)], "coarseness", specs)
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
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows)), STEPS)
    assert [one.n_steps for one in found.points] == [4, 4, 1]
    assert [one.is_complete for one in found.points] == [True, True, False]
    assert [one.keeps for one in found.points] == [True, True, False]
    assert found.points[0].drop == 0.009
    assert found.best is found.points[1]


def test_a_trial_of_a_search_of_all_steps_that_has_just_begun_is_not_the_whole_chain(archived, jobs):
    job = put(jobs, archived, "running", steps=False)
    job.rows = [trial(step, 1.0) for step in STEPS[:2]]
    shown = services.load_subject(str(archived))
    found = services.searched(job, services.steps_of(job, shown))
    assert [(one.n_steps, one.is_complete) for one in found.points] == [(2, False)]
    assert found.best is None


def test_a_failure_keeps_no_bound_and_a_missing_figure_none_either(jobs):
    rows = [trial(10, 1.0, failure="NaN", drop=None, divergence=None), trial(10, 2.0, divergence=None)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows, best=None)), STEPS)
    assert [one.keeps for one in found.points] == [False, False]


def test_of_a_search_for_a_ratio_a_point_is_judged_by_it(jobs):
    told = document(best=None, bounds={"drop": None, "divergence": None})
    left = put(jobs, Path("/runs/x"), "finished", told, "--target-ratio", "15")
    found = services.searched(left, STEPS)
    assert [found.verdict(one) for one in found.points] == [
        "below the ratio",
        "reaches the ratio",
        "reaches the ratio",
    ]
    assert found.best is found.points[1]


@pytest.mark.parametrize(
    "points", [[], [{}], [{"customdata": [7]}], [{"customdata": ["x"]}], [{"customdata": [math.nan]}], ["x"]]
)
def test_a_click_that_makes_no_sense_picks_nothing(points):
    assert clicked_point(points, 3) is None


def test_estimates_go_from_fine_to_coarse_and_are_there_one_by_one(archived, jobs, tmp_path):
    shown = services.load_subject(str(archived))
    services.start_job(services.estimating_work(shown, STEPS, "uniform", is_calibrated=False))
    job = work(tmp_path / "jobs", *jobs.started[0].requests)
    points = services.estimates(job)
    assert len(points) == 7
    assert points[0].config == {"codec": "uniform", "settings": {"bits": 8}}
    assert all(one.is_estimated and one.is_complete for one in points)
    assert [one.ratio for one in points] == sorted(one.ratio for one in points)
    job.rows.pop()
    assert services.estimates(job) == points[:6]
