"""A campaign: workers that run batches of cases."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Final, NamedTuple

from benchmarks.fuzz import judging
from benchmarks.fuzz.judging import Limits, Worker
from benchmarks.fuzz.target import BAD, Target, Verdict, case_rng

_BATCH_SECONDS: Final = 0.5
_MAX_BATCH: Final = 2000
_POLL_SECONDS: Final = 0.05
_MAX_ALONE: Final = 3
"""A finding that so many fresh processes have shown needs no further one."""


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


class _Batch(NamedTuple):
    """Cases of one target, by its position."""

    target: int
    first: int
    end: int


class _Bad(NamedTuple):
    """A worker's report of a defect, made at once: the next case may end the worker."""

    case: int
    verdict: Verdict


class _Done(NamedTuple):
    """A worker's report of a batch: where it stopped."""

    end: int
    cpu_seconds: float
    slowest_seconds: float


def limits_of(target: Target, limits: Limits) -> Limits:
    """Return the limits of a target: its own where it has some."""
    cpu = getattr(target, "cpu_seconds", limits.cpu_seconds)
    memory = getattr(target, "memory_nbytes", limits.memory_nbytes)
    return limits._replace(cpu_seconds=cpu, memory_nbytes=memory)


class _BatchWorker(Worker):
    """A process that runs one batch."""

    def __init__(self, target: Target, seed: int, batch: _Batch, limits: Limits) -> None:
        self.target, self.batch = target, batch
        super().__init__(lambda worker: _run_batch(worker, target, seed, batch), limits)


def _run_batch(worker: Worker, target: Target, seed: int, batch: _Batch) -> None:
    counts: Counter[str] = Counter()
    begun, cpu, slowest, case = time.monotonic(), time.process_time(), 0.0, batch.first
    worker.count(counts)
    judging.bound_memory(worker.limits)
    while case < batch.end and time.monotonic() - begun < _BATCH_SECONDS:
        worker.begin(case)
        verdict = judging.judge(target, input_of(target, seed, case))
        slowest = max(slowest, verdict.cpu_seconds)
        if verdict.bad:
            worker.report(_Bad(case, verdict))
        counts[verdict.kind] += 1
        worker.count(counts)
        case += 1
    worker.end()
    worker.report(_Done(case, time.process_time() - cpu, slowest))


def input_of(target: Target, seed: int, case: int) -> bytes:
    """Return the input of a case; those below zero are the sound ones."""
    return target.seeds()[-1 - case] if case < 0 else target.mutate(case_rng(target.name, seed, case))


