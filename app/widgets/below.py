"""What lies below the fold: it comes once the browser has drawn what stands above. Nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import streamlit as st

__all__ = ["show"]

_SCRIPT = """
export default function ({ setTriggerValue }) {
  const ask = () => setTriggerValue("drawn", true);
  const frame = requestAnimationFrame(() => setTimeout(ask));
  const again = setInterval(ask, 3000);
  return () => {
    cancelAnimationFrame(frame);
    clearInterval(again);
  };
}
"""
"""Runs with the first frame of what came together with it, and speaks when that is on the screen. Of what two
fragments say at the same moment, Streamlit's page hears one: it asks again, and a page has one such part."""

_component = st.components.v2.component("inshrink.below", js=_SCRIPT, isolate_styles=False)


@st.fragment
def show(place: str, draw: Callable[[], None], *, height: int, about: Hashable = None) -> None:
    """Draw a part of the page, after the parts above it are on the screen.

    Charts and tables are drawn with scripts of some megabytes; sent together with the rest, all of it would
    appear when the last of them has run.

    Parameters
    ----------
    place
        Tells the parts of one page apart, and is the key of what is remembered.
    draw
        Draws it; what is clicked in it redraws it alone.
    height
        Pixels that are kept free for it.
    about
        What it is about: it waits again once this is another.
    """
    if not _is_due(f"below.{place}", about, height):
        return
    draw()


def _is_due(key: str, about: Hashable, height: int) -> bool:
    """Whether the browser has told that it is ready; until then, keep the place free."""
    if st.session_state.get(key) == (about,):
        return True

    def ready() -> None:
        st.session_state[key] = (about,)

    with st.container(height=height, border=False):
        _component(key=f"{key}.asked", on_drawn_change=ready)
    return False
