"""The way on: pages end with the next step, which takes along what was chosen."""

from __future__ import annotations

from tests.app.builders import explorer


def test_the_archive_that_was_exported_goes_along_to_compare(archived, jobs):
    made = archived.with_name("run.inshrink")
    jobs.put(
        ["compress", str(archived), "-o", str(made)],
        shown=str(archived),
        result={"relative_error": 0.0},
    )
    app = explorer("export", run=str(archived))
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Restore cost"] == ("none", "exact: every bit of the weights")
    app.button(key="next.compare").click().run()
    assert app.session_state["compare.archives"] == [str(made)]
