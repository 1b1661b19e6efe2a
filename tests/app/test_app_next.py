"""What was written leads on to its comparison."""

from __future__ import annotations

from tests.app.builders import archives, button


def test_the_archive_that_was_exported_goes_along_to_compare(archived, jobs):
    made = archived.with_name("run.inshrink")
    jobs.put(
        ["compress", str(archived), "-o", str(made)],
        shown=str(archived),
        result={"relative_error": 0.0},
    )
    app = archives("write", archived)
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Restore cost"] == ("none", "exact: every bit of the weights")
    button(app, "Compare with the run").click().run()
    assert app.session_state["archives.chosen"] == [str(made)]
    assert app.session_state["archives.panel"] == "compare"
