"""Bits by hand: the table of layers, locks, undo, the curve, and the settings that come of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inshrink_app import services
from inshrink_app.jobs.work import Work
from inshrink_app.pages.allocate import allocating, layers
from inshrink_app.pages.allocate.curve import curve_figure
from inshrink_app.pages.sensitivity import ahead
from inshrink_app.server.recent import recent_file
from inshrink_app.services import SearchPoint
from inshrink_app.services import jobs as job_services
from streamlit.testing.v1 import AppTest, app_test

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.search.rates import Rates, rates_of
from tests.app.builders import (
    MAIN,
    FakeJobs,
    button,
    charts,
    compared_rows,
    explorer,
    keep_comparison,
    sensitivity_table,
    subject,
    texts,
)
from tests.app.job_stubs import STEPS, StubJobs, archived, archived_template, jobs
from tests.app.search_builders import config, document, point, put, trial
from tests.app.test_app_compare import trust, with_evaluator

__all__ = ["archived", "archived_template", "jobs"]

HOSTILE = "<b>\u202ex*[0].weight"


def level(value: float, sizes: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Return what ``inshrink estimate --levels --by-tensor`` tells of a level, as far as the page asks."""
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
def app(archived: Path, jobs: StubJobs) -> AppTest:
    """Return the page with the layers estimated."""
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    opened = explorer("allocate", run=str(archived))
    button(opened, "Estimate without measuring").click().run()
    assert not opened.exception
    return opened


def table(app: AppTest) -> Any:
    """Return the lines of tensors, without those of the modules above them."""
    found = next(one.value for one in app.dataframe if "Bits per weight" in one.value.columns)
    return found[~found["Layer"].str.contains("▼")].reset_index(drop=True)


def test_without_estimates_the_page_says_how_to_come_to_them(archived: Path, jobs: StubJobs) -> None:
    app = explorer("allocate", run=str(archived))
    assert not app.exception
    assert "No evaluator is asked" in texts(app)


def test_every_layer_has_its_bits_and_what_it_carries(app: AppTest) -> None:
    found = table(app)
    assert list(found["Layer"].str.strip()) == ["weight", "bias"]
    assert found["Bits per weight"].between(3, 7).all()
    for share in ("Movement", "Share of bytes", "Share of damage"):
        assert found[share].sum() == pytest.approx(1)
    assert "Estimated by a proxy" in texts(app)
    assert "weighted with squared movement, as the checkpoints hold no second moments" in texts(app)
    assert charts(app) >= 1


def test_there_is_one_way_back_and_the_keyboard_is_told_its_own(app: AppTest) -> None:
    assert [found.label for found in app.button].count("Undo") == 1
    assert "Shift+Space" in texts(app)


def test_more_bits_for_one_layer_is_an_override_of_it_and_can_be_undone(app: AppTest) -> None:
    before = table(app)["Bits per weight"].tolist()
    app.session_state["allocate.picked"] = ["fc1.weight"]
    app.run()
    button(app, "More bits").click().run()
    assert not app.exception
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


def test_a_locked_layer_keeps_its_bits_when_all_are_moved(app: AppTest) -> None:
    app.session_state["allocate.picked"] = ["fc1.bias"]
    app.session_state["search.goal"] = "drop"
    app.run()
    button(app, "Lock or unlock").click().run()
    before = table(app)
    assert before["Lock"].tolist() == ["Lock", "Locked"]
    handle = app.select_slider(key="allocate.handle")
    handle.set_value(16.0).run()
    assert not app.exception
    after = table(app)["Bits per weight"].tolist()
    assert after[0] < before["Bits per weight"][0] - 1
    assert after[1] == before["Bits per weight"][1]
    assert "Beyond the bound" in texts(app)


def more_bits(app: AppTest) -> dict[str, Any]:
    """Give one layer more bits by hand; return the configuration."""
    app.session_state["allocate.picked"] = ["fc1.weight"]
    app.run()
    button(app, "More bits").click().run()
    assert not app.exception
    return dict(app.session_state["search.edit"].config)


def test_a_search_leaves_bits_made_by_hand_and_its_best_can_be_loaded(archived: Path, jobs: StubJobs) -> None:
    with_evaluator(archived)
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    app = explorer("allocate", run=str(archived))
    button(app, "Estimate without measuring").click().run()
    by_hand = more_bits(app)
    trust(app).check().run()
    jobs.state = "running"
    button(app, "Search").click().run()
    assert not app.exception
    search = jobs.kept[-1]
    assert search.verb == "search"
    assert app.session_state["search.edit"].config == by_hand
    assert not app.button(key="allocate.undo").disabled
    bits = table(app)["Bits per weight"].tolist()
    search.state, search.result = "finished", document()
    app.run()
    assert app.session_state["search.edit"].config == by_hand
    # The trials calibrate the estimates, which are made anew; those from before stand until then.
    assert jobs.kept[-1].verb == "estimate"
    assert jobs.kept[-1].is_running
    assert table(app)["Bits per weight"].tolist() == bits
    button(app, "Load the best of the search").click().run()
    assert not app.exception
    assert app.session_state["search.edit"].config == config(2.0)
    app.button(key="allocate.undo").click().run()
    assert app.session_state["search.edit"].config == by_hand


