"""Comparing archives in every state, whose code runs, and what the numbers are."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.model.problem import ServiceError
from inshrink_app.server import recent
from inshrink_app.services import jobs as job_services

import inshrink_core
from tests.app.builders import (
    SAMPLE,
    archives,
    button,
    charts,
    compared_rows,
    judged,
    keep_comparison,
    texts,
    write_run,
)
from tests.app.job_stubs import STEPS, option, wait, work

EVALUATOR = """
import pathlib

def evaluate(state):
    pathlib.Path({marker!r}).touch()
    return {{"loss": float(sum(value.abs().sum() for value in state.values()))}}
"""


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "original": 0.9,
        "restored": 0.89,
        "drop": 0.011,
        "divergence": 1e-4,
        "stale_drop": 0.2,
        "stale_divergence": 1e-2,
        "standard_error": 0.01,
        "metric": "accuracy",
        "direction": "higher",
        "n": 540,
        **changes,
    }


def errors(**changes: Any) -> dict[str, Any]:
    rows = [
        {
            "step": 10,
            "tensor": "a",
            "codec": "exact/1",
            "max_abs": 0.0,
            "relative_rms": 0.0,
            "bit_exact": True,
        },
        {"step": 10, "tensor": "b", "codec": "x/1", "max_abs": 0.1, "relative_rms": 0.01, "bit_exact": False},
        {
            "step": 20,
            "tensor": "<b>",
            "codec": "x/1",
            "max_abs": 0.1,
            "relative_rms": 0.2,
            "bit_exact": False,
        },
        {"step": 20, "tensor": "z", "codec": "x/1", "max_abs": 0.3, "relative_rms": None, "bit_exact": False},
    ]
    document = {"ok": True, "deep": False, "frames": 4, "problems": [], "notes": [], "missing_steps": []}
    return document | {"errors": rows} | changes


def with_evaluator(run: Path) -> Path:
    """Give a run an evaluator that leaves a mark where it is executed; return where."""
    marker = run.parent / "executed"
    judged(run, EVALUATOR.format(marker=str(marker)))
    return marker


def opened(app: Any) -> Any:
    """Open the evaluator in the header, which a run of the script closes in these tests alone."""
    app.session_state["header.evaluator"] = True
    return app.run()


def trust(app: Any) -> Any:
    """Return the consent in the header."""
    return next(box for box in opened(app).checkbox if box.label.startswith("Trust"))


def test_a_run_without_an_archive_says_so_and_offers_what_needs_none(root, jobs):
    app = archives("compare", write_run(root / "run", (1,)))
    assert "no archive yet" in texts(app)
    assert app.session_state["archives.panel"] == "pack"


def test_an_archive_without_its_run_asks_for_it(archived, jobs):
    archive = archived.with_name("run.inshrink")
    archived.rename(archived.with_name("elsewhere"))
    assert "needs the original checkpoints" in texts(archives("compare", archive))
    app = archives("compare", archive, original=str(archived.with_name("elsewhere")))
    assert button(app, "Compare")
    app = archives("compare", archive, original="/etc")
    assert "outside of the folders" in texts(app)


def test_nothing_of_a_run_is_executed_without_consent(archived, jobs):
    marker = with_evaluator(archived)
    app = archives("compare", archived, evaluator=True)
    assert button(app, "Compare").disabled
    assert any("pathlib.Path" in code.value for code in app.code)
    trust(app).check().run()
    assert not button(app, "Compare").disabled
    assert jobs.started == []
    assert not marker.exists()


def test_code_that_changed_after_consent_is_not_executed(archived, tmp_path):
    marker = with_evaluator(archived)
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    assert judge is not None
    (archived / "judge.py").write_text("raise SystemExit")
    archive = archived.with_name("run.inshrink")
    own = services.comparison(shown, [archive], (10,), judge)
    given = replace(own, trust_run=False, evaluator=f"{archived}/judge.py:evaluate")
    for request, trusted in ((own, judge.trusted), (own, ""), (given, judge.trusted), (given, "")):
        job = work(tmp_path / "jobs", request, trusted=trusted)
        assert job.state == "failed"
        assert ("not what was trusted" if trusted else "cannot have code executed") in job.problem.what
    assert not marker.exists()


def test_an_evaluator_named_by_a_relative_path_is_looked_for_in_the_run(archived, jobs, monkeypatch):
    (archived / "own.py").write_text("def evaluate(state):\n    return {'loss': 1.0}\n")
    monkeypatch.chdir("/")
    shown = services.load_subject(str(archived))
    judge = services.given_evaluator("own.py:evaluate", shown)
    assert judge.spec == f"{archived / 'own.py'}:evaluate"
    with pytest.raises(ServiceError, match="outside"):
        services.given_evaluator("../../../etc/passwd", shown)


def test_a_model_is_judged_by_its_own_samples_where_the_reader_writes_auto(archived, jobs, tmp_path):
    shown = services.load_subject(str(archived))
    judge = services.given_evaluator(" auto ", shown)
    assert judge.fields == {"evaluator": "auto"}
    assert judge.is_bundled
    archive = archived.with_name("run.inshrink")
    job = work(tmp_path / "jobs", services.comparison(shown, [archive], (10,), judge), trusted=judge.trusted)
    assert job.state == "failed"
    assert "there is no config.json" in job.problem.what


def test_the_bundled_evaluator_needs_no_consent_and_a_changed_copy_does(root):
    judge = services.evaluator_of(services.load_subject(str(SAMPLE)))
    assert judge.is_bundled
    copy = root / "digits-cnn"
    shutil.copytree(SAMPLE, copy, ignore=shutil.ignore_patterns("step_*", ".inshrink", "__pycache__"))
    shutil.copy(SAMPLE / "step_000010.pt", copy)
    (copy / "evaluator.py").write_text("import os\n")
    changed = services.evaluator_of(services.load_subject(str(copy)))
    assert not changed.is_bundled


def test_an_evaluator_outside_of_the_run_is_refused(archived):
    (archived.parent / "judge.py").write_text("")
    (archived / "inshrink.toml").write_text('[evaluator]\nfile = "../judge.py"\n')
    with pytest.raises(ServiceError, match="outside"):
        services.evaluator_of(services.load_subject(str(archived)))


def trusted(run: Path) -> None:
    """Give a run an evaluator that its reader trusts."""
    with_evaluator(run)
    judge = run / "judge.py"
    recent.trust(judge, hashlib.sha256(judge.read_bytes()).hexdigest())


def compare_page(archived: Path, **query: str) -> Any:
    trusted(archived)
    app = archives("compare", archived, **query)
    button(app, "Compare").click().run()
    return app


def test_what_was_found_is_drawn_and_listed(archived, jobs):
    archive = archived.with_name("run.inshrink")
    rows = [compared_rows(step=10, restore_cost=0.006), compared_rows(drop=0.0, restore_cost=0.001)]
    rows += [compared_rows(step=30, restore_cost=0.006), compared_rows(step=40, restore_cost=None)]
    keep_comparison(archive, archived, [one for (one,) in rows])
    trusted(archived)
    app = archives("compare", archived)
    button(app, "Measure again").click().run()
    (request,) = jobs.started
    assert option(jobs.last, "--steps") == ",".join(map(str, STEPS))
    assert {"--trust-run", "--again"} <= {*jobs.last}, "everything was measured before"
    assert len(request.trusted) == 64
    assert charts(app) == 3
    (line,) = app.dataframe[0].value.to_dict("records")
    assert (line["drop of loss"], line["restore cost"]) == (pytest.approx(5.0), pytest.approx(0.6))
    assert line["ratio"] == services.chain_of(str(archive)).ratio_total
    every = next(one.value for one in app.dataframe if "restored" in one.value)
    assert list(every["bound"].fillna("")) == ["broken", "kept", "broken", ""]


def test_each_metric_that_was_measured_is_a_column_and_a_chart(archived, jobs):
    archive = archived.with_name("run.inshrink")
    keep_comparison(archive, archived, compared_rows())
    keep_comparison(archive, archived, compared_rows(drop=0.25), metric="mIoU")
    trusted(archived)
    app = archives("compare", archived)
    (line,) = app.dataframe[0].value.to_dict("records")
    assert (line["drop of loss"], line["drop of mIoU"]) == (pytest.approx(5.0), pytest.approx(25.0))
    assert charts(app) == 4
    app.session_state["compare.metrics"] = ["loss", "mIoU"]
    app.run()
    next(one for one in app.button if one.label in ("Compare", "Measure again")).click().run()
    assert [option(words, "--eval-metric") for words in jobs.words()] == ["loss", "mIoU"]


def test_several_archives_are_lines_of_one_table_and_a_picture_of_size_against_cost(archived, jobs):
    other = archived.with_name("run-other.inshrink")
    inshrink_core.compress(archived, other, config={"coarseness": 8.0})
    first = archived.with_name("run.inshrink")
    for path, cost in ((first, 0.0), (other, 0.006)):
        keep_comparison(path, archived, compared_rows(restore_cost=cost))
    app = archives("compare", archived)
    app.session_state["archives.chosen"] = [str(first), str(other)]
    app.run()
    table = app.dataframe[0].value
    assert list(table["archive"]) == ["run.inshrink", "run-other.inshrink"]
    assert list(table["bound"]) == ["exact", "broken"]
    assert table["ratio"][1] == services.chain_of(str(other)).ratio_total
    assert charts(app) == 4


def test_a_comparison_at_work_shows_what_it_has_found_so_far(archived, jobs):
    jobs.state = "running"
    app = compare_page(archived)
    assert button(app, "Cancel")
    assert charts(app) == 0
    jobs.kept[0].rows.append({"of": str(archived.with_name("run.inshrink")), **row(10)})
    app.run()
    assert charts(app) == 2
    jobs.kept[0].rows[:] = [jobs.kept[0].rows[0] | {"drop": None, "divergence": None, "standard_error": None}]
    app.run()
    assert charts(app) == 1


def test_the_numbers_are_those_of_the_command_line_and_a_second_attempt_measures_nothing_again(
    archived, tmp_path
):
    marker = with_evaluator(archived)
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    assert judge is not None
    archive = archived.with_name("run.inshrink")
    words = services.comparison(shown, [archive], STEPS, judge)
    job = work(tmp_path, words, trusted=judge.trusted)
    assert marker.exists()
    theirs = inshrink_core.compare(archive, archived, trust_run=True)
    assert job.result == theirs.to_json() | {"measured_at": None}
    (mine,) = services.compared(job)
    found = mine.comparison
    assert (found.steps, found.metric, mine.n_samples) == (theirs.steps, "loss", None)

    marker.unlink()
    again = JobRegistry(job_services.start_process, tmp_path)
    assert wait(again.resume(job.job_id)).state == "finished"
    assert not marker.exists()
    (known,) = services.compared(again.jobs()[0])
    assert known.comparison == replace(mine.comparison, measured_at=known.comparison.measured_at)


def test_tensors_are_listed_the_worst_first_with_what_is_bit_exact(archived, jobs):
    jobs.answers["verify"] = errors()
    app = archives("tensors", archived)
    button(app, "Measure errors").click().run()
    assert option(jobs.last, "--against") == str(archived)
    assert "1 of 4 bit-exact" in texts(app)
    table = app.dataframe[-1].value
    assert list(table["tensor"]) == ["z", "<b>", "b", "a"]
    assert list(table["bits"]) == ["lossy", "lossy", "lossy", "exact"]
    app.toggle(key="errors.lossy").set_value(True).run()
    assert len(app.dataframe[-1].value) == 3
    app.text_input(key="errors.filter").set_value("nothing").run()
    assert "No tensor matches" in texts(app)


def test_many_tensors_are_cut_on_screen_and_whole_in_the_files(archived, jobs):
    rows = [errors()["errors"][1] | {"tensor": f"t{i}"} for i in range(5000)]
    jobs.answers["verify"] = errors(errors=rows)
    app = archives("tensors", archived)
    button(app, "Measure errors").click().run()
    assert len(app.dataframe[-1].value) == 2000
    assert "The worst 2,000 of 5,000" in texts(app)


def test_another_run_than_the_archived_one_is_told(archived, jobs):
    problem = {"where": "step 10", "what": "this is not the checkpoint that was archived", "remedy": "x"}
    jobs.answers["verify"] = errors(ok=False, problems=[problem], errors=[])
    app = archives("tensors", archived)
    button(app, "Measure errors").click().run()
    assert "not the checkpoint" in texts(app)


def test_only_shipped_trainings_are_executed(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    job = work(tmp_path / "jobs", ["rehearse", f"{tmp_path}/evil.py:Task", "-o", str(tmp_path)])
    assert job.state == "failed"
    assert "cannot have code executed" in job.problem.what
    assert not (tmp_path / "owned").exists()


def test_trust_is_remembered_for_a_file_as_it_is(archived, jobs):
    with_evaluator(archived)
    trust(archives("compare", archived)).check().run()
    assert trust(archives("compare", archived)).value
    (archived / "judge.py").write_text("def evaluate(state): ...\n")
    app = archives("compare", archived, evaluator=True)
    assert not trust(app).value
    trust(app).check().run()
    trust(app).uncheck().run()
    assert not trust(archives("compare", archived)).value


def test_the_command_that_writes_an_evaluator_is_shown_and_the_evaluator_tried(archived, jobs):
    jobs.answers["evaluate"] = {
        "step": 40, "metric": "loss", "direction": "lower", "metrics": {"loss": 0.25, "<b>": 1.0},
        "log_probs": [540, 10], "predictions": None, "printed": "hello", "seconds": 0.5,
    }  # fmt: skip
    judge = archived / "evaluator.py"
    app = archives("compare", archived, evaluator=True)
    assert f"inshrink evaluate {archived} --write {judge}" in texts(app)
    judge.write_text("def evaluate(state): ...\n")
    services.choose(services.load_subject(str(archived)), evaluator="evaluator.py")
    app = archives("compare", archived, evaluator=True)
    assert button(opened(app), "Try on one step").disabled
    trust(app).check().run()
    button(opened(app), "Try on one step").click().run()
    assert jobs.last[:2] == ["evaluate", str(archived)]
    assert option(jobs.last, "--evaluator") == f"{judge}:evaluate"
    assert jobs.started[-1].trusted == hashlib.sha256(judge.read_bytes()).hexdigest()
    assert next(m for m in opened(app).metric if m.label == "loss").value == "0.250"
    assert "so a divergence can be measured" in texts(app)
    assert "hello" in texts(app)
