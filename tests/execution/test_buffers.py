"""Buffers are writable, their own, and of the size asked for, mapped or not."""

from __future__ import annotations

import pytest
import torch

from inshrink_core.execution import buffers, new_array, new_buffer, ordered_map, recycling


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 3])
def test_a_buffer_has_its_size_and_shares_nothing(nbytes: int) -> None:
    one, other = new_buffer(nbytes), new_buffer(nbytes)
    assert len(one) == len(other) == nbytes
    one[:] = b"\1" * nbytes
    other[:] = b"\2" * nbytes
    assert bytes(one) == b"\1" * nbytes


def test_a_tensor_keeps_the_buffer_it_was_made_from() -> None:
    buffer = new_buffer(1 << 20)
    buffer[:4] = b"\1\2\3\4"
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    del buffer
    assert tensor[:4].tolist() == [1, 2, 3, 4]


def test_memory_of_dropped_arrays_is_used_again_and_never_that_of_held_ones() -> None:
    n = 3 << 18
    with recycling():
        held = [torch.from_numpy(new_array(n, "f4")).fill_(i).view(3, -1)[1:] for i in range(3)]
        views = [new_array(n, "f4")[5:].view("i4") for _ in range(2)]
        for i, view in enumerate(views):
            view[:] = i
        places = set()
        for i in range(20):
            fresh = new_array(n, "f4")
            fresh[:] = -i
            places.add(fresh.ctypes.data)
            buffer = new_buffer(4 * n)
            buffer[:] = b"\7" * (4 * n)
            del fresh, buffer
        assert len(places) <= 2
        assert [(float(one.min()), float(one.max())) for one in held] == [(i, i) for i in range(3)]
        assert [(int(view.min()), int(view.max())) for view in views] == [(i, i) for i in range(2)]
    assert [(float(one.min()), float(one.max())) for one in held] == [(i, i) for i in range(3)]


def test_nothing_is_kept_for_another_use_when_no_one_recycles_any_more() -> None:
    with recycling():
        with recycling():
            dropped = new_array(1 << 20, "u1")
            del dropped
        assert spare_nbytes() == 1 << 20
        many = [new_array(1 << 25, "u1") for _ in range(12)]
        del many
        assert spare_nbytes() <= 1 << 28
    assert spare_nbytes() == 0


def test_what_is_dropped_soon_takes_the_smallest_memory_that_waits_and_is_large_enough() -> None:
    mib = 1 << 20
    with recycling():
        arrays = [new_array(n * mib, "u1") for n in (4, 2, 3)]
        places = [array.ctypes.data for array in arrays]
        del arrays
        brief = new_array(mib, "u1", brief=True)
        assert brief.size == mib
        assert brief.ctypes.data == places[1]
        assert new_array(mib, "u1").ctypes.data not in places


def test_beside_what_is_in_use_a_quarter_of_the_most_that_was_may_wait() -> None:
    mib = 1 << 20
    with recycling():
        held = [new_array(16 * mib, "u1") for _ in range(2)]
        del held[0]
        held += [new_array(n * mib, "u1") for n in (6, 7, 5)]
        assert sum(array.size for array in held) + spare_nbytes() <= (34 + 34 // 4) * mib
        del held[3]
        held.append(new_array(8 * mib, "u1"))
        assert spare_nbytes() == 5 * mib


def test_with_what_waits_no_more_is_held_than_was_in_use_at_a_time() -> None:
    mib = 1 << 20
    with recycling():
        held = [new_array(16 * mib, "u1") for _ in range(2)]
        del held
        for size in (2, 3, 4, 5, 6, 7):
            held = [new_array(size * mib, "u1") for _ in range(3)]
            assert 3 * size * mib + spare_nbytes() <= 32 * mib
            del held
        assert spare_nbytes() > 16 * mib


def test_threads_never_share_recycled_memory() -> None:
    def fill_and_look(value: int) -> bool:
        array = new_array(1 << 20, "u1")
        array[:] = value
        other = new_array(1 << 20, "u1")
        other[:] = 255 - value
        return bool((array == value).all() and (other == 255 - value).all())

    with recycling():
        assert all(ordered_map(fill_and_look, range(100), threads=4))


def spare_nbytes() -> int:
    return sum(size * len(kept) for size, kept in buffers._spare.items())
