"""The modes: which cases of a verb there are, in an order that a seed decides."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from benchmarks.crash.cases import Outcome, Stage
from benchmarks.crash.disk import Disk, Style, Tree
from benchmarks.crash.shim import Kind, Operation, Plan, Strike

GROWING = frozenset({Kind.CREATE, Kind.WRITE, Kind.FSYNC, Kind.RENAME, Kind.LINK, Kind.MKDIR, Kind.TRUNCATE})
"""What a full disk refuses."""
ANY = frozenset(Kind) - {Kind.NOTE}

FAULTS = (
    (Strike.FAIL_ON, errno.ENOSPC, GROWING),
    (Strike.FAIL_ONCE, errno.EIO, ANY),
    (Strike.FAIL_THEN_READ_ONLY, errno.EIO, ANY),
    (Strike.FAIL_ONCE, errno.ENOSPC, GROWING),
    (Strike.SHORT, 0, frozenset({Kind.WRITE})),
    (Strike.FAIL_ONCE, errno.EINTR, frozenset({Kind.CREATE, Kind.WRITE, Kind.FSYNC})),
)
"""A full disk; one block that cannot be read or written; the same on a file system that then goes read-only;
a disk full for a moment; a write that does less than was asked for; a signal."""

KILLS = (Strike.KILL_BEFORE, Strike.KILL_AMID, Strike.KILL_AFTER)
N_RANDOM = 8
"""Random states of the disk after each operation, beside the extreme ones."""


N_OF_ONE_KILL = 8


class Case(NamedTuple):
    """One case: its name, and what came of it."""

    name: str
    outcome: Outcome


def kills(stage: Stage, random: Random) -> Iterator[Case]:
    """Kill the verb at random operations, for ever."""
    while True:
        plan = Plan(random.choice(KILLS), random.randint(1, stage.n_operations))
        yield Case(plan.name, stage.killed(plan))


def fault_plans(stage: Stage) -> list[Plan]:
    """Return every failure of every operation, the sorts of failures one after the other."""
    return [
        Plan(strike, at, error, kinds)
        for strike, error, kinds in FAULTS
        for at in range(1, stage.n_operations + 1)
    ]


def faults(stage: Stage, random: Random) -> Iterator[Case]:
    """Fail every operation in every way, in random order of the ways' operations."""
    plans = fault_plans(stage)
    random.shuffle(plans)
    plans.sort(key=lambda plan: [entry[:2] for entry in FAULTS].index((plan.strike, plan.error)))
    done: set[tuple[Strike, int, int]] = set()
    for plan in plans:
        if (plan.strike, plan.error, plan.at) in done:
            continue
        outcome = stage.failed(plan)
        # An operation that cannot fail so passes the blow on to the next: those between are done, too.
        last = outcome.fired or stage.n_operations
        done |= {(plan.strike, plan.error, at) for at in range(plan.at, last + 1)}
        if outcome.fired:
            yield Case(plan.name, outcome)


def power_states(
    stage: Stage, log: Sequence[Operation], random: Random, killed: Sequence[Operation] = ()
) -> list[tuple[str, Tree, tuple[str, ...]]]:
    """Return what power losses leave after each operation of a log, each state once, in random order.

    Where a process was killed before, what it did is on the disk as far as it was synced then or is now.
    """
    disk = Disk(stage.root, stage.before)
    for operation in killed:
        disk.apply(operation)
    disk.end_process()
    notes = tuple(operation.path for operation in killed if operation.kind is Kind.NOTE)
    found: dict[object, tuple[str, Tree, tuple[str, ...]]] = {}
    for number, operation in enumerate((None, *log)):
        if operation is not None:
            disk.apply(operation)
            if operation.kind is Kind.NOTE:
                notes = (*notes, operation.path)
        for style in (*(entry for entry in Style if entry is not Style.RANDOM), *[Style.RANDOM] * N_RANDOM):
            tree = disk.after(style, random)
            key = (frozenset(tree.items()), notes)
            found.setdefault(key, (f"{style.value} after operation {number}", tree, notes))
    states = list(found.values())
    random.shuffle(states)
    return states


def powers(stage: Stage, random: Random) -> Iterator[Case]:
    """Cut the power at every operation."""
    for name, tree, notes in power_states(stage, stage.log, random):
        yield Case(f"power loss: {name}", stage.without_power(tree, notes))


def boths(stage: Stage, random: Random) -> Iterator[Case]:
    """Kill the verb, run it again, and cut the power of that, for ever; a few states of each kill."""
    while True:
        plan = Plan(random.choice(KILLS), random.randint(1, stage.n_operations))
        killed, log = stage.killed_and_continued(plan)
        for name, tree, notes in power_states(stage, log, random, killed)[:N_OF_ONE_KILL]:
            outcome = stage.without_power(tree, notes)
            yield Case(f"{plan.name}, then power loss of the next run: {name}", outcome)


def replays(stage: Stage) -> bool:
    """Whether the log tells all that the verb did: replayed, it gives what lies there."""
    disk = Disk(stage.root, stage.before)
    for operation in stage.log:
        disk.apply(operation)
    return disk.after(Style.MOST, Random(0)) == stage.logged


CASES = {"kill": kills, "fault": faults, "power": powers, "both": boths}
