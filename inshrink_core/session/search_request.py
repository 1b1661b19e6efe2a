"""What is asked of a search: what can be searched for, on which steps, and where its trials are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from inshrink_core.errors import InputError, NotFoundError
from inshrink_core.formats import Run
from inshrink_core.search.bounds import Bounds
from inshrink_core.session.strategy import STRATEGIES

__all__ = ["check_request", "choose_steps", "trial_log_of"]

_LOG_NAME: Final = "search.jsonl"

_logger = logging.getLogger(__name__)


def trial_log_of(run: Run, output: Path | None, *, make: bool = True) -> Path | None:
    """Return where the trials of a search are kept: beside its output, else inside of the run.

    Parameters
    ----------
    run, output
        What is searched, and where the result goes.
    make
        Make sure that it can be written; None where that is not so.
    """
    if output is not None:
        return output.with_suffix(".trials.jsonl")
    folder = run.directory / ".inshrink"
    if folder.is_symlink():
        return None
    if not make:
        return folder / _LOG_NAME
    try:
        folder.mkdir(exist_ok=True)
        path = folder / _LOG_NAME
        with path.open("ab"):
            return path
    except OSError as error:
        _logger.info("trials are not kept: %s", error)
        return None


def check_request(
    bounds: Bounds, target_ratio: float | None, strategy: str, budget: int | None, replicas: int
) -> None:
    """Refuse what cannot be searched for.

    Raises
    ------
    InputError
        Neither bounds nor a target, or both; a strategy that there is not; a number out of range.
    """
    if strategy not in STRATEGIES:
        raise InputError(
            f"there is no strategy '{strategy}'", remedy=f"choose one of {', '.join(STRATEGIES)}"
        )
    for name, number in (("budget", budget), ("replicas", replicas)):
        if number is not None and number < 1:
            raise InputError(f"--{name} is at least 1", expected="≥ 1", found=str(number))
    if target_ratio is None and not bounds.given:
        raise InputError(
            "there is nothing to search for", remedy="give --max-drop, --max-divergence or --target-ratio"
        )
    if target_ratio is not None and bounds.given:
        raise InputError(
            "a target ratio and bounds were both given", remedy="give --target-ratio or bounds, not both"
        )
    if target_ratio is not None and not 1 <= target_ratio < float("inf"):
        raise InputError("--target-ratio is no ratio", expected="a number from 1", found=str(target_ratio))


def choose_steps(run: Run, steps: Iterable[int] | None) -> tuple[int, ...]:
    """Return the steps of the chain, ascending; every one must exist.

    Raises
    ------
    NotFoundError
        One does not, or there is none.
    """
    chosen = run.steps if steps is None else tuple(sorted(set(steps)))
    missing = [step for step in chosen if step not in run.steps]
    if missing or not chosen:
        raise NotFoundError(
            f"the run has no step {missing[0]}" if missing else "there is no step to search on",
            where=str(run.path),
            remedy=f"it has {run.steps[0]} to {run.steps[-1]}; `inshrink inspect` lists them",
        )
    return chosen
