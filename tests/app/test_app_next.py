"""The way on: pages end with the next step, which takes along what was chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from inshrink_app import services

from tests.app.builders import compared_rows, explorer, keep_comparison, visit
from tests.app.job_stubs import StubJobs, archived, archived_template, jobs

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
