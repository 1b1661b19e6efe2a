"""Steps of a run by a rule for its file names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_app.services.failures import reported
from inshrink_app.widgets.tables import Problem, ServiceError, Subject

if TYPE_CHECKING:
    from inshrink_core.formats import NamedStep

__all__ = ["step_pattern_of", "steps_by_pattern", "with_step_pattern"]


def step_pattern_of(shown: Subject) -> str:
    """Return the step pattern of a run, else one that suits its names; empty where none does."""
    from inshrink_core.formats import preview_steps, suggest_step_pattern

    if shown.step_pattern:
        return shown.step_pattern
    with reported():
        return suggest_step_pattern([row.name for row in preview_steps(shown.place, "{step}")])


def steps_by_pattern(shown: Subject, pattern: str) -> tuple[NamedStep, ...]:
    """Return what a step pattern would make of the names of a run; nothing of its files is read.

    Raises
    ------
    ServiceError
        The pattern is none with ``{step}``. Regular expressions are left to the command line: a hostile one,
        which may stand in a link, would never end.
    """
    from inshrink_core.formats import preview_steps

    with_step_pattern(shown, pattern)
    with reported():
        return preview_steps(shown.place, pattern)


def with_step_pattern(shown: Subject, pattern: str) -> str:
    """Return the path that opens a run with a step pattern; without any where it is empty.

    Raises
    ------
    ServiceError
        The pattern is none with ``{step}``.
    """
    if not pattern:
        return str(shown.place)
    if "{step}" not in pattern or any(sign in pattern for sign in "/\\\0"):
        remedy = "write a whole name, with {step} for its number: model_ep{step}_*.pt"
        raise ServiceError(Problem("this is no step pattern", pattern[:200].replace("\0", ""), remedy))
    return str(shown.place / pattern)
