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
    """A service could not answer; carries what the page shows instead."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)
