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
    state.lead_to("pages/open/view.py")


def _search() -> None:
    """Lead on from where the page was before it allocated bits by hand too."""
    state.remember_link()
    state.lead_to("pages/allocate/view.py")


page = st.navigation(
    [
        st.Page(
            "pages/open/view.py", title="Open", icon=":material/folder_open:", url_path="start", default=True
        ),
        st.Page(_by_its_name, title="Open", url_path="open", visibility="hidden"),
        st.Page("pages/overview/view.py", title="Overview", icon=":material/dashboard:", url_path="overview"),
        st.Page(
            "pages/sensitivity/view.py",
            title="Sensitivity",
            icon=":material/grid_on:",
            url_path="sensitivity",
        ),
        st.Page("pages/allocate/view.py", title="Allocate", icon=":material/tune:", url_path="allocate"),
        st.Page(_search, title="Search", url_path="search", visibility="hidden"),
        st.Page(
            "pages/compare/view.py",
            title="Restore & compare",
            icon=":material/compare_arrows:",
            url_path="compare",
        ),
        st.Page("pages/archive/view.py", title="Archive", icon=":material/inventory_2:", url_path="archive"),
        st.Page("pages/export/view.py", title="Export", icon=":material/archive:", url_path="export"),
        st.Page("pages/jobs/view.py", title="Jobs", icon=":material/work_history:", url_path="jobs"),
    ],
    position="top",
)
state.arrive(page.url_path)
page.run()
