"""Memory for whole tensors, given back to the system as soon as it is dropped."""

from __future__ import annotations

import mmap

__all__ = ["new_buffer"]

_MAPPED_NBYTES = 1 << 20
"""From this size on, mapping and unmapping costs less than filling the buffer once."""


def new_buffer(nbytes: int) -> memoryview:
    """Return a writable buffer of its own.

    Parameters
    ----------
    nbytes
        Its size.

    Returns
    -------
    memoryview
        Bytes; zero, but do not rely on it. Pages that are never written take no memory.

    Notes
    -----
    An allocator keeps a tensor's memory in the heap of the thread that freed it, where smaller blocks
    that live longer keep it from shrinking: with two threads, over a gigabyte where a third of it is in
    use. Large buffers are therefore mapped one by one.
    """
    if nbytes < _MAPPED_NBYTES:
        return memoryview(bytearray(nbytes))
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return memoryview(mmap.mmap(-1, nbytes))
    # Private: a shared mapping would be one with those of processes forked later.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            # Faulting in single pages would take longer than reading the bytes from the page cache.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without huge pages; slower, nothing else
            return memoryview(mapping)
    return memoryview(mapping)
