"""The explorer's script: page configuration and navigation only."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from inshrink_app import pages, state

# A file, because Streamlit fetches the font of a `:material/` page icon from another server.
MARK = str(Path(__file__).parent / "assets" / "mark.svg")
st.set_page_config(page_title="Inshrink", page_icon=MARK, layout="wide")
st.logo(MARK, size="large")

found = {name: pages.page(name) for name in pages.NAMES}
shown = {
    name: st.Page(
        page.show, title=page.title, icon=page.icon, url_path=page.address, default=name == pages.NAMES[0]
    )
    for name, page in found.items()
}
state.know(shown)
chosen = st.navigation([*shown.values()], position="top")
state.arrive(chosen.url_path)
chosen.run()
