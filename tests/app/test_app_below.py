"""What lies below the fold waits for what stands above, and comes back when it is about something else."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest


def script() -> None:
    import streamlit as st
    from inshrink_app.widgets import layout

    layout.below("part", lambda: st.write("drawn"), height=100, about=st.session_state.get("about"))


def test_a_part_is_drawn_when_the_browser_is_ready_and_waits_again_for_another_subject():
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
