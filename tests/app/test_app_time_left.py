"""The time that a long job says it still takes, replayed against a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import pytest
from inshrink_app.jobs import job as jobs
from inshrink_app.jobs.follow import _advance
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Work

BEGUN = 1e9
TOLD_FROM, LAST = 10.0, 0.1
"""Seconds after which the time left is to be right, and the share at the end that is too short to judge."""

KINDS: dict[str, Callable[[random.Random], list[float]]] = {
    "even": lambda _: [0.3] * 400,
    "uneven": lambda one: [0.4 * one.uniform(0.3, 1.7) for _ in range(300)],
    "keyframes that take six times as long, after a kernel was compiled": lambda one: (
        [4.0, *(0.3 * one.uniform(0.5, 1.5) * (6 if i % 10 == 0 else 1) for i in range(400))]
    ),
    "two that compile": lambda one: [3.0, 3.0, *(0.3 * one.uniform(0.5, 1.5) for _ in range(400))],
    "few and long": lambda one: [one.uniform(4, 8) for _ in range(40)],
    "ever slower": lambda one: [0.3 * one.uniform(0.5, 1.5) * (1 + i / 400) for i in range(400)],
    "ever quicker": lambda one: [0.3 * one.uniform(0.5, 1.5) * (2.5 - i / 270) for i in range(400)],
}
"""Seconds of each part of a job, by what they are like."""


def job_of(*verbs: str) -> Job:
    job = Job(Work(documents=tuple({"verb": verb, "fields": {}} for verb in verbs), page="overview"))
    job.started_at = BEGUN
    return job


def replay(
    monkeypatch: pytest.MonkeyPatch, job: Job, told: list[tuple[float, Callable[[], None]]]
) -> Iterator[tuple[float, float | None, float]]:
    """Yield each second how long a job has run, how long it says that it takes, and how long it does."""
    now = 0.0
    monkeypatch.setattr(jobs.time, "time", lambda: BEGUN + now)
    waiting, end = list(told), told[-1][0]
    for second in range(1, int(end * (1 - LAST))):
        while waiting and waiting[0][0] <= second:
            now, tell = waiting.pop(0)
            tell()
        now = float(second)
        yield now, job.seconds_left, end - now


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_left_is_right_within_a_factor_of_two_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for seed in range(8):
        parts = KINDS[kind](random.Random(seed))
        job, ends = job_of("compress"), [3.0 + end for end in accumulate(parts)]
        told = [(end, partial(job.advance, done, len(parts), "")) for done, end in enumerate(ends, start=1)]
        # Five seconds have to be seen after the first part, which loads and compiles, or a few parts.
        silent_until = max(TOLD_FROM, ends[0] + 5.0, ends[2])
        for now, said, true in replay(monkeypatch, job, told):
            if now > silent_until + 1:
                assert said is not None, f"seed {seed}, after {now} s"
            if now >= TOLD_FROM and said is not None:
                assert true / 2 <= said <= 2 * true, f"seed {seed}, after {now} s"


def test_the_time_left_of_several_requests_counts_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("compress", "verify", "compare")
    takes, begins = (150.0, 45.0, 100.0), 3.0
    told: list[tuple[float, Callable[[], None]]] = []
    for place, seconds in enumerate(takes):
        for i in range(1, 51):
            told.append((begins + seconds * i / 50, partial(_advance, job, place, i / 50, "")))
        begins += seconds + 1.0
    for now, said, true in replay(monkeypatch, job, told):
        if now >= TOLD_FROM + 3.0:
            assert said is not None
            assert true / 2 <= said <= 2 * true, f"after {now} s"


def test_a_part_that_takes_longer_than_all_before_it_makes_the_rest_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_of("compress")
    told = [(float(done), partial(job.advance, done, 100, "")) for done in range(1, 11)]
    told.append((90.0, partial(job.log, "")))
    said = {now: left for now, left, _ in replay(monkeypatch, job, told)}
    assert said[80.0] > 3 * said[12.0]
