"""Steps by a rule for file names: previewed, used, and kept by the link and by jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.pages.run.shrinking import Intent
from streamlit.testing.v1 import AppTest

from tests.app.builders import button, explorer, texts

PATTERN = "model_ep{step}_*.pt"


@pytest.fixture
def run(root) -> Path:
    """Return a run in which the files say the same step, and the names an accuracy beside the epoch."""
    folder = root / "run"
    folder.mkdir()
    for name in ("model_ep01_acc95.pt", "model_ep02_acc91.pt", "model_ep03_acc93.pt", "best.pt"):
        torch.save({"model": {"w": torch.full((2, 2), float(len(name)))}, "step": 7}, folder / name)
    return folder


def panel(run: Path, pattern: str | None = None, **query: str) -> AppTest:
    app = explorer("run", run=str(run), **query)
    app.session_state["names"] = True
    app.run()
    if pattern is not None:
        app.text_input(key=f"names.{run}").set_value(pattern).run()
    return app


def test_the_rule_is_suggested_previewed_and_used(run):
    app = panel(run)
    assert app.text_input(key=f"names.{run}").value == "model_ep{step}_acc*.pt"
    app.text_input(key=f"names.{run}").set_value("*ep{step}_*").run()
    preview = next(table.value for table in app.dataframe if "why it has none" in table.value)
    assert preview["step"].dropna().tolist() == [1, 2, 3]
    assert "does not match" in preview["why it has none"][0]
    assert "not used yet" in texts(app)
    button(app, "Use these steps").click().run()
    assert app.query_params["run"] == f"{run}/*ep{{step}}_*"
    assert "3 steps" in texts(app)


def test_a_link_carries_the_rule_and_it_can_be_taken_back(run):
    app = panel(run / PATTERN)
    assert app.text_input(key=f"names.{run / PATTERN}").value == PATTERN
    assert "what is on screen" in texts(app)
    button(app, "Without a pattern").click().run()
    assert app.query_params["run"] == str(run)


@pytest.mark.parametrize("pattern", ["(a+)+$", "../{step}", "{step}{step}", "a\0{step}", "e*.pt"])
def test_what_is_no_rule_is_answered_in_words(run, pattern):
    assert "step pattern" in texts(panel(run, pattern))


def test_a_run_with_a_rule_is_one_in_every_service(run):
    shown = services.load_subject(str(run / PATTERN))
    assert shown.steps == (1, 2, 3)
    assert (shown.path, shown.place, shown.name) == (run / PATTERN, run, "run")
    assert services.load_subject(str(run)).steps == (1, 2, 3)
    assert services.default_folder(shown) == run.parent
    assert Intent(shown, services.chosen(shown), None).estimate.run == str(run / PATTERN)
    services.look_again(shown.path)
    with pytest.raises(ServiceError, match="outside"):
        services.load_subject(str(run / ".." / ".." / PATTERN))
