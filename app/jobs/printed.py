"""Requests as shell commands and as Python code."""

from __future__ import annotations

import math
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import inshrink_core
from inshrink_core import analysis, verbs
from inshrink_core.request import Request, python_call

if TYPE_CHECKING:
    from inshrink_app.jobs.work import Requests


def shell_text(requests: Requests) -> str:
    """Return requests as shell commands."""
    return "\n".join(shlex.join(["inshrink", *request.words()]) for request in requests)


def python_text(requests: Requests) -> str:
    """Return Python code equivalent to some requests."""
    lines = ["import inshrink_core", ""]
    for request in requests:
        home, name = _function(request)
        lines += [f"found = {home}.{name}({_arguments(request)})", "print(found.to_json())"]
    return "\n".join(lines)


def _function(request: Request[Any]) -> tuple[str, str]:
    """Return the public package of a verb's function, and the function's name."""
    call = python_call(type(request))
    name, homes = call.__name__, (inshrink_core, verbs, analysis)
    return next((home.__name__ for home in homes if getattr(home, name, None) is call), verbs.__name__), name


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
