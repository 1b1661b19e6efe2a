"""The card that averages steps does what the command line does."""

from __future__ import annotations

import json
from pathlib import Path

from streamlit.testing.v1 import AppTest

from inshrink_core.cli import main
from tests.app.builders import archives, button, judged, texts, write_run
from tests.app.job_stubs import STEPS
from tests.app.test_app_compare import trusted


def card(path: Path) -> AppTest:
    """Return the panel, its command line unfolded."""
    app = archives("average", path)
    app.session_state["snippets"] = True
    app.run()
    return app


def test_what_the_card_starts_writes_a_step_and_its_result_is_told(archived, jobs):
    app = card(archived.with_name("run.inshrink"))
    app.select_slider(key="average.range").set_value((20, 40)).run()
    button(app, "Average").click().run()
    words = jobs.last
    assert words[:3] == ["average", str(archived.with_name("run.inshrink")), "--output"]
    assert main(words) == 0
    made = json.loads((Path(words[3]) / "average.json").read_text())
    assert made["steps"] == [20, 30, 40]
    jobs.kept[-1].result, jobs.kept[-1].documents = made, [made]
    app.run()
    assert made["files"][0] in texts(app)
    assert words[3] + "-2" in [box.value for box in app.text_input], "the next one goes elsewhere"


def test_the_python_lines_of_the_card_do_the_same(archived, jobs):
    app = card(archived)
    python = next(code.value for code in app.code if "verbs.average" in code.value)
    exec(compile(python, "snippet", "exec"), {})
    assert (archived.parent / "run-average" / "average.json").exists()


def test_a_search_asks_the_evaluator_and_for_consent_before(root, jobs):
    run = write_run(root / "run", STEPS)
    judged(run)
    app = card(run)
    app.session_state["average.weights"] = "search"
    app.run()
    assert button(app, "Average").disabled
    trusted(run)
    app.run()
    button(app, "Average").click().run()
    assert not (run.parent / "executed").exists()
    assert {"--search", "--trust-run"} <= set(jobs.last)
    assert len(jobs.started[-1].trusted) == 64
    assert "search=True" in "".join(code.value for code in app.code)


def test_a_folder_that_is_not_empty_is_refused_here(archived, jobs):
    app = card(archived)
    next(box for box in app.text_input if "-average" in str(box.value)).set_value(str(archived)).run()
    button(app, "Average").click().run()
    assert not jobs.started
    assert "here is something at this path already" in texts(app)
