"""A campaign: workers that run batches of cases."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Final, NamedTuple

from benchmarks.fuzz import scratch
from benchmarks.fuzz.judging import (
    Limits,
    Record,
    bound_memory,
    confine,
    crash_verdict,
    hang_verdict,
    judge,
    judge_alone,
    pipe,
    spawn,
    stop,
)
from benchmarks.fuzz.outcome import Campaign, Finding, Tally
from benchmarks.fuzz.target import BAD, Target, Verdict, case_rng, pieces

_BATCH_SECONDS: Final = 0.5
_MOST_BATCH: Final = 2000
_POLL_SECONDS: Final = 0.05
_MOST_ALONE: Final = 3
"""A finding that so many fresh processes have shown needs no further one."""


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


class _Worker:
    """A process that runs batches, and what is known of it from outside."""

    def __init__(self, targets: Sequence[Target], seed: int, limits: Limits) -> None:
        self.record = Record()
        self.batch: _Batch | None = None
        ours_in, theirs_out = pipe()
        theirs_in, self.orders = pipe()
        self.reports = ours_in

        def work() -> None:
            ours_in.close()
            self.orders.close()
            confine(limits)
            _serve(targets, seed, limits, theirs_in, theirs_out, self.record)

        self.pid = spawn(work, self.record)
        theirs_in.close()
        theirs_out.close()

    def give(self, batch: _Batch) -> None:
        """Have it run a batch."""
        self.batch = batch
        self.orders.send(batch)

    def end(self) -> None:
        """End it where it still runs, and free what it held."""
        self.orders.close()
        self.reports.close()
        self.record.close()
        scratch.forget(self.pid)


def _serve(
    targets: Sequence[Target],
    seed: int,
    limits: Limits,
    orders: Connection,
    reports: Connection,
    record: Record,
) -> None:
    """Run batches until there are no more."""
    while True:
        try:
            batch: _Batch = orders.recv()
        except EOFError:
            return
        target = targets[batch.target]
        done = _run_batch(target, seed, batch, limits_of(target, limits), record, reports.send)
        reports.send(done)


def _run_batch(
    target: Target,
    seed: int,
    batch: _Batch,
    limits: Limits,
    record: Record,
    report: Callable[[_Bad], None],
) -> _Done:
    counts: Counter[str] = Counter()
    begun, cpu, slowest, case = time.monotonic(), time.process_time(), 0.0, batch.first
    record.count(counts)
    bound_memory(limits)
    while case < batch.end and time.monotonic() - begun < _BATCH_SECONDS:
        record.begin(case)
        verdict = judge(target, input_of(target, seed, case))
        slowest = max(slowest, verdict.cpu_seconds)
        if verdict.bad:
            report(_Bad(case, verdict))
        counts[verdict.kind] += 1
        record.count(counts)
        case += 1
    record.end()
    return _Done(case, time.process_time() - cpu, slowest)


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
        # So that another worker takes another target meanwhile.
        self._started = [0] * len(self._targets)
        self._most_cases: int | None = None

    def run(
        self,
        seconds: float | None,
        cases: int | None = None,
        live: Callable[[Campaign], None] | None = None,
    ) -> Campaign:
        """Run until the time is over, or each target has had so many cases.

        Sound inputs are tried first, as the cases below zero: their defects are findings too.
        """
        self._most_cases = cases
        # Time begins where cases do: compiling kernels and building archives is no attack.
        end = None if seconds is None else time.monotonic() + seconds
        workers = [_Worker(self._targets, self.campaign.seed, self._limits) for _ in range(self._n_workers)]
        try:
            while True:
                over = end is not None and time.monotonic() > end
                for position, worker in enumerate(workers):
                    if worker.batch is None and not over and (batch := self._next_batch()):
                        try:
                            worker.give(batch)
                        except OSError:
                            _reap(worker.pid)
                            workers[position] = self._replaced(worker)
                            self._started[batch.target] -= 1
                            self._again.append(batch)
                if not any(worker.batch for worker in workers):
                    return self.campaign
                self._listen(workers)
                if live is not None:
                    live(self.campaign)
        finally:
            for worker in workers:
                # A worker does not see that its orders have ended: others hold the pipe too.
                os.kill(worker.pid, signal.SIGKILL)
                _reap(worker.pid)
                worker.end()

    def _next_batch(self) -> _Batch | None:
        """Return cases of the target that has had the least time."""
        if self._again:
            batch = self._again.pop()
            self._started[batch.target] += 1
            return batch
        open_ = [
            i
            for i in range(len(self._targets))
            if self._most_cases is None or self._next[i] < self._most_cases
        ]
        if not open_:
            return None
        least = min(open_, key=lambda i: (self._tally(i).cpu_seconds + self._started[i] * _BATCH_SECONDS, i))
        first = self._next[least]
        end = first + _MOST_BATCH if self._most_cases is None else min(first + _MOST_BATCH, self._most_cases)
        self._next[least] = end
        batch = _Batch(least, first, end)
        self._started[least] += 1
        return batch

    def _tally(self, target: int) -> Tally:
        return self.campaign.tallies[self._targets[target].name]

    def _listen(self, workers: list[_Worker]) -> None:
        """Take in reports, and see to workers that died or overran."""
        ready = wait([worker.reports for worker in workers], timeout=_POLL_SECONDS)
        for position, worker in enumerate(workers):
            if worker.reports in ready:
                try:
                    report: _Bad | _Done = worker.reports.recv()
                except EOFError:
                    workers[position] = self._buried(worker)
                    continue
                if isinstance(report, _Bad):
                    self._take_bad(worker, report)
                    continue
                self._take(worker, report)
            elif worker.batch is not None:
                target = self._targets[worker.batch.target]
                if worker.record.overrun(worker.pid, limits_of(target, self._limits)):
                    workers[position] = self._stopped(worker, target)

    def _take_bad(self, worker: _Worker, report: _Bad) -> None:
        if worker.batch is not None:
            self._note(self._targets[worker.batch.target], *report)

    def _take(self, worker: _Worker, done: _Done) -> None:
        if worker.batch is None:
            return
        tally = self._tally(worker.batch.target)
        tally.cpu_seconds += done.cpu_seconds
        tally.slowest_seconds = max(tally.slowest_seconds, done.slowest_seconds)
        self._finished(worker, done.end)

    def _finished(self, worker: _Worker, end: int) -> None:
        """Count the cases of a batch that came to no harm, and put back those that were not run."""
        batch = worker.batch
        if batch is None:
            return
        worker.batch = None
        self._started[batch.target] -= 1
        harmless = {kind: n for kind, n in worker.record.counts().items() if n and kind not in BAD}
        self._tally(batch.target).counts.update(harmless)
        if end >= batch.end:
            return
        if batch.end == self._next[batch.target]:
            self._next[batch.target] = end
        else:
            self._again.append(batch._replace(first=end))

    def _note(self, target: Target, case: int, verdict: Verdict) -> None:
        """Note a defect; what depends on the state of a process is looked at again in a fresh one."""
        data = input_of(target, self.campaign.seed, case)
        known = self.campaign.findings.get(verdict.key)
        often = known is not None and (verdict.kind == "hang" or known.n_cases >= _MOST_ALONE)
        if verdict.kind in ("memory", "hang", "crash") and not (often and verdict.frames):
            verdict = judge_alone(target, data, limits_of(target, self._limits))
        self.campaign.add(target.name, case, verdict, data)

    def _buried(self, worker: _Worker) -> _Worker:
        """See to a worker that died: of the case it was at, or between two."""
        status = os.waitpid(worker.pid, 0)[1]
        case = worker.record.case()
        if worker.batch is not None and case is not None:
            target = self._targets[worker.batch.target]
            self._note(target, case, crash_verdict(target.name, status, worker.record.frames()))
            self._finished(worker, case + 1)
        elif worker.batch is not None:
            self._finished(worker, worker.batch.first)
        return self._replaced(worker)

    def _stopped(self, worker: _Worker, target: Target) -> _Worker:
        case = worker.record.case()
        frames = stop(worker.pid, worker.record)
        while worker.reports.poll():
            try:
                report = worker.reports.recv()
            except EOFError:
                break
            if isinstance(report, _Bad):
                self._take_bad(worker, report)
        if case is not None and worker.batch is not None:
            limits = limits_of(target, self._limits)
            self._note(target, case, hang_verdict(target.name, frames, limits))
            self._tally(worker.batch.target).cpu_seconds += limits.cpu_seconds
            self._finished(worker, case + 1)
        return self._replaced(worker)

    def _replaced(self, worker: _Worker) -> _Worker:
        worker.end()
        return _Worker(self._targets, self.campaign.seed, self._limits)


def warm_up(target: Target) -> None:
    """Read what is sound once: compiling kernels and importing modules is no part of any case."""
    for data in target.seeds():
        with contextlib.suppress(Exception):  # a defect that a sound input shows is found as a case
            target.execute(data)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return


def minimised(target: Target, finding: Finding, limits: Limits, seconds: float) -> bytes:
    """Return a smaller input that comes to the same, found within the time."""
    end, data = time.monotonic() + seconds, finding.data
    if finding.verdict.kind == "hang":
        limits = limits._replace(cpu_seconds=min(limits.cpu_seconds, seconds / 4))
    found = True
    while found:
        found = False
        for smaller in pieces(target, data):
            if time.monotonic() > end:
                return data
            if len(smaller) < len(data) and judge_alone(target, smaller, limits).key == finding.verdict.key:
                data, found = smaller, True
                break
    return data
