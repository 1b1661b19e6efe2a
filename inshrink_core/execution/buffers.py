"""Memory for whole tensors: given back to the system as soon as it is dropped, or to the next tensor."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


_MAPPED_NBYTES = 1 << 20
"""From this size on, mapping and unmapping costs less than filling the buffer once."""

_GRAIN = 1 << 20
"""Sizes of mappings are multiples of it, so that tensors of nearly the same size share them."""

_MAX_SPARE_NBYTES = 1 << 28
"""Spare memory beyond it goes back to the system: a few tensors of some ten million elements."""

_WAITING = 4
"""Part of what was in use at a time that may wait beside it."""

_spare: dict[int, list[mmap.mmap]] = {}
"""By size, that which was given back last at the end."""

_used: dict[int, int] = {}
"""Sizes of what is lent, by the lender's identity."""

_most_used = 0
"""Most that was lent at a time since recycling began."""

_lock = threading.Lock()
_n_recycling = 0


@contextmanager
def recycling() -> Iterator[None]:
    """Hand the memory of dropped buffers to new ones while the context is open, in any thread.

    Notes
    -----
    The system fills fresh memory with zeros, one thread after the other where they share a process: a
    quarter of the time of decoding a large tensor. At most 256 MB wait for another use, and none once the
    last context is closed. With what is in use they are never more than were in use at a time, or a quarter
    of that where all of it is in use: less, and a chain's first frame would map memory for each tensor anew.
    """
    global _n_recycling, _most_used
    with _lock:
        if not _n_recycling:
            _most_used = sum(_used.values())
        _n_recycling += 1
    try:
        yield
    finally:
        with _lock:
            _n_recycling -= 1
        if not _n_recycling:
            _spare.clear()


def new_array(n: int, dtype: DTypeLike, *, brief: bool = False) -> NDArray[Any]:
    """Return an array of `n` elements of any content; its memory is recycled where `recycling` says so.

    Parameters
    ----------
    n, dtype
        Of the array.
    brief
        Whether it is dropped within the work on its tensor: it may then lie in the memory of a larger one.

    Examples
    --------
    >>> with recycling():
    ...     new_array(3, "u1").shape
    (3,)
    """
    import numpy as np

    kind = np.dtype(dtype)
    if not _n_recycling or n * kind.itemsize < _MAPPED_NBYTES:
        return np.empty(n, kind)
    return np.frombuffer(_lent(n * kind.itemsize, brief), kind, n)


def new_buffer(nbytes: int) -> memoryview:
    """Return a writable buffer of its own.

    Parameters
    ----------
    nbytes
        Its size.

    Returns
    -------
    memoryview
        Bytes of any content. Pages that are never written take no memory.

    Notes
    -----
    An allocator keeps a tensor's memory in the heap of the thread that freed it, where smaller blocks
    that live longer keep it from shrinking: with two threads, over a gigabyte where a third of it is in
    use. Large buffers are therefore mapped one by one.
    """
    if nbytes < _MAPPED_NBYTES:
        return memoryview(bytearray(nbytes))
    if not _n_recycling:
        return memoryview(_mapped(nbytes))
    return memoryview(_lent(nbytes)).cast("B")[:nbytes]


def _lent(nbytes: int, brief: bool = False) -> Any:
    """Return an object that lends a mapping for as long as an array or a memoryview of it exists."""
    size = -(-nbytes // _GRAIN) * _GRAIN
    if brief:
        size = min((one for one, kept in list(_spare.items()) if kept and one >= size), default=size)
    try:
        mapping = _spare[size].pop()
    except (KeyError, IndexError):
        _make_room(size)
        mapping = _mapped(size)
    # What is made of it refers to this object, and nothing to the mapping itself.
    lender = (ctypes.c_char * size).from_buffer(mapping)
    _used[id(lender)] = size
    weakref.finalize(lender, _give_back, id(lender), size, mapping).atexit = False
    return lender


def _make_room(nbytes: int) -> None:
    """Drop what has waited longest, as far as it is more than `recycling` says."""
    global _most_used
    used = sum(_used.values()) + nbytes
    _most_used = max(_most_used, used)
    for size in list(_spare):
        kept = _spare.get(size)
        while kept and _spare_nbytes() > max(_most_used - used, _most_used // _WAITING):
            with suppress(IndexError):  # another thread took it
                kept.pop()


def _spare_nbytes() -> int:
    return sum(n * len(kept) for n, kept in list(_spare.items()))


def _give_back(lender: int, size: int, mapping: mmap.mmap) -> None:
    """Keep a mapping for another use; called wherever the last reference goes, so without a lock."""
    _used.pop(lender, None)
    if _n_recycling and _spare_nbytes() + size <= _MAX_SPARE_NBYTES:
        kept = _spare.pop(size, [])  # what another thread gives back meanwhile is lost, which is no harm
        kept.append(mapping)
        _spare[size] = kept


def _mapped(nbytes: int) -> mmap.mmap:
    """Return memory of zeros."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    # Private: a shared mapping would be one with those of processes forked later.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            # Faulting in single pages would take longer than reading the bytes from the page cache.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without huge pages; slower, nothing else
            return mapping
    return mapping