class Fuzzer:
    """Runs a campaign.

    Parameters
    ----------
    targets
        What is attacked; sound inputs are made and read here, before the workers are forked.
    seed
        Makes the cases.
    limits
        What one case may cost.
    workers
        Processes.
    """

    def __init__(
        self, targets: Sequence[Target], seed: int, limits: Limits | None = None, workers: int = 1
    ) -> None:
        self._targets = list(targets)
        for target in targets:
            warm_up(target)
        self._limits = limits or Limits()
        self._n_workers = workers
        self.campaign = Campaign(seed, {target.name: Tally() for target in targets})
        self._next = [-len(target.seeds()) for target in self._targets]
        self._again: list[_Batch] = []
        self._workers: list[_BatchWorker] = []
        self._most_cases: int | None = None

    def run(self, seconds: float | None, cases: int | None = None) -> Campaign:
        """Run until the time is over, or each target has had so many cases.

        Sound inputs are tried first, as the cases below zero: their defects are findings too.
        """
        self._most_cases = cases
        # Time begins where cases do: compiling kernels and building archives is no attack.
        end = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                over = end is not None and time.monotonic() > end
                while len(self._workers) < self._n_workers and not over and (batch := self._next_batch()):
                    target = self._targets[batch.target]
                    limits = limits_of(target, self._limits)
                    self._workers.append(_BatchWorker(target, self.campaign.seed, batch, limits))
                if not self._workers:
                    return self.campaign
                self._listen()
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                worker.close()

    def _next_batch(self) -> _Batch | None:
        """Return cases of the target that has had the least time."""
        if self._again:
            return self._again.pop()
        open_ = [
            i
            for i in range(len(self._targets))
            if self._most_cases is None or self._next[i] < self._most_cases
        ]
        if not open_:
            return None
        # Another worker takes another target meanwhile.
        busy = Counter(worker.batch.target for worker in self._workers)
        least = min(open_, key=lambda i: (self._tally(i).cpu_seconds + busy[i] * _BATCH_SECONDS, i))
        first = self._next[least]
        end = first + _MAX_BATCH if self._most_cases is None else min(first + _MAX_BATCH, self._most_cases)
        self._next[least] = end
        return _Batch(least, first, end)

    def _tally(self, target: int) -> Tally:
        return self.campaign.tallies[self._targets[target].name]

    def _listen(self) -> None:
        """Take in reports, and see to workers that ended, died or overran."""
        ready = wait([worker.reports for worker in self._workers], timeout=_POLL_SECONDS)
        for worker in tuple(self._workers):
            if worker.reports in ready:
                self._take(worker)
            elif worker.overrun():
                self._stop(worker)

    def _take(self, worker: _BatchWorker) -> None:
        """Take in one report, or the end of a worker that died: at a case, or between two."""
        try:
            report: _Bad | _Done = worker.reports.recv()
        except EOFError:
            case, verdict = worker.case(), worker.crashed(worker.target.name)
            if case is not None:
                self._note(worker.target, case, verdict)
            self._finished(worker, worker.batch.first if case is None else case + 1)
            return
        if isinstance(report, _Bad):
            self._note(worker.target, *report)
            return
        os.waitpid(worker.pid, 0)
        tally = self._tally(worker.batch.target)
        tally.cpu_seconds += report.cpu_seconds
        tally.slowest_seconds = max(tally.slowest_seconds, report.slowest_seconds)
        self._finished(worker, report.end)

    def _stop(self, worker: _BatchWorker) -> None:
        """End a worker whose case does not end."""
        case, verdict = worker.case(), worker.hung(worker.target.name)
        while worker.reports.poll():
            try:
                report = worker.reports.recv()
            except EOFError:
                break
            if isinstance(report, _Bad):
                self._note(worker.target, *report)
        if case is not None:
            self._note(worker.target, case, verdict)
            self._tally(worker.batch.target).cpu_seconds += worker.limits.cpu_seconds
        self._finished(worker, worker.batch.first if case is None else case + 1)

    def _finished(self, worker: _BatchWorker, end: int) -> None:
        """Count the cases of a batch that came to no harm, and put back those that were not run."""
        batch = worker.batch
        harmless = {kind: n for kind, n in worker.counts().items() if n and kind not in BAD}
        self._tally(batch.target).counts.update(harmless)
        if end < batch.end and batch.end == self._next[batch.target]:
            self._next[batch.target] = end
        elif end < batch.end:
            self._again.append(batch._replace(first=end))
        self._workers.remove(worker)
        worker.close()

    def _note(self, target: Target, case: int, verdict: Verdict) -> None:
        """Note a defect; what depends on the state of a process is looked at again in a fresh one."""
        data = input_of(target, self.campaign.seed, case)
        known = self.campaign.findings.get(verdict.key)
        often = known is not None and (verdict.kind == "hang" or known.n_cases >= _MAX_ALONE)
        if verdict.kind in ("memory", "hang", "crash") and not (often and verdict.frames):
            verdict = judging.judge_alone(target, data, limits_of(target, self._limits))
        self.campaign.add(target.name, case, verdict, data)


def warm_up(target: Target) -> None:
    """Read what is sound once: compiling kernels and importing modules is no part of any case."""
    for data in target.seeds():
        with contextlib.suppress(Exception):  # a defect that a sound input shows is found as a case
            target.execute(data)
