"""How far a search has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from inshrink_core.search.chains import ChainBench
from inshrink_core.search.trials import Trial

__all__ = ["OnSearch", "SearchProgress", "TrialCount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """How far a search has come, after a trial.

    Parameters
    ----------
    trial
        What was measured last.
    evaluations
        Trials measured so far, those of the log not counted.
    left
        About how many may follow.
    seconds_left
        About how long they take.
    best_ratio
        Ratio of the best chain that keeps the bounds so far; None for none.
    """

    trial: Trial
    evaluations: int
    left: int
    seconds_left: float
    best_ratio: float | None


OnSearch = Callable[[SearchProgress], None]
"""Called after each trial; raising from it cancels the search, and the log keeps what was measured."""


@dataclass
class TrialCount:
    """Counts trials, and says how many may follow."""

    bench: ChainBench
    progress: OnSearch | None
    evaluations: int = 0
    expected: int = 0
    _begun: float = field(default_factory=time.perf_counter)

    def plan(self, n_chains: int) -> None:
        """Expect so many more chains."""
        self.expected = self.evaluations + n_chains * len(self.bench.runner.steps)

    def told(self, trial: Trial) -> None:
        """Pass a trial on."""
        self.evaluations += 1
        if self.progress is None:
            return
        left = max(0, self.expected - self.evaluations)
        each = (time.perf_counter() - self._begun) / self.evaluations
        kept = [chain.ratio_weights for chain in self.bench.chains.values() if self.bench.keeps(chain)]
        self.progress(
            SearchProgress(
                trial=trial,
                evaluations=self.evaluations,
                left=left,
                seconds_left=left * each,
                best_ratio=max(kept, default=None),
            )
        )
