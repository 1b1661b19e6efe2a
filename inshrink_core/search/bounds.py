"""Quality bounds on every restored step, and the check of a measured step against them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from inshrink_core.errors import CheckFailedError, InputError
from inshrink_core.evaluate.comparison import FIGURES as FIGURES
from inshrink_core.evaluate.comparison import Comparison
from inshrink_core.evaluate.comparison import Figures as Figures
from inshrink_core.evaluate.evaluator import Evaluation

DEFAULT_MAX_DIVERGENCE: Final = 0.003
"""Nats. Added to a bound on the drop if the evaluator returns ``log_probs``, because weights that were never
stored can meet a bound on the drop alone. ``docs/search.md`` explains the choice."""

# Distance in standard errors from which a figure is clearly on one side of a limit (95 % of a normal).
_N_NOISE_ERRORS: Final = 2.0

DEFAULT_MAX_RESTORE_COST: Final = 0.003
"""Expected relative rise of the loss after a restore (``docs/rehearsal.md`` explains the choice)."""

REMEDIES: Final = {
    "drop": "a metric of zero has no relative change; choose another with --eval-metric",
    "divergence": "the evaluator must return 'log_probs' for every state",
    "restore_cost": "the evaluator must return a loss above 0, or 'log_probs'",
}


def option_of(figure: str) -> str:
    """Return the command-line option that bounds a figure."""
    return f"--max-{figure.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCheck:
    """Result of checking figures against bounds.

    Parameters
    ----------
    within
        Whether every figure is within its limit.
    usage
        Largest figure as a share of its limit: at most 1 within the bounds, infinite for a failure.
    clear
        False if the metric's noise reaches the limit, so that other samples might give another result.
    """

    within: bool
    usage: float
    clear: bool = True

    @property
    def side(self) -> str:
        """``inside``, ``outside``, ``inside, within noise`` or ``outside, within noise``."""
        word = "inside" if self.within else "outside"
        return word if self.clear else f"{word}, within noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on every restored step of a chain; None means no limit.

    Parameters
    ----------
    max_drop
        Largest relative change of the metric for the worse, at least 0: 0.01 is one percent.
    max_divergence
        Largest divergence of the predictions in nats, at least 0. Infinity means no limit.
    max_restore_cost
        Largest expected relative rise of the loss, at least 0: 0.002 is a fifth of a percent.

    Raises
    ------
    InputError
        A limit is negative or no number.

    Examples
    --------
    >>> Bounds(max_drop=0.01).evaluator(Figures(drop=0.005)).usage
    0.5
    """

    max_drop: float | None = None
    max_divergence: float | None = None
    max_restore_cost: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_drop", "max_divergence", "max_restore_cost"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
                raise InputError(
                    f"--{name.replace('_', '-')} is not a bound", expected="a number from 0", found=str(limit)
                )

    def requested(self) -> Bounds | None:
        """Return the bounds of a chain to be written, or None if no bound is given.

        Raises
        ------
        InputError
            The given values bound nothing.
        """
        if self == Bounds():
            return None
        if not self.limits:
            raise InputError(
                "--max-divergence inf alone bounds nothing", remedy="give --max-drop too, or neither"
            )
        return self

    def with_restore_cost(self, share: float) -> Bounds:
        """Return the bounds with the restore cost scaled by `share`."""
        if self.max_restore_cost is None:
            return self
        return replace(self, max_restore_cost=self.max_restore_cost * share)

    def nearer_than(self, baseline: Figures) -> Bounds | None:
        """Return the bounds, limited to half of what the previous checkpoint costs in place of a step.

        Figures that the previous checkpoint lacks, or does not worsen, keep their limits.

        Returns
        -------
        Bounds or None
            None if the previous checkpoint worsens no bounded figure.
        """
        found = {name: getattr(baseline, name) for name in self.limits}
        costs = {name: value / 2 for name, value in found.items() if value is not None and value > 0}
        if not costs:
            return None
        return replace(self, **{f"max_{name}": min(self.limits[name], cost) for name, cost in costs.items()})

    @property
    def limits(self) -> dict[str, float]:
        """Limits by figure, without figures that are unbounded or waived."""
        given = {name: getattr(self, f"max_{name}") for name in FIGURES}
        return {name: limit for name, limit in given.items() if limit is not None and math.isfinite(limit)}

    def completed(self, original: Evaluation) -> Bounds:
        """Return the bounds; add a divergence bound to a lone drop bound if it can be checked.

        Raises
        ------
        InputError
            The evaluator returns nothing that a given bound could use.
        """
        if "restore_cost" in self.limits and original.restore_cost(original, 0.0) is None:
            raise InputError("--max-restore-cost cannot be checked", remedy=REMEDIES["restore_cost"])
        if "divergence" in self.limits:
            if original.log_probs is None and original.predictions is None:
                raise InputError(
                    "--max-divergence cannot be checked", remedy="the evaluator must return 'log_probs'"
                )
        elif original.log_probs is not None and self == Bounds(max_drop=self.max_drop) != Bounds():
            return replace(self, max_divergence=DEFAULT_MAX_DIVERGENCE)
        return self

    def check(self, figures: Figures) -> BoundCheck:
        """Return whether figures keep the bounds; noise affects only `BoundCheck.clear`.

        Raises
        ------
        InputError
            A bounded figure does not exist, for example the drop of a metric of 0.
        """
        if figures.failure:
            return BoundCheck(within=False, usage=math.inf)
        shares, within, clear = [0.0], True, True
        for name, limit in self.limits.items():
            figure = getattr(figures, name)
            if figure is None:
                raise InputError(f"{option_of(name)} cannot be checked", remedy=REMEDIES[name])
            within = within and figure <= limit
            shares.append(0.0 if figure <= 0 else figure / limit if limit > 0 else math.inf)
            error = figures.drop_error if name == "drop" else None
            clear = clear and (error is None or abs(figure - limit) > _N_NOISE_ERRORS * error)
        return BoundCheck(within=within, usage=max(shares), clear=clear)

    def to_json(self) -> dict[str, Any]:
        """Return the limits as JSON values.

        Returns
        -------
        drop, divergence, restore_cost : float
            The limit; None (of the restore cost: absent) if there is none.
        """
        limits = self.limits
        asked = FIGURES if "restore_cost" in limits else FIGURES[:2]
        return {name: limits.get(name) for name in asked}


def failure_of(
    limits: Mapping[str, float], comparison: Comparison, where: str
) -> CheckFailedError | InputError | None:
    """Return how the steps of a comparison exceed limits on their figures, or None."""
    for name, limit in limits.items():
        figures = {row.step: getattr(row, name) for row in comparison.steps}
        unknown = [step for step, figure in figures.items() if figure is None]
        if unknown:
            return InputError(
                f"{option_of(name)} cannot be checked: step {unknown[0]} has no {name.replace('_', ' ')}",
                where=where,
                remedy=REMEDIES[name],
            )
        worst = max(figures, key=figures.__getitem__)
        if not figures[worst] <= limit:
            return CheckFailedError(
                f"step {worst} exceeds {option_of(name)}",
                where=where,
                expected=f"at most {limit:g}",
                found=f"{figures[worst]:.4g}",
            )
    return None
