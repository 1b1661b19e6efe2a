"""The protocol of parts against a list, in many schedules; and schedules find what is wrong with it."""

import time
from dataclasses import replace
from unittest import mock

import pytest

from benchmarks.crash import schedules
from inshrink_core.archive import catalog, writer
from inshrink_core.archive.manifest import Manifest
from inshrink_core.archive.storage import registry
from inshrink_core.errors import InshrinkError

N_SCHEDULES = 500
"""Among so many each protocol that is wrong fails; `make crash` runs more."""


def test_schedules_of_parts_lose_and_double_no_frame():
    schedules.run_schedules(N_SCHEDULES, derandomize=True)


def open_to_all(process_of):
    return lambda storage: schedules.TakenLock(storage._process)


def used_again(_):
    return property(lambda found: max((frame.generation for frame in found.frames), default=0) + 1)


def over_others(create):
    return lambda storage, path, over=False: create(storage, path, over=True)


def without_tombstones(without_frames):
    return lambda manifest, generations: replace(without_frames(manifest, generations), tombstones=())


def fewer_parts(same_frames):
    return lambda parts: (replace(frame, n_parts=max(2, frame.n_parts - 1)) for frame in same_frames(parts))


BUGS = {
    "a lock that keeps nobody out": (schedules.Simulated, "lock", open_to_all),
    "a generation given twice": (catalog.Catalog, "next_generation", used_again),
    "a part that takes the place of another": (schedules.Simulated, "create", over_others),
    "removed frames that nothing remembers": (Manifest, "without_frames", without_tombstones),
    "parts that contradict each other listed": (writer, "contradictory", lambda _: lambda *rows: {}),
    "a frame taken for whole one part too early": (catalog, "_same_frames", fewer_parts),
}


@pytest.mark.parametrize("bug", BUGS)
def test_schedules_find_a_protocol_that_is_wrong_and_leave_nothing_patched(bug):
    where, name, made = BUGS[bug]
    before = time.sleep, registry._opened
    wrong = mock.patch.object(where, name, made(getattr(where, name)))
    with wrong, pytest.raises((AssertionError, InshrinkError, ValueError)):
        schedules.run_schedules(N_SCHEDULES, derandomize=True, shrink=False)
    assert (time.sleep, registry._opened) == before
