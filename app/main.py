"""The explorer's script: page configuration and navigation only."""

from __future__ import annotations

import functools
from pathlib import Path

import streamlit as st
from inshrink_app import pages, state
from inshrink_app.widgets import job_card

# A file, because Streamlit fetches the font of a `:material/` page icon from another server.
MARK = str(Path(__file__).parent / "assets" / "mark.svg")
st.set_page_config(page_title="Inshrink", page_icon=MARK, layout="wide")
st.logo(MARK, size="large")


def lead_on(name: str, word: str) -> None:
    """Redirect an old address to its page."""
    st.session_state[job_card.DRAWER] = word == "jobs"
    state.lead_to(name)


found = {name: pages.page(name) for name in pages.NAMES}
shown = {
    name: st.Page(
        page.show, title=page.title, icon=page.icon, url_path=page.address, default=name == pages.NAMES[0]
    )
    for name, page in found.items()
}
former = [
    st.Page(functools.partial(lead_on, name, word), title=page.title, url_path=word, visibility="hidden")
    for name, page in found.items()
    for word in page.former
]
state.know({word: shown[name] for name, page in found.items() for word in page.former} | shown)
chosen = st.navigation([*shown.values(), *former], position="top")
state.arrive(chosen.url_path)
chosen.run()
