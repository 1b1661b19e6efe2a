"""Comparing archives in every state, whose code runs, and what the numbers are."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inshrink_app import services
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.model.measured import known_by_metric
from inshrink_app.model.problem import ServiceError
from inshrink_app.services import jobs as job_services

import inshrink_core
from inshrink_core.errors import EvaluatorError
from tests.app.builders import (
    SAMPLE,
    archives,
    button,
    charts,
    compared_row,
    judged,
    keep_comparison,
    texts,
    trusted,
)
from tests.app.job_stubs import STEPS, option, performed, wait, work

EVALUATOR = """
import pathlib

def evaluate(state):
    pathlib.Path({marker!r}).touch()
    return {{"loss": float(sum(value.abs().sum() for value in state.values()))}}
"""


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


def test_an_archive_without_its_run_asks_for_it(archived, jobs):
    archive = archived.with_name("run.inshrink")
    archived.rename(archived.with_name("elsewhere"))
    assert "needs the original checkpoints" in texts(archives("compare", archive))
    app = archives("compare", archive, original=str(archived.with_name("elsewhere")))
    assert button(app, "Compare")
    app = archives("compare", archive, original="/etc")
    assert "outside of the folders" in texts(app)


def test_nothing_of_a_run_is_executed_without_consent_which_holds_for_a_file_as_it_is(archived, jobs):
    marker = with_evaluator(archived)
    app = archives("compare", archived, evaluator=True)
    assert button(app, "Compare").disabled
    assert any("pathlib.Path" in code.value for code in app.code)
    trust(app).check().run()
    assert not button(app, "Compare").disabled
    assert jobs.started == []
    assert not marker.exists()
    # Trust is remembered for a file as it is.
    assert trust(archives("compare", archived)).value
    (archived / "judge.py").write_text("def evaluate(state): ...\n")
    app = archives("compare", archived, evaluator=True)
    assert not trust(app).value
    trust(app).check().run()
    trust(app).uncheck().run()
    assert not trust(archives("compare", archived)).value


def test_an_evaluator_is_looked_for_in_the_run_and_auto_is_no_path(archived, monkeypatch):
    (archived / "own.py").write_text("def evaluate(state):\n    return {'loss': 1.0}\n")
    monkeypatch.chdir("/")
    shown = services.load_subject(str(archived))
    judge = services.given_evaluator("own.py:evaluate", shown)
    assert judge.spec == f"{archived / 'own.py'}:evaluate"
    with pytest.raises(ServiceError, match="outside"):
        services.given_evaluator("../../../etc/passwd", shown)
    judge = services.given_evaluator(" auto ", shown)
    assert (judge.fields, judge.is_bundled) == ({"evaluator": "auto"}, True)


def test_the_bundled_evaluator_needs_no_consent_and_a_changed_copy_does(root):
    assert services.evaluator_of(services.load_subject(str(SAMPLE))).is_bundled
    copy = root / "digits-cnn"
    shutil.copytree(SAMPLE, copy, ignore=shutil.ignore_patterns("step_*", ".inshrink", "__pycache__"))
    shutil.copy(SAMPLE / "step_000010.pt", copy)
    (copy / "evaluator.py").write_text("import os\n")
    assert not services.evaluator_of(services.load_subject(str(copy))).is_bundled


def test_an_evaluator_outside_of_the_run_is_refused(archived):
    (archived / "inshrink.toml").write_text('[evaluator]\nfile = "../judge.py"\n')
    with pytest.raises(ServiceError, match="outside"):
        services.evaluator_of(services.load_subject(str(archived)))


def test_what_was_found_is_drawn_and_listed_with_a_column_and_a_chart_for_each_metric(archived, jobs):
    archive = archived.with_name("run.inshrink")
    costs = {10: 0.006, 20: 0.001, 30: 0.006, 40: None}
    rows = [compared_row(step=step, restore_cost=cost) for step, cost in costs.items()]
    keep_comparison(archive, rows)
    trusted(archived)
    app = archives("compare", archived)
    button(app, "Measure again").click().run()
    (request,) = jobs.started
    assert option(jobs.last, "--steps") == ",".join(map(str, STEPS))
    assert {"--trust-run", "--again"} <= {*jobs.last}, "everything was measured before"
    assert len(request.trusted) == 64
    assert charts(app) == 3
    (line,) = app.dataframe[0].value.to_dict("records")
    assert (line["drop of loss"], line["restore cost"]) == (pytest.approx(5), pytest.approx(0.6))
    assert line["ratio"] == services.chain_of(str(archive)).ratio_total
    every = next(one.value for one in app.dataframe if "restored" in one.value)
    assert list(every["bound"].fillna("")) == ["broken", "kept", "broken", ""]
    # Each metric that was measured is a column and a chart.
    keep_comparison(archive, [compared_row(drop=0.25)], metric="mIoU")
    app = archives("compare", archived)
    (line,) = app.dataframe[0].value.to_dict("records")
    assert (line["drop of loss"], line["drop of mIoU"]) == (pytest.approx(5), pytest.approx(25))
    assert charts(app) == 4
    # The header's metric is the one that is measured.
    services.choose(services.load_subject(str(archived)), metric="acc", direction="higher")
    app = archives("compare", archived)
    button(app, "Compare").click().run()
    assert [option(words, "--eval-metric") for words in jobs.words()] == ["acc"]


def test_several_archives_are_lines_of_one_table_and_a_picture_of_size_against_cost(archived, jobs):
    other = archived.with_name("run-other.inshrink")
    inshrink_core.compress(archived, other, config={"coarseness": 8.0})
    first = archived.with_name("run.inshrink")
    for path, cost in ((first, 0.0), (other, 0.006)):
        keep_comparison(path, [compared_row(restore_cost=cost)])
    app = archives("compare", archived)
    app.session_state["archives.chosen"] = [str(first), str(other)]
    app.run()
    table = app.dataframe[0].value
    assert list(table["archive"]) == ["run.inshrink", "run-other.inshrink"]
    assert list(table["bound"]) == ["exact", "broken"]
    assert table["ratio"][1] == services.chain_of(str(other)).ratio_total
    assert charts(app) == 4


def test_an_archive_that_cannot_be_compared_is_left_out_and_the_others_are_compared(archived, jobs):
    trusted(archived, "def evaluate(state):\n    return {'loss': float(state['fc1.weight'].sum())}\n")
    first, part = (archived.with_name(f"run{name}.inshrink") for name in ("", "-part"))
    asked = {"step": 40, "weights_only": True, "exact": True, "without": ("fc1.weight",)}
    inshrink_core.verbs.export(first, part, **asked)
    shown = services.load_subject(str(archived))
    judge = services.trusted_evaluator(shown)
    request = services.comparison(shown, [part, first], STEPS, judge)
    jobs.put(request, shown=str(archived), result=performed(request).result)
    app = archives("compare", archived, archive=str(first))
    (left_out,) = [one.value for one in app.warning if "left out" in one.value]
    assert "which the checkpoint does not have" in left_out
    assert charts(app) > 0
    with pytest.raises(EvaluatorError):
        performed(replace(request, archives=(str(part),) * 2))


def test_numbers_are_those_of_the_command_line_and_nothing_is_measured_twice(archived, tmp_path):
    marker = with_evaluator(archived)
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    archive = archived.with_name("run.inshrink")
    words = services.comparison(shown, [archive], STEPS, judge)
    job = work(tmp_path, words, trusted=judge.trusted)
    assert marker.exists()
    theirs = inshrink_core.compare(archive, archived, trust_run=True)
    assert job.result == theirs.to_json() | {"measured_at": None}
    (mine,) = known_by_metric(services.chain_of(str(archive))).values()
    found = mine.comparison
    assert (found.steps, found.metric, mine.n_samples) == (theirs.steps, "loss", None)

    marker.unlink()
    again = JobRegistry(job_services.start_process, tmp_path)
    assert wait(again.resume(job.job_id)).state == "finished"
    assert not marker.exists()
    (known,) = known_by_metric(services.chain_of(str(archive))).values()
    assert known.comparison == mine.comparison


def test_tensors_are_listed_the_worst_first_with_what_is_bit_exact_and_problems_are_told(archived, jobs):
    names = ("step", "tensor", "codec", "max_abs", "relative_rms", "bit_exact")
    table = [
        (10, "a", "exact/1", 0.0, 0.0, True),
        (10, "b", "x/1", 0.1, 0.01, False),
        (20, "<b>", "x/1", 0.1, 0.2, False),
        (20, "z", "x/1", 0.3, None, False),
    ]
    rows = [dict(zip(names, values, strict=True)) for values in table]
    problem = {"where": "step 10", "what": "this is not the checkpoint that was archived", "remedy": "x"}
    jobs.answers["verify"] = {"ok": False, "problems": [problem], "missing_steps": [], "errors": rows}
    app = archives("tensors", archived)
    button(app, "Measure errors").click().run()
    assert option(jobs.last, "--against") == str(archived)
    assert "not the checkpoint" in texts(app)
    assert "1 of 4 bit-exact" in texts(app)
    table = app.dataframe[-1].value
    assert list(table["tensor"]) == ["z", "<b>", "b", "a"]
    assert list(table["bits"]) == ["lossy", "lossy", "lossy", "exact"]


def test_errors_of_a_weight_and_its_optimizer_state_are_told_apart(root, jobs):
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    (root / "run").mkdir()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, root / "run" / "step_10.pt")
    inshrink_core.compress(root / "run", root / "run.inshrink", codec="lossless")
    keys = ("weight", "weight@exp_avg", "weight@exp_avg_sq")
    row = {"step": 10, "codec": "x/1", "max_abs": 0.1, "relative_rms": 0.1, "bit_exact": False}
    rows = [{**row, "tensor": key} for key in keys]
    jobs.answers["verify"] = {"ok": True, "problems": [], "missing_steps": [], "errors": rows}
    app = archives("tensors", root / "run")
    button(app, "Measure errors").click().run()
    table = app.dataframe[-1].value
    assert dict(zip(table["tensor"], table["role"], strict=True)) == {
        key: key.partition("@")[2] or "weight" for key in keys
    }


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
    assert not jobs.started
    trust(app).check().run()
    button(opened(app), "Try on one step").click().run()
    assert jobs.last[:2] == ["evaluate", str(archived)]
    assert option(jobs.last, "--evaluator") == f"{judge}:evaluate"
    assert jobs.started[-1].trusted == hashlib.sha256(judge.read_bytes()).hexdigest()
    assert next(m for m in opened(app).metric if m.label == "loss").value == "0.250"
    assert "so a divergence can be measured" in texts(app)
    assert "hello" in texts(app)
