"""The state of a visit, and its form in a link.

The session is authoritative. The links of the navigation drop the query parameters, so every page writes its
own ones again; a page opened by a link reads them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import streamlit as st
from inshrink_app.server.roots import settings
from streamlit.runtime.scriptrunner import get_script_run_ctx

if TYPE_CHECKING:
    from streamlit.navigation.page import StreamlitPage

RUN = "run"
METRIC = "metric"
BY = "by"
STATISTIC = "stat"
LOG = "log"
ARCHIVE = "archive"

_PREFIX = "inshrink."
_STARTED = _PREFIX + "started"
_ARRIVED = _PREFIX + "arrived"
_CLICKED = _PREFIX + "clicked"
_GIVEN = _PREFIX + "given"
_PAGES = _PREFIX + "pages"


def arrive(page: str) -> None:
    """Record the page that is about to be drawn.

    An address opens the first page of a session, and any site can make a browser open an address. A second
    page of the same session needs a click.
    """
    if st.session_state.setdefault(_ARRIVED, page) != page:
        clicked()


def clicked() -> None:
    """Record a click; from now on measurements may start."""
    st.session_state[_CLICKED] = True


def was_clicked() -> bool:
    """Return whether the user has clicked in this session, beyond following a link.

    Until then only headers are read.
    """
    return bool(st.session_state.get(_CLICKED))


def was_asked_for() -> bool:
    """Return whether the user asked for the subject on screen, by a click or on the command line."""
    return was_clicked() or is_given()


def is_given() -> bool:
    """Return whether the run on screen is that of the command line."""
    given = st.session_state.get(_GIVEN)
    return given is not None and given == st.session_state.get(_PREFIX + RUN)


def know(pages: Mapping[str, StreamlitPage]) -> None:
    """Record the pages by the names of their folders."""
    st.session_state[_PAGES] = dict(pages)


def go_to(page: str, **chosen: str) -> NoReturn:
    """Go to another page, by the name of its folder, with some choices."""
    for key, value in chosen.items():
        st.session_state[_PREFIX + key] = value
        st.session_state.pop(f"{page}.{key}", None)  # The widget of an earlier visit.
    st.switch_page(st.session_state[_PAGES][page])


def lead_to(page: str) -> NoReturn:
    """Redirect to another page with what the link says, which does not count as a click."""
    st.session_state.pop(_ARRIVED, None)
    st.switch_page(st.session_state[_PAGES][page], query_params=st.query_params.to_dict())


def wants_given_run() -> bool:
    """Return whether this session starts without a link's choice of run while the command line named one."""
    return _STARTED not in st.session_state and not st.query_params.get(RUN) and settings().opened is not None


def run_path() -> str | None:
    """Return the path of the run on screen: from the link, else the session, else the command line."""
    linked = st.query_params.get(RUN)
    if linked:
        st.session_state[_PREFIX + RUN] = linked
    elif _STARTED not in st.session_state and settings().opened:
        st.session_state[_PREFIX + RUN] = st.session_state[_GIVEN] = settings().opened
    st.session_state[_STARTED] = True
    path = st.session_state.get(_PREFIX + RUN)
    return path if isinstance(path, str) and path else None


def set_run(path: str | None) -> None:
    """Show another run; None shows none."""
    is_other = path != st.session_state.get(_PREFIX + RUN)
    publish(run=path, **({LOG: None} if is_other else {}))
    st.session_state[_STARTED] = True


def choice(key: str, options: Sequence[str], default: str) -> str:
    """Return the option chosen under a key: from the link, else the session, else the default.

    Links are untrusted: an unknown option is ignored.
    """
    for value in (st.query_params.get(key), st.session_state.get(_PREFIX + key)):
        if value in options:
            return str(value)
    return default


def choice_text(key: str) -> str:
    """Return free text under a key, from the link, else the session; empty without any. Untrusted."""
    text = st.query_params.get(key) or st.session_state.get(_PREFIX + key)
    return text if isinstance(text, str) else ""


def publish(**chosen: str | None) -> None:
    """Write choices into the session and the address, so that a reload or a copied link shows the same.

    Empty choices and None remove what was chosen.
    """
    for key, value in chosen.items():
        st.session_state[_PREFIX + key] = value
    before = st.query_params.to_dict()
    if (after := {key: value for key, value in {**before, **chosen}.items() if value}) != before:
        st.query_params.from_dict(after)  # One step of the browser's history.


def went_back() -> bool:
    """Return whether the browser went back or forward to this address."""
    context = get_script_run_ctx()
    return context is not None and context.is_history_navigation
