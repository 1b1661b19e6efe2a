"""The Search page in every state, and that it does what the command line does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from inshrink_app import services
from inshrink_app.jobs.files import jobs_folder
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.pages.allocate import allocating
from inshrink_app.services import Searched
from inshrink_app.services import jobs as job_services

import inshrink_core
from inshrink_core.cli import main
from inshrink_core.verbs.search import Search
from tests.app.builders import SAMPLE, button, charts, explorer, judged, texts, write_run
from tests.app.job_stubs import STEPS, option, wait, work
from tests.app.search_builders import config, document, put, trial
from tests.app.test_app_compare import trust, with_evaluator
from tests.app.test_app_snippets import snippets


def test_a_run_without_an_evaluator_asks_for_one_and_still_has_its_editor(root, jobs):
    app = explorer("allocate", run=str(write_run(root / "run")))
    assert "names no evaluator" in texts(app)
    assert button(app, "Search").disabled
    assert button(app, "Apply to compress")


def test_an_archive_leads_to_the_run_it_was_made_from(archived, jobs):
    app = explorer("allocate", run=str(archived.with_name("run.inshrink")))
    assert "needs the original run" in texts(app)
    button(app, "Search on this run").click().run()
    assert "How coarse may a frame be?" in texts(app)


def test_no_code_of_a_run_is_executed_before_it_is_trusted_and_then_its_digest_goes_along(root, jobs):
    run = write_run(root / "run")
    marker = with_evaluator(run)
    app = explorer("allocate", run=str(run))
    trust(app).check().run()
    button(app, "Search").click().run()
    assert not marker.exists()
    assert len(jobs.started[-1].trusted) == 64
    assert jobs.last[:2] == ["search", str(run)]
    assert option(jobs.last, "--max-restore-cost") == "0.003"
    assert "--steps" not in jobs.last, "all of them"
    assert jobs.kept[-1].job_id in app.query_params["job"]


def test_the_bundled_sample_needs_no_consent(root, jobs):
    app = explorer("allocate", run=str(SAMPLE), goal="ratio", chain="recent", codec="uniform")
    assert not button(app, "Search").disabled
    button(app, "Search").click().run()
    assert not jobs.started[-1].trusted
    assert (option(jobs.last, "--target-ratio"), option(jobs.last, "--codec")) == ("30.0", "uniform")
    assert not {"--max-drop", "--trust-run"} & set(jobs.last)
    assert len(str(option(jobs.last, "--steps")).split(",")) == 8


def test_trials_are_drawn_as_they_arrive_with_what_is_left_and_a_way_to_cancel(root, jobs):
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, "running")
    job.rows[:] = document()["trials"][:6]
    app = explorer("allocate", run=str(run))
    assert charts(app) == 1
    assert "Best so far 10.0×" in texts(app)
    assert "about 7 evaluations left" in texts(app)
    button(app, "Cancel").click().run()
    assert job.state == "cancelled"
    assert "This was cancelled" in texts(app)
    assert charts(app) == 1
    button(app, "Resume").click().run()
    assert job.state == "running"


def test_what_was_found_is_told_with_its_table_and_loaded_into_the_editor(root, jobs):
    run = write_run(root / "run", STEPS)
    job = put(jobs, run, result=document())
    app = explorer("allocate", run=str(run), job=job.job_id)
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Size of the weights"][1] == "20.0×, measured"
    assert told["Drop"] == ("0.20 %", "worst step")
    assert "20.0× of the weights, worst drop 0.20 %" in texts(app).replace("\\", "").replace("\u2060", "")
    assert sum(metric.label == "Divergence" for metric in app.metric) == 1, "told once"
    app.session_state["allocate.table"] = "measured"
    app.run()
    assert "\\<b\\>note" in texts(app)
    assert "At 2 steps of 4 the previous checkpoint" in texts(app).replace("\\", "")
    table = next(one.value for one in app.dataframe if "is" in one.value.columns)
    assert list(table["is"]) == ["keeps the bounds", "best", "given up"]
    assert set(table["figures"]) == {"measured"}
    assert "loaded: coarseness 2.0".replace("2.0", "2") in texts(app).replace("\\", "").replace("\u2060", "")


@pytest.mark.parametrize("ratio", [30.0, 10.0])
def test_the_commands_write_what_has_won_one_configuration_or_settings_by_step(root, jobs, ratio):
    run = write_run(root / "run", STEPS)
    told = {"ratio_weights": ratio, "drop": 0.001, "divergence": 1e-4, "restore_cost": None}
    put(jobs, run, result=document(by_step=told))
    _, compress, *_ = snippets(explorer("allocate", run=str(run), goal="drop"))[0]
    assert compress[:2] == ["compress", str(run)]
    assert ("--config" in compress, "--max-drop" in compress) == (
        (False, True) if ratio > 20 else (True, False)
    )


def test_a_search_that_found_nothing_says_what_to_do(root, jobs):
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=document(best=None, trials=[trial(10, 9.0, divergence=0.5)]))
    app = explorer("allocate", run=str(run))
    assert "No configuration that was tried keeps the bounds" in texts(app)


def test_a_finished_search_stays_when_a_repeated_one_is_interrupted_and_gets_its_trials(root, jobs):
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=document())
    later = put(jobs, run, "interrupted")
    later.rows[:] = [trial(step, 3.0) for step in STEPS]
    app = explorer("allocate", run=str(run))
    assert button(app, "Resume")
    assert "Best of the search: coarseness 2 · 20.0×" in texts(app).replace("\\", "").replace("\u2060", "")
    app.session_state["allocate.table"] = "measured"
    app.run()
    table = next(one.value for one in app.dataframe if "figures" in one.value.columns)
    assert "coarseness 3" in list(table["configuration"])


def test_a_configuration_beyond_the_bound_is_applied_only_when_that_is_meant(root, jobs, monkeypatch):
    run = write_run(root / "run", STEPS)
    put(jobs, run, result=document())
    app = explorer("allocate", run=str(run))
    assert not button(app, "Apply to compress").disabled
    app.session_state["search.edit"].change(config(9.0))
    app.session_state["search.edit"].is_estimated = True
    figures = {"ratio_weights": 30.0, "ratio_total": None, "drop": 0.02, "divergence": None, "n_trials": 1}
    monkeypatch.setattr(allocating, "estimated", lambda *_: SimpleNamespace(**figures))
    app.run()
    assert "Beyond the bound on the drop, estimated" in texts(app)
    assert button(app, "Apply to compress").disabled
    next(box for box in app.checkbox if box.label == "Apply it all the same").check().run()
    assert not button(app, "Apply to compress").disabled


def test_what_is_edited_is_measured_in_the_background_until_the_next_change(root, jobs):
    run = write_run(root / "run", STEPS)
    with_evaluator(run)
    jobs.state = "running"
    app = explorer("allocate", run=str(run))
    assert not app.toggle, "nothing of it without consent"
    trust(app).check().run()
    app.toggle[0].set_value(True).run()
    estimate, first = jobs.kept
    assert estimate.verb == "estimate"
    compress, compare = jobs.words(1)
    assert compress[:2] == ["compress", str(run)]
    assert compare[:1] + compare[2:4] == ["compare", "--against", str(run)]
    assert option(compress, "--output") == compare[1]
    assert len(first.work.trusted) == 64
    app.session_state["search.edit"].change({"codec": "lattice", "settings": {"coarseness": 9.0}})
    app.run()
    assert [job.state for job in jobs.kept[1:]] == ["cancelled", "running"]
    assert "coarseness=9.0" in jobs.words(2)[0]
    assert services.describe(first).page == "allocate"
    app.toggle[0].set_value(False).run()
    assert [job.state for job in jobs.kept[1:]] == ["cancelled", "cancelled"]


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


def test_the_commands_and_the_lines_of_the_page_do_what_they_say(archived, jobs, monkeypatch, capsys):
    judged(archived)
    monkeypatch.chdir(archived.parent)
    commands, python = snippets(explorer("allocate", run=str(archived), codec="uniform"))
    for words in commands:
        assert main(words) == 0, words
    made = inshrink_core.open(archived.with_name("run-searched.inshrink"))
    assert made.steps == STEPS
    exec(compile(python, "snippet", "exec"), {})
    assert "'codec': 'uniform'" in capsys.readouterr().out


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