def test_what_nobody_changed_begins_anew_with_the_best_of_the_next_search(
    archived: Path, jobs: StubJobs
) -> None:
    with_evaluator(archived)
    put(jobs, archived, result=document())
    app = explorer("allocate", run=str(archived))
    assert app.session_state["search.edit"].config == config(2.0)
    trust(app).check().run()
    button(app, "Search again").click().run()
    jobs.kept[-1].result = document(best={"config": config(1.0)})
    app.run()
    assert app.session_state["search.edit"].config == config(1.0)


def test_bits_and_locks_made_by_hand_are_there_after_a_reload_with_the_way_back(
    app: AppTest, archived: Path
) -> None:
    began = dict(app.session_state["search.edit"].config)
    app.session_state["allocate.picked"] = ["fc1.bias"]
    app.run()
    button(app, "Lock or unlock").click().run()
    by_hand, bits = more_bits(app), table(app)["Bits per weight"].tolist()
    again = explorer("allocate", run=str(archived))
    assert not again.exception
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
def test_a_draft_that_cannot_be_read_is_none(app: AppTest, archived: Path, damage: bytes) -> None:
    more_bits(app)
    (kept,) = recent_file().with_name("drafts").glob("*.json")
    kept.write_bytes(damage)
    again = explorer("allocate", run=str(archived))
    assert not again.exception
    assert again.button(key="allocate.undo").disabled


def test_the_best_bits_take_no_more_than_those_before(app: AppTest) -> None:
    button(app, "Best bits for this size").click().run()
    assert not app.exception
    assert table(app)["Bits per weight"].notna().all()


def test_a_pattern_narrows_the_rows_and_shares_stay_those_of_all(app: AppTest) -> None:
    app.text_input(key="allocate.pattern").set_value("*.bias").run()
    found = table(app)
    assert list(found["Layer"]) == ["fc1.bias"]
    assert found["Share of bytes"][0] < 0.1
    app.text_input(key="allocate.pattern").set_value("nope").run()
    assert not app.exception
    assert "No row matches" in texts(app)


def test_what_was_picked_on_another_page_is_picked_here(archived: Path, jobs: StubJobs) -> None:
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    opened = explorer("allocate", run=str(archived), rows=json.dumps(["fc1.bias"]))
    button(opened, "Estimate without measuring").click().run()
    assert not opened.exception
    assert opened.session_state["allocate.picked"] == ["fc1.bias"]


@pytest.mark.parametrize("said", ["[", '{"a": 1}', '[1, null, [], "nope"]', "[" * 9999])
def test_what_a_link_picks_is_not_trusted(archived: Path, jobs: StubJobs, said: str) -> None:
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    opened = explorer("allocate", run=str(archived), rows=said)
    button(opened, "Estimate without measuring").click().run()
    assert not opened.exception
    assert "1 tensor picked" not in texts(opened)


def test_old_links_to_the_search_lead_here_with_what_they_say(archived: Path, jobs: StubJobs) -> None:
    app = AppTest.from_file(str(MAIN), default_timeout=60)
    app.query_params["run"], app.query_params["goal"] = str(archived), "ratio"
    app._page_hash = app_test.calc_hash("search")
    app.run()
    assert not app.exception
    assert app.query_params["goal"] == "ratio"
    assert "Bits for every layer" in texts(app)
    assert jobs.started == []


class BothJobs(FakeJobs):
    """Measurements that have their answers, and all other jobs as `StubJobs` has them."""

    def __init__(self, stub: StubJobs, tables: dict[str, Any]) -> None:
        super().__init__(tables)
        self.stub = stub

    def get(self, work: Work) -> Any:
        return self.stub.get(work) if work.page == "allocate" else super().get(work)

    def newest(self, page: str, topic: str, shown: str, state: str = "") -> Any:
        return self.stub.newest(page, topic, shown, state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stub, name)


