"""The Search page in every state, what trials become, and the configuration that is carried on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import search_config, search_figure, services
from inshrink_app.actions.search import run as run_search
from inshrink_app.report import Report
from inshrink_app.search_tables import CODECS, Searched, SearchPoint, SearchRequest, front
from inshrink_app.tables import Problem, ServiceError

from inshrink_core.cli import main
from inshrink_core.errors import UntrustedCodeError
from tests.app.builders import SAMPLE, button, charts, explorer, texts, write_run
from tests.app.job_stubs import STEPS, StubJobs, archived, archived_template, jobs
from tests.app.test_app_compare import trust, with_evaluator
from tests.app.test_app_snippets import snippets

__all__ = ["archived", "archived_template", "jobs"]


def config(coarseness: float, **more: Any) -> dict[str, Any]:
    return {"codec": "lattice", "settings": {"coarseness": coarseness}, **more}


def trial(step: int, coarseness: float, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "config": config(coarseness),
        "raw_weights": 1000,
        "weights_nbytes": int(100 / coarseness),
        "drop": 0.001 * coarseness,
        "divergence": 1e-4 * coarseness,
        "drop_error": None,
        "restore_gain": 0.9,
        "restore_noise": 0.5,
        "damage": 1e-9,
        "seconds": 0.5,
        "failure": "",
        "ratio_weights": 10.0,
        **changes,
    }


def document(**changes: Any) -> dict[str, Any]:
    """Return what a search of three configurations would leave; the coarsest broke the bound early."""
    trials = [trial(step, coarseness) for coarseness in (1.0, 2.0) for step in STEPS]
    trials.append(trial(STEPS[0], 9.0, divergence=0.5))
    return {
        "best": {"config": config(2.0)},
        "bounds": {"drop": 0.01, "divergence": 0.003},
        "target_ratio": None,
        "strategy": "allocation",
        "metric": "accuracy",
        "direction": "higher",
        "steps": list(STEPS),
        "uninformative": [20, 30],
        "evaluations": 9,
        "trials": trials,
        "rank_correlation": 0.9,
        "seconds": 12.0,
        "log": None,
        "notes": ["<b>note</b>"],
        **changes,
    }


def put(jobs: StubJobs, run: Path, state: str = "finished", result: Any = None, **request: Any) -> Any:
    asked = {"kind": "search", "path": str(run), "steps": list(STEPS), "codec": "lattice", "max_drop": 0.01}
    asked |= {"strategy": "auto", "budget": None, "evaluator": "", "trusted": ""}
    return jobs.put("search", state, key=("search", str(run)), result=result, **(asked | request))


def point(ratio: float, drop: float | None, **changes: Any) -> SearchPoint:
    values: dict[str, Any] = {
        "label": "x",
        "config": config(1.0),
        "ratio": ratio,
        "drop": drop,
        "divergence": None,
        "n_steps": 4,
        "whole": True,
        "keeps": True,
    }
    return SearchPoint(**(values | changes))


# Before anything is searched


def test_a_run_that_was_never_searched_is_told_what_a_search_does(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run")
    with_evaluator(run)
    app = explorer("search", run=str(run))
    assert not app.exception
    assert "Nothing was searched yet" in texts(app)
    assert button(app, "Search").disabled
    assert charts(app) == 0
    assert sum(b.proto.type == "primary" for b in app.button) == 1


def test_a_run_without_an_evaluator_asks_for_one_and_still_has_its_editor(root: Path, jobs: StubJobs) -> None:
    app = explorer("search", run=str(write_run(root / "run")))
    assert not app.exception
    assert "names no evaluator" in texts(app)
    assert not any(b.label == "Search" for b in app.button)
    assert button(app, "Apply to compress")


def test_one_checkpoint_is_told_that_only_a_keyframe_is_searched(root: Path, jobs: StubJobs) -> None:
    app = explorer("search", run=str(write_run(root / "one", (5,))))
    assert not app.exception
    assert "one checkpoint" in texts(app)


def test_an_archive_leads_to_the_run_it_was_made_from(archived: Path, jobs: StubJobs) -> None:
    app = explorer("search", run=str(archived.with_name("run.inshrink")))
    assert not app.exception
    assert "needs the original run" in texts(app)
    button(app, "Search on this run").click().run()
    assert not app.exception
    assert "Nothing was searched yet" in texts(app)


def test_an_archive_whose_run_is_not_known_leads_to_the_open_page(archived: Path, jobs: StubJobs) -> None:
    archived.rename(archived.with_name("elsewhere"))
    app = explorer("search", run=str(archived.with_name("run.inshrink")))
    assert not app.exception
    assert button(app, "Open another run")


# Consent


def test_no_code_of_a_run_is_executed_before_it_is_trusted_and_then_its_digest_goes_along(
    root: Path, jobs: StubJobs
) -> None:
    run = write_run(root / "run")
    marker = with_evaluator(run)
    app = explorer("search", run=str(run))
    trust(app).check().run()
    button(app, "Search").click().run()
    assert not app.exception
    assert not marker.exists()
    asked = jobs.started[0]
    assert len(asked["trusted"]) == 64
    assert (asked["task"], asked["kind"], asked["max_drop"]) == ("search", "search", 0.01)
    assert asked["steps"] == [10, 20, 30]
    assert jobs.kept[0].job_id in app.query_params["job"]


def test_the_bundled_sample_needs_no_consent(root: Path, jobs: StubJobs) -> None:
    app = explorer("search", run=str(SAMPLE), goal="ratio", chain="recent", codec="uniform")
    assert not button(app, "Search").disabled
    button(app, "Search").click().run()
    assert not app.exception
    asked = jobs.started[0]
    assert (asked["trusted"], asked["target_ratio"], asked["codec"]) == ("", 30.0, "uniform")
    assert "max_drop" not in asked
    assert len(asked["steps"]) == 8


# Running and ended


def test_trials_are_drawn_as_they_arrive_with_what_is_left_and_a_way_to_cancel(
    root: Path, jobs: StubJobs
) -> None:
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, "running")
    job.rows[:] = document()["trials"][:6]
    app = explorer("search", run=str(run))
    assert not app.exception
    assert charts(app) == 1
    assert "Best so far 10.0×" in texts(app)
    assert "at most 7 evaluations left" in texts(app)
    button(app, "Cancel").click().run()
    assert not app.exception
    assert job.state == "cancelled"
    assert "This was cancelled" in texts(app)
    assert charts(app) == 1
    button(app, "Resume").click().run()
    assert job.state == "running"


def test_a_search_that_has_not_begun_to_measure_says_so(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    put(jobs, run, "running").total = 0
    app = explorer("search", run=str(run))
    assert not app.exception
    assert charts(app) == 0


def test_what_was_found_is_told_with_its_table_and_loaded_into_the_editor(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, result=document())
    app = explorer("search", run=str(run), job=job.job_id)
    assert not app.exception
    told = {metric.label: metric.value for metric in app.metric}
    assert told["Ratio, weights"] == "20.0×"
    assert told["Worst drop"] == "0.2 %"
    assert told["Restore gain"] == "0.900"
    assert "\\<b\\>note" in texts(app)
    assert "At 2 steps of 4 the stale copy" in texts(app).replace("\\", "")
    table = app.dataframe[0].value
    assert list(table["is"]) == ["keeps the bounds, on the front", "best", "given up"]
    assert set(table["figures"]) == {"measured"}
    assert "loaded: coarseness 2.0".replace("2.0", "2") in texts(app).replace("\\", "").replace("\u2060", "")


def test_a_search_that_found_nothing_says_what_to_do(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=document(best=None, trials=[trial(10, 9.0, divergence=0.5)]))
    app = explorer("search", run=str(run))
    assert not app.exception
    assert "No configuration that was tried keeps the bounds" in texts(app)


def test_a_search_that_failed_says_why(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    put(jobs, run, "failed").problem = Problem("the evaluator <i>raised</i>", "judge.py", "look at it")
    app = explorer("search", run=str(run))
    assert not app.exception
    assert len(app.error) == 1
    assert "judge.py" in texts(app)
    assert button(app, "Try again")


def test_a_search_that_an_ended_explorer_left_is_resumed(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    put(jobs, run, "interrupted")
    app = explorer("search", run=str(run))
    assert "Nothing is lost" in texts(app)
    assert button(app, "Resume")


def test_a_result_that_cannot_be_read_is_no_traceback(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=None)
    app = explorer("search", run=str(run))
    assert not app.exception


def test_the_page_of_jobs_tells_a_search_and_leads_to_it(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, result=document())
    text = services.describe(job)
    assert text.title == "Search lattice on run"
    assert (text.page, text.query["job"]) == ("search", job.job_id)
    other = put(jobs, run, kind="baselines")
    assert services.describe(other).title == "Measure baselines of run"


# Baselines


def test_baselines_are_measured_when_asked_for_and_drawn_by_their_names(root: Path, jobs: StubJobs) -> None:
    run = write_run(root / "run", STEPS)
    with_evaluator(run)
    jobs.answers["search"] = {
        "steps": list(STEPS),
        "trials": [trial(s, 1.0, config={"codec": "uniform", "settings": {"bits": 8}}) for s in STEPS],
    }
    app = explorer("search", run=str(run))
    trust(app).check().run()
    button(app, "Measure baselines").click().run()
    assert not app.exception
    assert jobs.started[0]["kind"] == "baselines"
    assert charts(app) == 1
    found = services.baselines(jobs.kept[0])
    assert [(one.baseline, one.ratio) for one in found] == [("Uniform, 8 bit", 10.0)]


# The editor


def test_the_editor_estimates_and_says_that_it_does(archived: Path, jobs: StubJobs) -> None:
    app = explorer("search", run=str(archived))
    button(app, "Estimate").click().run()
    assert not app.exception
    below = {metric.delta for metric in app.metric}
    assert below == {"estimated"}
    assert "No trials tell yet" in texts(app)
    assert button(app, "Undo").disabled


def test_a_configuration_is_carried_on_to_the_export_and_can_be_dropped_there(
    archived: Path, jobs: StubJobs
) -> None:
    found = config(2.0, override=[{"layer_type": "linear", "coarseness": 3.5}])
    trials = [trial(step, 2.0, config=found) for step in STEPS]
    put(jobs, archived, result=document(best={"config": found}, trials=trials))
    app = explorer("search", run=str(archived))
    button(app, "Apply to compress").click().run()
    assert not app.exception
    assert "Configuration from the Search page" in texts(app)
    # A page that is switched to from within a script is not where the next click goes, in a test.
    app.switch_page("views/export.py").run()
    button(app, "Export").click().run()
    assert not app.exception
    asked = jobs.started[0]
    assert asked["codec"] == "lattice"
    assert asked["config"] == {"coarseness": 2.0, "overrides": [{"layer_type": "linear", "coarseness": 3.5}]}
    commands = next(code.value for code in app.code if code.value.startswith("inshrink compress"))
    assert "--set" in commands
    button(app, "Choose settings here instead").click().run()
    assert not app.exception
    assert app.slider(key="export.coarseness")


@pytest.mark.parametrize("told", ["[]", '{"run": "RUN", "config": {"codec": 3}}', "[" * 9999])
def test_what_a_link_says_was_carried_on_is_not_trusted(archived: Path, jobs: StubJobs, told: str) -> None:
    app = explorer("export", run=str(archived), carried=told.replace("RUN", str(archived)))
    assert not app.exception
    assert "Configuration from the Search page" not in texts(app)


def test_a_setting_that_no_codec_has_and_a_pattern_that_means_nothing_are_told(root: Path) -> None:
    shown = services.load_subject(str(write_run(root / "run")))
    with pytest.raises(ServiceError, match="no setting"):
        services.check_config({"codec": "lattice", "settings": {"rough": 1}})
    services.check_config(config(2.0, override=[{"match": "fc1.*", "coarseness": 1}]))
    overrides = [{"match": "fc1.*", "coarseness": 1}, {"match": "gone.*", "coarseness": 1}]
    assert services.unmatched_overrides(shown, config(2.0, override=overrides)) == ("gone.*",)
    assert services.unmatched_overrides(shown, config(2.0, override=[{"layer_type": "embedding"}]))


HOSTILE = {"match": 'a"]\n[x]\u007f\\*.é', "layer_type": "linear", "coarseness": 1.5}


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_file_of_a_configuration_is_what_the_command_line_reads(tmp_path: Path, form: str) -> None:
    from inshrink_core.cli.settings import given_settings, read_config_file
    from inshrink_core.session.config import make_configs

    wanted = config(2.5, override=[{"layer_type": "vector", "coarseness": 1}, HOSTILE])
    wanted["settings"] |= {"gain_per": "tensor", "exact": False}
    path = tmp_path / f"config.{form}"
    path.write_text(search_config.toml_text(wanted) if form == "toml" else json.dumps(wanted))
    told = read_config_file(path)
    assert told == wanted
    assert given_settings(told, []) == search_config.engine_settings(wanted)
    assert len(make_configs("lattice", given_settings(told, []))[1]) == 2


def test_rows_of_the_editor_become_the_configuration_they_came_from() -> None:
    wanted = config(2.5, override=[{"match": "*.head", "layer_type": "linear", "coarseness": 1.5}])
    rows = search_config.setting_rows(wanted), search_config.override_rows(wanted)
    assert search_config.edited("lattice", *rows) == wanted
    empty = [("linear", None, math.nan, ""), (None, None, None, None)]
    assert "override" not in search_config.edited("lattice", [("coarseness", "2"), (None, None)], empty[1:])
    with pytest.raises(ValueError, match="lacks its setting"):
        search_config.edited("lattice", [], empty)


def test_undo_goes_back_one_change_and_reset_to_what_was_loaded() -> None:
    edit = search_config.Edit("/run", config(1.0))
    edit.undo()
    edit.reset()
    assert (edit.config, edit.version) == (config(1.0), 0)
    loaded = point(9, 0.0, config=config(2.0))
    edit.load(loaded)
    edit.change(config(3.0))
    edit.change(config(3.0))
    assert edit.is_changed
    edit.reset()
    assert (edit.config, edit.is_changed) == (config(2.0), False)
    for wanted, origin in ((config(3.0), loaded), (config(2.0), loaded), (config(1.0), None)):
        edit.undo()
        assert (edit.config, edit.origin) == (wanted, origin)
    assert not edit.before


# Points, front and figure


def test_trials_of_a_configuration_become_one_point_and_the_last_word_counts(jobs: StubJobs) -> None:
    rows = [*document()["trials"], trial(10, 1.0, drop=0.009)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows)))
    assert [one.n_steps for one in found.points] == [4, 4, 1]
    assert [one.whole for one in found.points] == [True, True, False]
    assert [one.keeps for one in found.points] == [True, True, False]
    assert found.points[0].drop == 0.009
    assert found.best is found.points[1]


def test_a_failure_keeps_no_bound_and_a_missing_figure_none_either(jobs: StubJobs) -> None:
    rows = [trial(10, 1.0, failure="NaN", drop=None, divergence=None), trial(10, 2.0, divergence=None)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows, best=None)))
    assert [one.keeps for one in found.points] == [False, False]


def test_of_a_search_for_a_ratio_a_point_is_judged_by_it(jobs: StubJobs) -> None:
    told = document(best=None, bounds={"drop": None, "divergence": None})
    left = put(jobs, Path("/runs/x"), result=told, target_ratio=15.0, max_drop=None)
    found = services.searched(left)
    assert [found.verdict(one) for one in found.points] == [
        "below the ratio",
        "reaches the ratio",
        "reaches the ratio",
    ]
    assert found.best is found.points[1]


def test_the_front_holds_what_nothing_else_beats() -> None:
    points = [
        point(10, 0.1),
        point(20, 0.2),
        point(15, 0.3),
        point(30, None),
        point(40, 0.0, whole=False),
        point(20, 0.2),
        point(5, math.inf),
        point(25, -0.1),
    ]
    assert front(points, "drop") == (7,)
    assert front(points[:3], "drop") == (0, 1)
    assert front([], "drop") == ()


def test_the_figure_does_not_depend_on_anything_but_the_trials(jobs: StubJobs) -> None:
    found = services.searched(put(jobs, Path("/runs/x"), result=document()))
    for name in ("drop", "divergence"):
        first, second = (search_figure.search_figure(found, (), name) for _ in range(2))
        assert first.to_json() == second.to_json()
        assert {"On the front", "Not the whole chain", "Best"} <= {trace.name for trace in first.data}
        places = [row[0] for trace in first.data for row in (trace.customdata or ())]
        assert sorted(places) == [0, 1, 2]
    nothing = search_figure.search_figure(Searched(points=(), target_ratio=30.0), (point(9, 0.0),), "drop")
    assert len(nothing.layout.shapes) == 1


@pytest.mark.parametrize("spread", [1.0, 1.8, 30.0, 1e5])
def test_ticks_of_a_logarithmic_axis_are_told_apart(spread: float) -> None:
    points = (point(9, 0.0, divergence=4e-4), point(9 * spread, 0.0, divergence=4e-4 * spread))
    drawn = search_figure.search_figure(Searched(points=points), (), "divergence")
    for axis in (drawn.layout.xaxis, drawn.layout.yaxis):
        assert len(set(axis.ticktext)) == len(axis.tickvals) > 2


def test_hostile_labels_are_text_in_the_figure() -> None:
    hostile = point(9, 0.0, label="<img src=x>")
    drawn = search_figure.search_figure(Searched(points=(hostile,)), (), "drop")
    assert "<img" not in drawn.to_json().replace("\\u003c", "<")


@pytest.mark.parametrize(
    "points", [[], [{}], [{"customdata": [7]}], [{"customdata": ["x"]}], [{"customdata": [math.nan]}], ["x"]]
)
def test_a_click_that_makes_no_sense_picks_nothing(points: list[Any]) -> None:
    assert search_figure.clicked_point(points, 3) is None


def test_every_codec_and_strategy_that_is_offered_is_one_that_searches() -> None:
    from inshrink_core.search.space import Cube, space_of
    from inshrink_core.session.strategy import STRATEGIES

    for codec, (_, strategies) in CODECS.items():
        is_cube = isinstance(space_of(codec, frozenset()), Cube)
        refused = {"allocation", "bracket"} if is_cube else {"guided"}
        assert set(strategies) == set(STRATEGIES) - refused


def test_the_commands_and_the_lines_of_the_page_do_what_they_say(
    archived: Path, jobs: StubJobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import inshrink_core

    (archived / "judge.py").write_text("def evaluate(state):\n    return {'loss': float(len(state))}\n")
    (archived / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\nmetric = "loss"\n')
    monkeypatch.chdir(archived.parent)
    commands, python = snippets(explorer("search", run=str(archived), codec="uniform"))
    for words in commands:
        assert main(words) == 0, words
    made = inshrink_core.open(archived.with_name("run-searched.inshrink"))
    assert made.steps == STEPS
    exec(compile(python, "snippet", "exec"), {})
    assert "'codec': 'uniform'" in capsys.readouterr().out


def test_the_worker_searches_and_measures_baselines_and_what_it_leaves_is_read(
    archived: Path, tmp_path: Path, jobs: StubJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    (archived / "judge.py").write_text("def evaluate(state):\n    return {'loss': float(len(state))}\n")
    (archived / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\nmetric = "loss"\n')
    judge = services.evaluator_of(services.load_subject(str(archived)))
    assert judge is not None
    asked = {"path": str(archived), "steps": [10, 20], "evaluator": "", "trusted": judge.digest}
    asked |= {"codec": "uniform", "strategy": "grid", "budget": 3, "max_drop": 0.01}
    for kind, n_points in (("search", 3), ("baselines", len(services.BASELINE_NAMES))):
        output = tmp_path / kind / "result"
        output.parent.mkdir()
        run_search({**asked, "kind": kind, "output": str(output)}, Report())
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert sum("row" in row for row in rows) == 2 * n_points
        left = jobs.put("search", "finished", result=json.loads(output.read_text()), **asked)
        assert len(services.searched(left).points) == n_points
    assert [one.baseline for one in services.baselines(left)] == list(services.BASELINE_NAMES)
    # What was cut off is told again from what was kept, and is not measured again.
    run_search({**asked, "kind": "search", "output": str(tmp_path / "search" / "result")}, Report())
    assert sum('"row"' in line for line in capsys.readouterr().out.splitlines()) == 6
    assert json.loads((tmp_path / "search" / "result").read_text())["evaluations"] == 0
    (archived / "judge.py").write_text("raise SystemExit")
    with pytest.raises(UntrustedCodeError):
        run_search({**asked, "kind": "search", "output": str(tmp_path / "result")}, Report())


def test_the_limits_go_to_the_engine_under_its_own_names() -> None:
    request = SearchRequest(goal="ratio", target_ratio=12.0)
    assert request.limits() == {"target_ratio": 12.0}
    assert SearchRequest(goal="divergence").limits() == {"max_divergence": 0.003}
