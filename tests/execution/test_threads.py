"""Results come in order, errors where they belong, and no more than a window is held."""

import contextlib
import gc
import threading
import time

import pytest

from inshrink_core.execution.threads import ordered_map, without_collection
from tests.processes import until


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_come_in_input_order(threads):
    def slow_first(item):
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    assert list(ordered_map(slow_first, range(20), threads=threads)) == [i * i for i in range(20)]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_raised_where_its_result_would_stand(threads):
    def fail_at_five(item):
        if item == 5:
            raise ValueError("five")
        return item

    seen: list[int] = []
    with pytest.raises(ValueError, match="five"):
        seen.extend(ordered_map(fail_at_five, range(100), threads=threads))
    assert seen == [0, 1, 2, 3, 4]


def test_no_more_than_a_window_is_computed_ahead():
    started = []
    lock = threading.Lock()

    def record(item):
        with lock:
            started.append(item)
        return item

    results = ordered_map(record, range(1000), threads=2)
    next(results)
    time.sleep(0.05)
    assert len(started) <= 4
    results.close()


def test_beside_a_heavy_item_as_many_light_ones_are_computed_as_weigh_the_same():
    release = threading.Event()
    done = []

    def wait_if_heavy(item):
        if item == 10:
            release.wait(5)
        done.append(item)
        return item

    items = [10, *[1] * 30]
    results = ordered_map(wait_if_heavy, iter(items), threads=2, weight=lambda item: item)
    first = threading.Thread(target=lambda: done.append(next(results)))
    first.start()
    until(lambda: len(done) >= 11)
    assert done == [1] * 11
    release.set()
    first.join()
    assert list(results) == items[1:]


def test_the_last_heavy_item_is_started_before_light_ones_that_stand_before_it():
    started = []
    lock = threading.Lock()
    admitted = threading.Event()

    def record(item):
        admitted.wait(5)
        with lock:
            started.append(item)
        return item

    def items():
        yield from [8, 1, 1, 1, 1, 4]
        # Once it is known that no more come.
        threading.Timer(0.1, admitted.set).start()

    assert list(ordered_map(record, items(), threads=2, weight=lambda item: item)) == [8, 1, 1, 1, 1, 4]
    assert 4 in started[:4]


def test_collection_is_paused_and_then_as_before():
    with contextlib.suppress(ZeroDivisionError), without_collection():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
