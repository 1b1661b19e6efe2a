"""What lies below the fold waits for what stands above, and comes back when it is about something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.widgets import layout
from streamlit.testing.v1 import AppTest

from tests.app.builders import charts, explorer, subject

IS_DUE = layout._is_due


def script() -> None:
    import streamlit as st
    from inshrink_app.widgets import layout

    layout.below("part", lambda: st.write("drawn"), height=100, about=st.session_state.get("about"))


def test_a_part_is_drawn_when_the_browser_is_ready_and_waits_again_for_another_subject() -> None:
    app = AppTest.from_function(script).run()
    assert not app.markdown
    assert len(app.get("bidi_component")) == 1
    app.session_state["below.part"] = (None,)
    app.run()
    assert [text.value for text in app.markdown] == ["drawn"]
    assert not app.get("bidi_component")
    app.session_state["about"] = "another"
    app.run()
    assert not app.markdown
    assert not app.exception


def test_the_facts_of_a_run_do_not_wait_for_its_charts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_is_due", IS_DUE)
    monkeypatch.setattr(services, "load_subject", lambda _: subject(log={"loss": ((10, 2.0), (20, 1.0))}))
    app = explorer("overview", run="/runs/huge")
    assert "Checkpoints" in {metric.label for metric in app.metric}
    assert (charts(app), len(app.dataframe)) == (0, 0)
    # Of two that speak at the same moment, Streamlit hears one.
    assert len(app.get("bidi_component")) == 1
    app.session_state["below.charts"] = (None,)
    app.run()
    assert not app.exception
    assert (charts(app), len(app.dataframe)) == (1, 2)
