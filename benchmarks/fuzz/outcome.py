"""What became of the cases of a campaign."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.fuzz.target import BAD, Verdict


@dataclass
class Finding:
    """One defect, by the first case that showed it.

    Parameters
    ----------
    target, case
        Which case, of the campaign's seed.
    verdict
        What it came to.
    data
        The input.
    n_cases
        How many cases came to the same.
    """

    target: str
    case: int
    verdict: Verdict
    data: bytes
    n_cases: int = 1


@dataclass
class Tally:
    """What the cases of one target came to."""

    counts: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0
    slowest_seconds: float = 0.0

    @property
    def n_cases(self) -> int:
        """Cases that came to an end, of whatever kind."""
        return sum(self.counts.values())


@dataclass
class Campaign:
    """What a campaign found.

    Parameters
    ----------
    seed
        Makes the cases.
    tallies
        By target.
    findings
        By key.
    """

    seed: int
    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def n_bad(self) -> int:
        """Cases that came to a defect."""
        return sum(tally.counts[kind] for tally in self.tallies.values() for kind in BAD)

    def add(self, target: str, case: int, verdict: Verdict, data: bytes) -> None:
        """Note what one case came to."""
        tally = self.tallies[target]
        tally.counts[verdict.kind] += 1
        tally.slowest_seconds = max(tally.slowest_seconds, verdict.cpu_seconds)
        if not verdict.bad:
            return
        if verdict.key in self.findings:
            self.findings[verdict.key].n_cases += 1
        else:
            self.findings[verdict.key] = Finding(target, case, verdict, data)
