"""Which evaluator a command uses, and whether its code may run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from inshrink_core.errors import InputError, UntrustedCodeError
from inshrink_core.evaluate.evaluator import DEFAULT_TIMEOUT_S, Evaluator
from inshrink_core.metrics import Direction
from inshrink_core.samples import is_trusted_sample

__all__ = ["EvaluatorRequest", "EvaluatorSettings", "resolve_evaluator"]


class EvaluatorSettings(Protocol):
    """What a run says of its own evaluator (``inshrink.toml``); each None where it says nothing."""

    @property
    def file(self) -> str | None:
        """Path relative to the run."""
        ...

    @property
    def function(self) -> str | None:
        """Name of the function in it; None: ``evaluate``."""
        ...

    @property
    def metric(self) -> str | None:
        """The metric to compare by."""
        ...

    @property
    def direction(self) -> str | None:
        """Which way it is better."""
        ...


def resolve_evaluator(
    settings: EvaluatorSettings | None,
    run_dir: Path | str | None,
    *,
    evaluator: str | None = None,
    metric: str | None = None,
    direction: Direction | str | None = None,
    trust_run: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Evaluator:
    """Return the evaluator a command should use, and refuse code that nobody said to trust.

    Parameters
    ----------
    settings, run_dir
        What the run says, and where it lies; None without a run.
    evaluator
        ``FILE.py:FUNCTION`` given by the user, who thereby trusts it.
    metric, direction
        Given by the user; they prevail over the run's.
    trust_run
        The user trusts the code of the run.
    timeout
        Seconds an evaluation may take.

    Raises
    ------
    UntrustedCodeError
        The run names an evaluator, and neither the user nor a bundled sample's digest vouches for it.
    InputError
        There is no evaluator at all, or the run names one outside of itself.
    EvaluatorError
        The file is not there.
    """
    own_metric = settings.metric if settings is not None else None
    if direction is None and settings is not None and metric in (None, own_metric):
        # The run's direction speaks of the run's metric, of no other.
        direction = settings.direction
    metric = metric or own_metric
    if evaluator is not None:
        return Evaluator(evaluator, metric=metric, direction=direction, timeout=timeout)
    if settings is None or run_dir is None or not settings.file:
        raise InputError(
            "there is no evaluator",
            where=str(run_dir or ""),
            remedy="give one with --evaluator FILE.py:FUNCTION, or name it in inshrink.toml",
        )
    root = Path(run_dir).resolve()
    file = (root / settings.file).resolve()
    if not file.is_relative_to(root):
        raise InputError(
            f"inshrink.toml names an evaluator outside of the run, '{settings.file}'",
            where=str(run_dir),
            remedy="give it with --evaluator FILE.py:FUNCTION if you trust it",
        )
    sample = is_trusted_sample(root) and settings.file == "evaluator.py"
    if not (trust_run or sample):
        raise UntrustedCodeError(
            f"the run names its own evaluator, '{settings.file}', which is code",
            where=str(run_dir),
            remedy="read it, and add --trust-run if you trust it",
        )
    spec = f"{file}:{settings.function or 'evaluate'}"
    return Evaluator(spec, metric=metric, direction=direction, timeout=timeout, isolated=not trust_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorRequest:
    """What the user said of how to judge; the parameters are those of `resolve_evaluator`."""

    evaluator: str | None = None
    metric: str | None = None
    direction: Direction | str | None = None
    trust_run: bool = False
    timeout: float = DEFAULT_TIMEOUT_S

    def resolve(self, settings: EvaluatorSettings | None, run_dir: Path | str | None) -> Evaluator:
        """Return the evaluator for a run.

        Raises
        ------
        UntrustedCodeError, InputError, EvaluatorError
            As `resolve_evaluator`.
        """
        return resolve_evaluator(
            settings,
            run_dir,
            evaluator=self.evaluator,
            metric=self.metric,
            direction=self.direction,
            trust_run=self.trust_run,
            timeout=self.timeout,
        )
