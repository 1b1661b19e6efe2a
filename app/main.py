"""The explorer's script: page configuration and navigation only."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from inshrink_app import state

HERE = Path(__file__).parent

# A PNG, because Streamlit fetches the font of a `:material/` page icon from another server.
st.set_page_config(page_title="Inshrink", page_icon=str(HERE / "assets" / "favicon.png"), layout="wide")
st.logo(str(HERE / "assets" / "logo.png"), size="large")


def _by_its_name() -> None:
    """Lead to the first page, which has no path of its own, from where its name would put it."""
    state.run_path()  # Remembers what the link says.
    state.lead_to("views/open.py")


page = st.navigation(
    [
        st.Page("views/open.py", title="Open", icon=":material/folder_open:", url_path="start", default=True),
        st.Page(_by_its_name, title="Open", url_path="open", visibility="hidden"),
        st.Page("views/overview.py", title="Overview", icon=":material/dashboard:", url_path="overview"),
        st.Page(
            "views/sensitivity.py", title="Sensitivity", icon=":material/grid_on:", url_path="sensitivity"
        ),
        st.Page("views/search.py", title="Search", icon=":material/query_stats:", url_path="search"),
        st.Page(
            "views/compare.py",
            title="Restore & compare",
            icon=":material/compare_arrows:",
            url_path="compare",
        ),
        st.Page("views/archive.py", title="Archive", icon=":material/inventory_2:", url_path="archive"),
        st.Page("views/export.py", title="Export", icon=":material/archive:", url_path="export"),
        st.Page("views/jobs.py", title="Jobs", icon=":material/work_history:", url_path="jobs"),
    ],
    position="top",
)
state.arrive(page.url_path)
page.run()
