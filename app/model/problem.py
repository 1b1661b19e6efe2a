"""What went wrong, as a page shows it."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """An error a reader can act on: what is wrong, where, and what to do; `detail` is for the curious."""

    what: str
    where: str = ""
    remedy: str = ""
    detail: str = ""


class ServiceError(Exception):
    """A service could not answer; carries the `Problem` that the page shows instead, given by its parts."""

    def __init__(self, what: str, where: str = "", remedy: str = "", detail: str = "") -> None:
        self.problem = Problem(what, where, remedy, detail)
        super().__init__(what)
