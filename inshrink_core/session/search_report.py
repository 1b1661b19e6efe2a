"""What a search found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import CheckFailedError
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.chains import Chain
from inshrink_core.search.trials import Trial

__all__ = ["SearchReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What `search` found.

    Parameters
    ----------
    best
        The chain of the configuration that was found; None where none keeps the bounds.
    ratio_total
        Of everything, with the best configuration; what is not weights is estimated from a sample. None
        without one.
    bounds
        What was promised, a divergence bound that was added included.
    target_ratio
        The ratio that was asked for; None where bounds were.
    strategy
        How was looked.
    metric, direction
        What the drop is of.
    steps
        Steps of the chain.
    uninformative
        Steps at which the stale copy keeps the bounds too.
    evaluations
        Trials measured now; those of the log cost nothing.
    trials
        Everything that is known of this search's chains, in the order of measuring.
    rank_correlation, drop_rank_correlation
        Between the quadratic model's prediction and what was measured, of divergences where there are any
        and of drops; None for too few trials.
    seconds
        Wall time.
    log
        Where the trials are kept; None for nowhere.
    notes
        What should be known.
    """

    best: Chain | None
    ratio_total: float | None
    bounds: Bounds
    target_ratio: float | None
    strategy: str
    metric: str
    direction: str
    steps: tuple[int, ...]
    uninformative: tuple[int, ...]
    evaluations: int
    trials: tuple[Trial, ...]
    rank_correlation: float | None
    drop_rank_correlation: float | None
    seconds: float
    log: Path | None
    notes: tuple[str, ...] = ()

    @property
    def failure(self) -> CheckFailedError | None:
        """Why there is no best configuration; None where there is one."""
        if self.best is not None:
            return None
        if self.target_ratio is not None:
            return CheckFailedError(
                f"no configuration reaches a ratio of {self.target_ratio:g}",
                found=f"at most {max((trial.ratio_weights for trial in self.trials), default=0.0):.3g}",
                remedy="ask for less, or try another --codec",
            )
        return CheckFailedError(
            "no configuration keeps the bounds at every step",
            remedy="`inshrink compress` with the same bounds stores such steps exactly; or loosen the bounds",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink search --json``."""
        rows = [trial.to_json() for trial in self.trials]
        return {
            "best": None if self.best is None else {"ratio_total": self.ratio_total, **self.best.to_json()},
            "bounds": self.bounds.to_json(),
            "target_ratio": self.target_ratio,
            "strategy": self.strategy,
            "metric": self.metric,
            "direction": self.direction,
            "steps": list(self.steps),
            "uninformative": list(self.uninformative),
            "evaluations": self.evaluations,
            "trials": [{name: row[name] for name in _SHOWN} for row in rows],
            "rank_correlation": self.rank_correlation,
            "drop_rank_correlation": self.drop_rank_correlation,
            "seconds": self.seconds,
            "log": None if self.log is None else str(self.log),
            "notes": list(self.notes),
        }


_SHOWN: Final = (
    "step",
    "config",
    "ratio_weights",
    "drop",
    "divergence",
    "restore_gain",
    "restore_noise",
    "seconds",
    "failure",
    "partial",
)
