"""The cases of all verbs and modes within a time, what they found, and how it is shown."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final

from benchmarks.crash.cases import CLASSES, Stage
from benchmarks.crash.modes import CASES, Case
from benchmarks.crash.shim import Shim
from benchmarks.crash.verbs import VERBS
from benchmarks.results import renew

RANKS: Final = "ranks"
"""What is no verb: a training whose ranks save themselves."""

_SHOWN = 3
"""Examples of a problem that are shown of each verb and mode: the first ones tell the cause."""


class Work:
    """All cases of one call, taken from verbs and modes in turn."""

    def __init__(
        self, shim: Shim, folder: Path, seed: int, verbs: Sequence[str] | None, modes: Sequence[str] | None
    ) -> None:
        known = (*VERBS, RANKS)
        for name in verbs or ():
            if name not in known:
                raise SystemExit(f"there is no verb '{name}': choose of {', '.join(known)}")
        self._shim, self._folder, self._seed = shim, folder, seed
        wanted = tuple(verbs or known)
        self._verbs, self._modes = tuple(name for name in wanted if name != RANKS), tuple(modes or CASES)
        self._has_ranks = RANKS in wanted and "kill" in self._modes
        self._cases: Counter[tuple[str, str]] = Counter()
        self._problems: Counter[tuple[str, str, str]] = Counter()
        self._examples: dict[tuple[str, str, str], list[str]] = {}
        self._operations: dict[str, int] = {}

    @property
    def found(self) -> int:
        """Number of cases' problems."""
        return self._problems.total()

    def run(self, seconds: float, n_cases: Mapping[str, int | None]) -> None:
        """Run the cases of each verb and mode for a fair share of the time, or at most so many."""
        deadline = time.monotonic() + seconds
        for number, verb in enumerate(self._verbs):
            stage = Stage(VERBS[verb](), self._shim, self._folder / verb)
            stage.open()
            self._operations[verb] = stage.n_operations
            for place, mode in enumerate(self._modes):
                remaining = (len(self._verbs) - number) * len(self._modes) - place
                share = (deadline - time.monotonic()) / remaining
                self._run_mode(stage, mode, share, n_cases[mode])
                if seconds == math.inf:
                    line = f"{verb} {mode}: {self._cases[verb, mode]} cases, {self.found} bad so far"
                    print(line, file=sys.stderr, flush=True)

    def run_ranks(self, n_cases: int | None) -> None:
        """Kill ranks at every point of a save, or at so many: they take their own time."""
        if not self._has_ranks:
            return
        from benchmarks.crash.ranks import RankStage

        stage = RankStage(self._folder / RANKS)
        stage.open()
        self._operations[RANKS] = stage.n_operations
        cases = stage.kills(Random(f"{self._seed} {RANKS}"))
        for case in self._limited(cases, math.inf, n_cases):
            self._count(RANKS, "kill", case)

    def _run_mode(self, stage: Stage, mode: str, seconds: float, n_cases: int | None) -> None:
        until, verb = time.monotonic() + seconds, stage.verb.name
        for case in self._limited(CASES[mode](stage, Random(f"{self._seed} {verb} {mode}")), until, n_cases):
            self._count(verb, mode, case)

    def _count(self, verb: str, mode: str, case: Case) -> None:
        self._cases[verb, mode] += 1
        for problem in set(text.partition(":")[0] for text in case.outcome.problems):
            self._problems[verb, mode, problem] += 1
        for problem in case.outcome.problems[:1]:
            shown = self._examples.setdefault((verb, mode, problem.partition(":")[0]), [])
            if len(shown) < _SHOWN:
                shown.append(f"{case.name}: {problem} [{case.outcome.ended or 'killed'}]")
                sys.stderr.write(f"{verb}, {mode}: {shown[-1]}\n")

    def _limited(self, cases: Iterator[Case], until: float, n_cases: int | None) -> Iterator[Case]:
        """Take cases while there is time, one at least, and at most so many."""
        for number, case in enumerate(cases, 1):
            yield case
            if time.monotonic() >= until or number == n_cases:
                return

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each verb and mode."""
        return [
            {
                "verb": verb,
                "mode": mode,
                "operations": self._operations[verb],
                "cases": self._cases[verb, mode],
                **{problem: self._problems[verb, mode, problem] for problem in CLASSES},
                "seed": self._seed,
            }
            for verb, mode in [
                *((verb, mode) for verb in self._verbs for mode in self._modes),
                *([(RANKS, "kill")] if self._has_ranks else ()),
            ]
        ]

    def write(self) -> Path:
        """Write the rows to ``results/crash.csv``; rows of verbs and modes that did not run are kept."""
        return renew("crash", self.rows(), ("verb", "mode"))

    def show(self) -> None:
        """Print a table of all."""
        columns = ("verb", "mode", "operations", "cases", *CLASSES)
        print(" ".join(f"{column:>10}" for column in columns))
        for row in self.rows():
            print(" ".join(f"{row[column]!s:>10}" for column in columns))
        print(f"{self._cases.total()} cases, {self.found} bad")


def write_schedules(n: int, seconds: float) -> Path:
    """Write the row of so many schedules that found nothing (`benchmarks.crash.schedules`)."""
    row = {"verb": "parts", "mode": "schedule", "cases": n, **dict.fromkeys(CLASSES, 0), "seconds": seconds}
    return renew("crash", [row], ("verb", "mode"))
