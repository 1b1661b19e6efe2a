"""The end of a page: equivalent code, and the next actions."""

from __future__ import annotations

import math
import shlex
from dataclasses import fields
from typing import Any

import streamlit as st
from inshrink_app.jobs import Requests
from inshrink_app.widgets.layout import folded

import inshrink_core
from inshrink_core import analysis, verbs
from inshrink_core.request import Request, python_call


def requests(asked: Requests) -> None:
    """Draw the requests that a job of the page performs, in order: as shell commands and in Python."""
    snippets(shell_text(asked), python_text(asked))


@st.fragment
def snippets(command: str, python: str, key: str = "snippets") -> None:
    """Draw a command line and Python code, each with a copy button.

    They are drawn when the panel opens, since the browser's code viewer is the second largest script after
    the charts' and would delay the page.

    Parameters
    ----------
    command, python
        Their texts.
    key
        Distinguishes two on one page.
    """

    def draw() -> None:
        for name, text in (("Command line", command), ("Python", python)):
            st.caption(name)
            st.code(text, language=None, wrap_lines=True)

    folded("Do this without the explorer", ":material/terminal:", key, draw)


def shell_text(asked: Requests) -> str:
    """Return requests as shell commands."""
    return "\n".join(shlex.join(["inshrink", *request.words()]) for request in asked)


def python_text(asked: Requests) -> str:
    """Return Python code equivalent to some requests."""
    lines = ["import inshrink_core", ""]
    for request in asked:
        call = python_call(type(request))
        name, homes = call.__name__, (inshrink_core, verbs, analysis)
        home = next((home for home in homes if getattr(home, name, None) is call), verbs).__name__
        lines += [f"found = {home}.{name}({_arguments(request)})", "print(found.to_json())"]
    return "\n".join(lines)


def _arguments(request: Request[Any]) -> str:
    """Return the arguments of a call: subject and target by position, the others by name."""
    by_place = {field.name for field in fields(request) if not field.kw_only}
    return ", ".join(
        _literal(value) if name in by_place else f"{name}={_literal(value)}"
        for name, value in request.given().items()
    )


def _literal(value: Any) -> str:
    """Return a value as a Python literal; a waived bound is infinite."""
    return "float('inf')" if isinstance(value, float) and math.isinf(value) else repr(value)