def test_what_is_selected_in_the_sensitivities_goes_on_to_the_layers(
    archived: Path, jobs: StubJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = dataclasses.replace(sensitivity_table(2, 4), steps=STEPS)
    rows = tuple(row._replace(name=name) for row, name in zip(measured.rows, SIZES, strict=True))
    one = dataclasses.replace(measured, rows=rows)
    answers = BothJobs(jobs, {"tensor": one, "block": one, "layer_type": one})
    monkeypatch.setattr(job_services, "registry", lambda: answers)
    monkeypatch.setattr(ahead, "warm_up", lambda _: None)
    app = explorer("sensitivity", run=str(archived), by="tensor")
    app.text_input(key="row_filter").set_value("bias").run()
    button(app, "Allocate bits to this row").click().run()
    assert not app.exception
    assert app.session_state["inshrink.rows"] == '["fc1.bias"]'


# Settings


def test_an_allocation_is_read_from_a_configuration_and_written_into_it() -> None:
    shown = subject(3)
    keys = [row.key for row in shown.tensors]
    start = config(2.0, override=[{"match": "layers.1.*", "coarseness": 4.0, "gamma": 1.0}])
    assert allocating.allocation_of(shown, start, keys) == [2.0, 4.0, 2.0]
    changed = allocating.with_allocation(shown, start, keys, [1.0, 4.0, 2.0])
    assert allocating.allocation_of(shown, changed, keys) == [1.0, 4.0, 2.0]
    assert changed["override"][0] == {"match": "layers.1.*", "gamma": 1.0}
    services.check_config(changed)


def test_an_allocation_that_is_the_same_for_all_has_no_overrides() -> None:
    shown = subject(3)
    keys = [row.key for row in shown.tensors]
    start = config(2.0, override=[{"match": "layers.1.*", "coarseness": 4.0}])
    assert allocating.with_allocation(shown, start, keys, [8.0] * 3) == config(8.0)


def test_a_codec_of_several_settings_has_no_number() -> None:
    assert allocating.number_of("inshrinkerator") is None
    assert allocating.number_of("lattice") is not None


# Rows and the curve


def test_rows_are_the_tree_or_layer_types_or_what_matches_a_pattern() -> None:
    rates = rates_for("h.0.w", "h.0.bias", "h.1.w", "scale")
    assert [row.name for row in layers.rows_of(rates, "block")] == ["h", "h.0", "h.1.w", "scale"]
    assert layers.rows_of(rates, "block")[0].members == (0, 1, 2)
    assert [row.members for row in layers.rows_of(rates, "layer_type")] == [(0, 2, 3), (1,)]
    assert [row.name for row in layers.rows_of(rates, "1", ["h.0"])][2:4] == ["h.0.w", "h.0.bias"]
    (one,) = layers.rows_of(rates, "tensor", pattern="*.bias")
    assert (one.name, one.depth) == ("h.0.bias", 0)


@pytest.mark.parametrize("figure", ["drop", "divergence"])
def test_the_curve_has_the_bound_and_the_allocation_on_it(figure: str) -> None:
    rates = rates_for("a", HOSTILE)
    measured = point(10.0, 0.02, label=HOSTILE, divergence=0.004)
    fine, coarse = (rates.predict([value] * 2) for value in (1.0, 8.0))
    inside = curve_figure(rates, fine, [measured], figure, 0.003, 1e9, 4)
    assert [trace.name for trace in inside.data][-1] == "This allocation"
    beyond = curve_figure(rates, coarse, [measured], figure, 0.003, 1e9, 4)
    assert "beyond" in beyond.data[-1].name
    assert beyond.data[-1].x[0] < inside.data[-1].x[0]
    assert "<b>" not in str(beyond.data[1].customdata[0][0])
    assert {shape.type for shape in beyond.layout.shapes} == {"rect", "line"}


def test_the_allocation_lies_on_the_curve_where_all_layers_are_alike() -> None:
    rates = rates_for("a", "b")
    drawn = curve_figure(rates, rates.predict([2.0] * 2), [], "divergence", 0.003, 1e9, 4)
    at = int(np.flatnonzero(rates.levels == 2.0)[0])
    assert drawn.data[-1].x[0] == pytest.approx(drawn.data[0].x[at])
    assert drawn.data[-1].y[0] == pytest.approx(drawn.data[0].y[at])


def test_a_trial_on_some_of_the_steps_is_not_drawn_as_one_of_all() -> None:
    rates = rates_for("a", "b")
    points = [
        point(10.0, 0.02, divergence=0.004),
        point(11.0, 0.02, divergence=0.005, n_steps=2, whole=False),
        point(12.0, 0.02, divergence=0.006, n_steps=2),
        point(13.0, 0.02, divergence=0.007, n_steps=2, baseline="QD"),
    ]
    drawn = curve_figure(rates, rates.predict([2.0] * 2), points, "divergence", 0.003, 1e9, 4)
    told = {trace.name: (trace.marker.symbol, list(trace.y)) for trace in drawn.data[1:-1]}
    assert told == {
        "Measured": ("circle", [0.004]),
        "Measured on 2 of 4 steps": ("circle-open", [0.006]),
        "Baselines, measured on 2 of 4 steps": ("square-open", [0.007]),
    }
    assert "2 steps" in drawn.data[3].customdata[0]


def test_the_page_says_how_many_trials_are_not_on_the_curve_and_of_how_many_steps(
    archived: Path, jobs: StubJobs
) -> None:
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    rows = [trial(step, 1.0) for step in STEPS]
    rows += [trial(STEPS[0], 9.0, divergence=0.5), *(trial(step, 5.0, divergence=0.4) for step in STEPS[:2])]
    put(jobs, archived, result=document(trials=rows, best=None))
    app = explorer("allocate", run=str(archived))
    button(app, "Estimate without measuring").click().run()
    assert not app.exception
    assert "Not drawn: 2 trials that ended after 1 to 2 steps" in texts(app)
    assert "Hollow circles: given up, or not finished, after 1 to 2 steps" in texts(app)


def test_without_a_bound_nothing_is_red() -> None:
    rates = rates_for("a")
    drawn = curve_figure(rates, rates.predict([8.0]), [], "divergence", None, 1e9, 4)
    assert not drawn.layout.shapes
    assert drawn.data[-1].name == "This allocation"


@pytest.mark.parametrize("wild", [None, math.nan, math.inf, 0.0, -1.0, 1e30])
def test_any_quality_can_be_drawn(wild: float | None) -> None:
    rates = rates_for("a", "b", divergence=wild)
    points = [SearchPoint("x", {}, 0.0, wild, wild, 1, True, True), point(1e30, wild, divergence=wild)]
    drawn = curve_figure(rates, rates.predict([1.0, 1e-3]), points, "divergence", 0.003, 1e9, 4)
    assert all(math.isfinite(end) for end in drawn.layout.yaxis.range)
    drawn.to_json()


def test_what_was_measured_calibrates_what_is_edited_next(archived: Path, jobs: StubJobs) -> None:
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
    drawn = curve_figure(found, found.predict([2.0] * len(rates.keys)), [seen], "divergence", None, 1e9, 4)
    assert drawn.data[-1].y[0] == pytest.approx(seen.divergence)


def test_measurements_calibrate_the_curve_and_the_estimate_of_settings_alike(
    archived: Path, jobs: StubJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.rows["estimate"] = [level(2.0**i, SIZES) for i in range(-1, 4)]
    seen = [point(9.0, 0.01, config=config(2.0)), point(12.0, 0.03, config=config(4.0))]
    monkeypatch.setattr(services, "measured_archives", lambda *_: tuple(seen))
    app = explorer("allocate", run=str(archived))
    button(app, "Estimate without measuring").click().run()
    assert not app.exception
    assert "calibrated by 2 measurements" in texts(app)
    button(app, "Estimate").click().run()
    assert not app.exception
    assert "Drop and divergence as above" in texts(app)
    assert texts(app).count("calibrated by 2 measurements") == 2
    told = {metric.label: metric for metric in app.metric}
    assert told["Worst drop"].value == told["Drop"].value != "–"
    assert told["Worst drop"].delta == "estimated"


def test_a_setting_that_the_codecs_number_is_not_has_no_figures_of_the_curve(archived: Path) -> None:
    shown = services.load_subject(str(archived))
    specs = shown.model_tensors
    sizes = {spec.key: spec.numel for spec in specs}
    rates = rates_of([level(2.0**i, sizes) for i in range(-1, 4)], "coarseness", specs)
    plain = allocating.predicted(shown, rates, config(2.0, override=[{"match": "fc1.*", "coarseness": 2.0}]))
    assert plain is not None
    assert plain.drop == rates.predict([2.0] * len(rates.keys)).drop
    usual = services.codec_settings("lattice")
    same = {"codec": "lattice", "settings": {**usual, "coarseness": 2.0}}
    assert allocating.predicted(shown, rates, same) is not None
    other = {"codec": "lattice", "settings": {"coarseness": 2.0, "gamma": 0.5}}
    assert allocating.predicted(shown, rates, other) is None
    assert allocating.predicted(shown, rates, {"codec": "qd", "settings": {}}) is None
    assert allocating.predicted(shown, None, config(2.0)) is None


def test_an_archive_that_was_compared_is_a_measurement(archived: Path, jobs: StubJobs) -> None:
    with_evaluator(archived)
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    (chain, *_) = services.archives_of(shown)
    assert not services.measured_archives(shown, None), "nobody has compared it"
    keep_comparison(chain.path, archived, compared_rows(), name=f"{archived}/judge.py:evaluate")
    for who in (None, judge):
        (seen,) = services.measured_archives(shown, who)
        assert (seen.config["codec"], seen.drop, seen.restore_cost) == (chain.codec, 0.05, 0.004)
    keep_comparison(chain.path, archived, compared_rows(), name="/another.py:evaluate")
    assert not services.measured_archives(shown, judge)
