"""The way on: pages end with the next step, which takes along what was chosen; and reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.jobs.printed import python_text
from inshrink_app.pages.archive.report import report_request

import inshrink_core
from tests.app.builders import button, compared_rows, explorer, keep_comparison, texts, visit
from tests.app.job_stubs import StubJobs, archived, archived_template, jobs, work
from tests.app.test_app_compare import with_evaluator

__all__ = ["archived", "archived_template", "jobs"]

WAYS = {
    "overview": ["sensitivity", "export"],
    "allocate": ["export", "compare"],
    "compare": ["archive", "allocate"],
    "archive": ["compare", "export"],
    "export": ["compare", "archive"],
}


@pytest.mark.parametrize("page", WAYS)
def test_a_page_ends_with_the_next_step(archived: Path, jobs: StubJobs, page: str) -> None:
    app = explorer(page, run=str(archived))
    assert not app.exception
    keys = [found.key for found in app.button if str(found.key).startswith("next.")]
    assert keys == [f"next.{way}" for way in WAYS[page]]


def test_the_goal_goes_along_to_export(archived: Path, jobs: StubJobs) -> None:
    app = explorer("overview", run=str(archived), goal="exact")
    app.button(key="next.export").click().run()
    visit(app, "export").run()
    assert next(box for box in app.selectbox if box.label == "Codec").value == "lossless"


def test_the_archive_that_was_exported_goes_along_to_compare(archived: Path, jobs: StubJobs) -> None:
    made = archived.with_name("run.inshrink")
    jobs.put(
        ["compress", str(archived), "-o", str(made)],
        shown=str(archived),
        result={"relative_error": 0.0},
    )
    app = explorer("export", run=str(archived))
    assert not app.exception
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Restore cost"] == ("none", "exact: every bit of the weights")
    app.button(key="next.compare").click().run()
    assert app.session_state["compare.archives"] == [str(made)]


def test_the_figures_of_an_archive_are_those_that_were_measured_last(archived: Path) -> None:
    from inshrink_app.widgets import quality

    from inshrink_core import compress

    target = archived.with_name("run-lossy.inshrink")
    compress(archived, target, steps=[10, 20, 30], config={"predicted_cost": 0.003})
    chain = services.chain_of(str(target))
    [foreseen] = quality.archive_facts(chain)
    assert foreseen[1].startswith("≤ 0.")
    assert foreseen[2] == "predicted, not measured; compare it"
    keep_comparison(target, archived, compared_rows())
    cost, drop = quality.archive_facts(chain)
    assert cost[1:3] == ("0.40 %", "above 0.30 %, of the loss, measured on 1 step")
    assert drop[1:3] == ("5.00 %", "loss, step 20")
    keep_comparison(target, archived, compared_rows(restore_cost=None))
    assert quality.archive_facts(chain)[0][2] == "the evaluator returns no loss"
    compress(archived, target)
    old = quality.archive_facts(services.chain_of(str(target)))
    assert {fact[2] for fact in old} == {"the evaluator returns no loss", "before the last change"}


def test_a_report_is_written_by_a_job_with_what_is_known(archived: Path, jobs: StubJobs) -> None:
    app = explorer("archive", run=str(archived))
    button(app, "Write the report").click().run()
    assert not app.exception
    archive, target = archived.with_name("run.inshrink"), archived.with_name("run-report.html")
    assert jobs.last == ["report", str(archive), "--out", str(target), "--against", str(archived)]
    assert jobs.started[-1].page == "archive"
    assert "inshrink_core.verbs.report(" in python_text(jobs.started[-1].requests(None))


def test_a_real_report_has_the_comparison_of_several_archives_that_a_job_has_made(
    archived: Path, jobs: StubJobs, tmp_path: Path
) -> None:
    with_evaluator(archived)
    other, target = archived.with_name("other.inshrink"), archived.with_name("told.html")
    inshrink_core.compress(archived, other)
    shown, chain = services.load_subject(str(archived)), services.chain_of(str(other))
    paths = [archived.with_name("run.inshrink"), other]
    judge = services.evaluator_of(shown)
    words = services.comparison(shown, paths, shown.steps, judge)
    compared = work(tmp_path / "jobs", words, shown=str(archived), trusted=judge.trusted)
    assert (compared.state, compared.problem) == ("finished", None)
    written = work(tmp_path / "jobs2", report_request(chain, shown, str(target)), shown=str(other))
    assert (written.state, written.problem) == ("finished", None)
    told = target.read_text()
    assert "Restored against original" in told
    assert told.index("<h3>other.inshrink") < told.index("<h3>run.inshrink")


def test_a_report_has_the_metrics_that_were_chosen_for_the_run(archived: Path, jobs: StubJobs) -> None:
    table = archived.with_name("x.csv")
    table.write_text("epoch,acc\n10,0.5\n20,0.75\n")
    app = explorer("archive", run=str(archived), log=services.LogChoice(str(table), "epoch", ("acc",)).text)
    assert "1 metric of x" in texts(app)
    button(app, "Write the report").click().run()
    assert jobs.last[-6:] == ["--log", str(table), "--step-column", "epoch", "--column", "acc"]
    other = services.LogChoice("/etc/passwd", "epoch", ("acc",)).text
    button(explorer("archive", run=str(archived), log=other), "Write the report").click().run()
    assert "--log" not in jobs.last


def test_a_real_report_is_handed_over(archived: Path, jobs: StubJobs) -> None:
    chain = services.chain_of(str(archived.with_name("run.inshrink")))
    original, target = services.load_subject(str(archived)), archived.with_name("told.html")
    words = report_request(chain, original, str(target))
    assert work(archived.parent.parent / "jobs", words, shown=str(chain.path)).state == "finished"
    jobs.put(words, of=tuple(chain.state), shown=str(chain.path), result={"output": str(target)})
    app = explorer("archive", run=str(archived))
    assert str(target) in texts(app)
    assert any("Download told" in str(link.proto.label) for link in app.get("link_button"))


@pytest.mark.parametrize("name", ["x.txt", "run.html", "../x.html", "missing/x.html"])
def test_a_report_goes_where_nothing_is_and_the_explorer_may_see(
    archived: Path, jobs: StubJobs, name: str
) -> None:
    archived.with_name("run.html").write_text("mine")
    app = explorer("archive", run=str(archived))
    key = next(field.key for field in app.text_input if str(field.key).startswith("report.target"))
    app.text_input(key=key).set_value(str(archived.parent / name)).run()
    button(app, "Write the report").click().run()
    assert not app.exception
    assert jobs.started == []
