"""Bits by hand: the table of layers, locks, undo, the curve, and the settings that come of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.pages.allocate import allocating, layers
from inshrink_app.pages.allocate.figure import Here, Marks, allocation_figure
from inshrink_app.server.recent import recent_file
from inshrink_app.services import SearchPoint
from streamlit.testing.v1 import AppTest, app_test

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.search.rates import Rates, rates_of
from tests.app.builders import MAIN, button, charts, explorer, linked, subject, texts
from tests.app.job_stubs import STEPS
from tests.app.search_builders import config, document, point, put, trial
from tests.app.test_app_compare import trust, with_evaluator

HOSTILE = "<b>\u202ex*[0].weight"


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
def app(archived, jobs) -> AppTest:
    """Return the page with the layers estimated."""
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    return explorer("allocate", run=str(archived))


def table(app: AppTest) -> Any:
    """Return the lines of tensors, without those of the modules above them."""
    found = next(one.value for one in app.dataframe if "Bits per weight" in one.value.columns)
    return found[~found["Layer"].str.contains("▼")].reset_index(drop=True)


def test_layers_are_estimated_by_themselves_but_for_who_came_by_a_bare_link(archived, jobs):
    app = linked("allocate", run=str(archived))
    assert "No evaluator is asked" in texts(app)
    assert jobs.started == []
    button(app, "Estimate without measuring").click().run()
    assert [work.documents[0]["verb"] for work in jobs.started] == ["estimate"]
    jobs.kept.clear()
    explorer("allocate", run=str(archived))
    assert [work.documents[0]["verb"] for work in jobs.started[1:]] == ["estimate"]


def test_every_layer_has_its_bits_and_what_it_carries(app):
    found = table(app)
    assert list(found["Layer"].str.strip()) == ["weight", "bias"]
    assert found["Bits per weight"].between(3, 7).all()
    for share in ("Movement", "Share of bytes", "Share of damage"):
        assert found[share].sum() == pytest.approx(100)
    assert "The curve is estimated, not calibrated" in texts(app)
    assert charts(app) >= 1


def test_more_bits_for_one_layer_is_an_override_of_it_and_can_be_undone(app):
    before = table(app)["Bits per weight"].tolist()
    app.session_state["allocate.picked"] = ["fc1.weight"]
    app.run()
    button(app, "More bits").click().run()
    after = table(app)["Bits per weight"].tolist()
    assert after[0] == pytest.approx(before[0] + 1)
    assert after[1] == before[1]
    edit = app.session_state["search.edit"]
    base = edit.config["settings"]["coarseness"]
    (one,) = edit.config["override"]
    assert {one.get("match"), one.get("layer_type")} & {"fc1.weight", "fc1.bias", "linear", "vector"}
    assert one["coarseness"] in (base / 2, base * 2)
    app.button(key="allocate.undo").click().run()
    assert table(app)["Bits per weight"].tolist() == before


def test_a_locked_layer_keeps_its_bits_when_all_are_moved(app):
    app.session_state["allocate.picked"] = ["fc1.bias"]
    app.session_state["search.goal"] = "drop"
    app.run()
    button(app, "Lock or unlock").click().run()
    before = table(app)
    assert before["Lock"].tolist() == ["Lock", "Locked"]
    handle = app.select_slider(key="allocate.handle")
    handle.set_value(16.0).run()
    after = table(app)["Bits per weight"].tolist()
    assert after[0] < before["Bits per weight"][0] - 1
    assert after[1] == before["Bits per weight"][1]
    assert "Beyond the bound" in texts(app)


def more_bits(app: AppTest) -> dict[str, Any]:
    """Give one layer more bits by hand; return the configuration."""
    app.session_state["allocate.picked"] = ["fc1.weight"]
    app.run()
    button(app, "More bits").click().run()
    return dict(app.session_state["search.edit"].config)


def test_a_search_leaves_bits_made_by_hand_and_its_best_can_be_loaded(archived, jobs):
    with_evaluator(archived)
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    app = explorer("allocate", run=str(archived))
    by_hand = more_bits(app)
    trust(app).check().run()
    jobs.state = "running"
    button(app, "Search").click().run()
    search = jobs.kept[-1]
    assert search.verb == "search"
    assert app.session_state["search.edit"].config == by_hand
    assert not app.button(key="allocate.undo").disabled
    bits = table(app)["Bits per weight"].tolist()
    search.state, search.result = "finished", document()
    app.run()
    assert app.session_state["search.edit"].config == by_hand
    # The trials calibrate the estimates, which are made anew; those from before stand until then.
    assert [(job.verb, job.is_running) for job in jobs.kept][-1] == ("estimate", True)
    assert table(app)["Bits per weight"].tolist() == bits
    button(app, "Load the best of the search").click().run()
    assert app.session_state["search.edit"].config == config(2.0)
    app.button(key="allocate.undo").click().run()
    assert app.session_state["search.edit"].config == by_hand


def test_what_nobody_changed_begins_anew_with_the_best_of_the_next_search(archived, jobs):
    with_evaluator(archived)
    put(jobs, archived, result=document())
    app = explorer("allocate", run=str(archived))
    assert app.session_state["search.edit"].config == config(2.0)
    trust(app).check().run()
    button(app, "Search again").click().run()
    search = next(job for job in reversed(jobs.kept) if job.verb == "search")
    search.result = document(best={"config": config(1.0)})
    app.run()
    assert app.session_state["search.edit"].config == config(1.0)
    for before in (config(2.0), config(0.5)):
        app.button(key="allocate.undo").click().run()
        assert app.session_state["search.edit"].config == before


def test_bits_and_locks_made_by_hand_are_there_after_a_reload_with_the_way_back(app, archived):
    began = dict(app.session_state["search.edit"].config)
    app.session_state["allocate.picked"] = ["fc1.bias"]
    app.run()
    button(app, "Lock or unlock").click().run()
    by_hand, bits = more_bits(app), table(app)["Bits per weight"].tolist()
    again = explorer("allocate", run=str(archived))
    assert again.session_state["search.edit"].config == by_hand
    assert table(again)["Bits per weight"].tolist() == bits
    assert table(again)["Lock"].tolist() == ["Lock", "Locked"]
    again.button(key="allocate.undo").click().run()
    assert again.session_state["search.edit"].config == began
    again.session_state["allocate.picked"] = ["fc1.bias"]
    again.run()
    button(again, "Lock or unlock").click().run()
    fresh = explorer("allocate", run=str(archived))
    assert fresh.button(key="allocate.undo").disabled
    assert not list(recent_file().with_name("drafts").glob("*.json"))


@pytest.mark.parametrize("damage", [b"", b"{}", b"[" * 9999])
def test_a_draft_that_cannot_be_read_is_none(app, archived, damage):
    more_bits(app)
    (kept,) = recent_file().with_name("drafts").glob("*.json")
    kept.write_bytes(damage)
    again = explorer("allocate", run=str(archived))
    assert again.button(key="allocate.undo").disabled


def test_the_best_bits_take_no_more_than_those_before(app):
    button(app, "Best bits for this size").click().run()
    assert table(app)["Bits per weight"].notna().all()


def test_a_pattern_narrows_the_rows_and_shares_stay_those_of_all(app):
    app.text_input(key="allocate.pattern").set_value("*.bias").run()
    found = table(app)
    assert list(found["Layer"]) == ["fc1.bias"]
    assert found["Share of bytes"][0] < 10
    app.text_input(key="allocate.pattern").set_value("nope").run()
    assert "No row matches" in texts(app)


def test_what_was_picked_on_another_page_is_picked_here(archived, jobs):
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    opened = explorer("allocate", run=str(archived), rows=json.dumps(["fc1.bias"]))
    assert opened.session_state["allocate.picked"] == ["fc1.bias"]


@pytest.mark.parametrize("said", ["[", '{"a": 1}', '[1, null, [], "nope"]', "[" * 9999])
def test_what_a_link_picks_is_not_trusted(archived, jobs, said):
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    opened = explorer("allocate", run=str(archived), rows=said)
    assert "1 tensor picked" not in texts(opened)


def test_old_links_to_the_search_lead_here_with_what_they_say(archived, jobs):
    app = AppTest.from_file(str(MAIN), default_timeout=60)
    app.query_params["run"], app.query_params["goal"] = str(archived), "ratio"
    app._page_hash = app_test.calc_hash("search")
    app.run()
    assert app.query_params["goal"] == "ratio"
    assert "How coarse may a frame be?" in texts(app)
    assert jobs.started == []


# Settings


def test_an_allocation_is_read_from_a_configuration_and_written_into_it():
    shown = subject(3)
    keys = [row.key for row in shown.tensors]
    start = config(2.0, override=[{"match": "layers.1.*", "coarseness": 4.0, "gamma": 1.0}])
    assert allocating.allocation_of(shown, start, keys) == [2.0, 4.0, 2.0]
    changed = allocating.with_allocation(shown, start, keys, [1.0, 4.0, 2.0])
    assert allocating.allocation_of(shown, changed, keys) == [1.0, 4.0, 2.0]
    assert changed["override"][0] == {"match": "layers.1.*", "gamma": 1.0}
    services.check_config(changed)


# Rows and the curve


def test_rows_are_the_tree_or_layer_types_or_what_matches_a_pattern():
    rates = rates_for("h.0.w", "h.0.bias", "h.1.w", "scale")
    assert [row.name for row in layers.rows_of(rates, "block")] == ["h", "h.0", "h.1.w", "scale"]
    assert layers.rows_of(rates, "block")[0].members == (0, 1, 2)
    assert [row.members for row in layers.rows_of(rates, "layer_type")] == [(0, 2, 3), (1,)]
    assert [row.name for row in layers.rows_of(rates, "1", ["h.0"])][2:4] == ["h.0.w", "h.0.bias"]
    (one,) = layers.rows_of(rates, "tensor", pattern="*.bias")
    assert (one.name, one.depth) == ("h.0.bias", 0)


def drawn_at(rates: Rates | None, *values: float, **changes: Any) -> Any:
    """Return the picture with an allocation in it."""
    told = None if rates is None else rates.predict(values)
    figure = changes.pop("figure", "divergence")
    here = Here(None, None) if told is None else Here(told.ratio_weights, getattr(told, figure))
    marks = changes.pop("marks", Marks(0.003, "Bound"))
    return allocation_figure(changes.pop("points", ()), rates, here, figure, marks, 1e9)


@pytest.mark.parametrize("figure", ["drop", "divergence"])
def test_the_picture_has_the_bound_and_the_allocation_on_it(figure):
    rates = rates_for("a", HOSTILE)
    measured = [point(10.0, 0.02, label=HOSTILE, divergence=0.004)]
    inside = drawn_at(rates, 1.0, 1.0, points=measured, figure=figure)
    assert [trace.name for trace in inside.data][-1] == "This allocation"
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
        point(11.0, 0.02, divergence=0.005, n_steps=2, whole=False),
        point(12.0, 0.02, divergence=0.006, keeps=False),
        point(13.0, 0.02, divergence=0.007, baseline="QD"),
        point(14.0, 0.02, divergence=0.008, archive="run.inshrink", whole=True, n_steps=2),
        point(15.0, 0.02, divergence=0.009, archive="old.inshrink", whole=False),
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


def test_the_page_says_how_many_trials_are_not_on_the_curve_and_of_how_many_steps(archived, jobs):
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    rows = [trial(step, 1.0) for step in STEPS]
    rows += [trial(STEPS[0], 9.0, divergence=0.5), *(trial(step, 5.0, divergence=0.4) for step in STEPS[:2])]
    put(jobs, archived, result=document(trials=rows, best=None))
    app = explorer("allocate", run=str(archived))
    assert "Not drawn: 2 trials that ended after 1 to 2 steps" in texts(app)


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
    passed_over = [seen._replace(whole=False), seen._replace(is_estimated=True)]
    passed_over += [seen._replace(config={"codec": "qd", "settings": {}})]
    passed_over += [seen._replace(config={"codec": "lattice", "settings": {"bogus": 1}})]
    found = allocating.calibrated(shown, rates, [seen, *passed_over])
    assert found.n_measured == 1
    assert found.predict([4.0] * len(rates.keys)).divergence == pytest.approx(3 * 4e-4 * 16)
    drawn = drawn_at(found, *([2.0] * len(rates.keys)), points=[seen])
    assert drawn.data[-1].y[0] == pytest.approx(seen.divergence)


def test_a_setting_that_the_codecs_number_is_not_has_no_figures_of_the_curve(archived):
    shown = services.load_subject(str(archived))
    specs = shown.model_tensors
    sizes = {spec.key: spec.numel for spec in specs}
    rates = rates_of([level(2.0**i, sizes) for i in range(-1, 4)], "coarseness", specs)
    plain = allocating.predicted(shown, rates, config(2.0, override=[{"match": "fc1.*", "coarseness": 2.0}]))
    assert plain.drop == rates.predict([2.0] * len(rates.keys)).drop
    usual = services.codec_settings("lattice")
    same = {"codec": "lattice", "settings": {**usual, "coarseness": 2.0}}
    assert allocating.predicted(shown, rates, same) is not None
    other = {"codec": "lattice", "settings": {"coarseness": 2.0, "gamma": 0.5}}
    assert allocating.predicted(shown, rates, other) is None
    assert allocating.predicted(shown, rates, {"codec": "qd", "settings": {}}) is None
    assert allocating.predicted(shown, None, config(2.0)) is None
