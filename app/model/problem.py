"""Errors, as a page shows them."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """An error that the user can act on: problem, location and remedy; `detail` has technical details."""

    what: str
    where: str = ""
    remedy: str = ""
    detail: str = ""


class ServiceError(Exception):
    """Raised if a service cannot answer; carries the `Problem` that the page shows, given by its parts."""

    def __init__(self, what: str, where: str = "", remedy: str = "", detail: str = "") -> None:
        self.problem = Problem(what, where, remedy, detail)
        super().__init__(what)
