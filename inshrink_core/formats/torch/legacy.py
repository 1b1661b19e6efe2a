"""Read the stream format of `torch.save` before PyTorch 1.6, still available without its zip option.

It begins with five pickles: a magic number, the version, machine properties, the content, and the storage
keys. The storages follow in that order, each after its number of elements. The format has no checksums.
Source: `_legacy_save` in torch/serialization.py.
"""

from __future__ import annotations

from typing import Final

from inshrink_core.checkpoint import DTYPE_SIZES, ZipEntry
from inshrink_core.errors import clipped
from inshrink_core.formats.disk import Readable, damaged
from inshrink_core.formats.torch.pickles import MAX_PICKLE_BYTES, StorageRef, pickle_nbytes, read_pickle

_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The magic number, after the protocol opcodes."""

MAGIC_WITHIN: Final = 32
"""Number of bytes within which the first pickle ends."""

_FIRST_NBYTES: Final = 1 << 20
_COUNT_NBYTES: Final = 8
_SIZES: Final = {"": 1, "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1, **DTYPE_SIZES}
"""Bytes per element of each storage type."""


def is_legacy(first_bytes: bytes) -> bool:
    """Return whether a file with these first bytes is such a stream."""
    return first_bytes[:1] == b"\x80" and _MAGIC in first_bytes[:MAGIC_WITHIN]


def _pickles(file: Readable) -> list[bytes]:
    """Return the five pickles, reading larger prefixes until they are complete."""
    n_ahead = min(file.nbytes, _FIRST_NBYTES)
    while True:
        data, at, found = file.read(0, n_ahead), 0, list[bytes]()
        while len(found) < 5 and (nbytes := pickle_nbytes(data[at:])):
            found.append(data[at : at + nbytes])
            at += nbytes
        if len(found) == 5:
            return found
        most = min(file.nbytes, 2 * MAX_PICKLE_BYTES)
        if n_ahead == most:
            raise damaged(file, "a torch file of the legacy format whose pickles are cut off or too large")
        n_ahead = min(most, 4 * n_ahead)


def read_torch_legacy(file: Readable) -> tuple[object, int, dict[str, ZipEntry]]:
    """Return the described objects, the size of their pickle, and the storages, without reading tensor bytes.

    Parameters
    ----------
    file
        An open file that begins as such a stream.

    Raises
    ------
    DamagedError
        The stream is truncated, contradicts itself, or is big-endian.
    UnsafePickleError
        The pickle calls names that no harmless value needs.
    """
    where = str(file.path)
    pickles = _pickles(file)
    known: dict[str, StorageRef] = {}
    machine = read_pickle(pickles[2], where)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise damaged(file, "its tensors are not little-endian, or it does not say so")
    root, keys = read_pickle(pickles[3], where, storages=known), read_pickle(pickles[4], where)
    entries: dict[str, ZipEntry] = {}
    at = sum(map(len, pickles))
    for key in keys if isinstance(keys, list) else ():
        storage = known.get(key) if isinstance(key, str) else None
        if storage is None or key in entries or storage.dtype not in _SIZES:
            raise damaged(file, f"storage '{clipped(str(key))}' has no description, or is listed twice")
        n_elements = int.from_bytes(file.read(at, min(_COUNT_NBYTES, file.nbytes - at)), "little")
        nbytes = n_elements * _SIZES[storage.dtype]
        at += _COUNT_NBYTES
        if n_elements != storage.n_elements or at + nbytes > file.nbytes:
            raise damaged(file, f"storage '{clipped(key)}' is not as large as it is described")
        entries[key] = ZipEntry(at, nbytes, ())
        at += nbytes
    if at != file.nbytes:
        raise damaged(file, "bytes follow the last storage")
    return root, len(pickles[3]), entries
