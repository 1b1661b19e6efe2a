"""Zstandard frames without magic number and content size: both are known to whoever decodes."""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from inshrink_core.errors import DamagedError

_MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS

_MOST_WINDOW_NBYTES = 1 << 23
"""What levels up to 19 ask for at most. A decoder allocates what a frame asks for, before it sees a block."""

_context = threading.local()
"""Compressors by level, one set a thread, because one compressor must not serve two at a time."""


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """Contexts are reused because making one costs more than compressing a small plane."""
    compressors: dict[int, zstandard.ZstdCompressor] = _context.__dict__.setdefault("compressors", {})
    if level not in compressors:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, format=_MAGICLESS, write_content_size=False, write_checksum=False, write_dict_id=False
        )
        compressors[level] = zstandard.ZstdCompressor(compression_params=parameters)
    return compressors[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    """Keep one decompressor a thread, for the reason of `_compressor`."""
    decompressor: zstandard.ZstdDecompressor | None = _context.__dict__.get("decompressor")
    if decompressor is None:
        decompressor = zstandard.ZstdDecompressor(format=_MAGICLESS, max_window_size=_MOST_WINDOW_NBYTES)
        _context.decompressor = decompressor
    return decompressor


def zstd_compress(data: bytes | memoryview | NDArray[np.uint8], level: int) -> bytes:
    """Return one zstd frame of some bytes.

    Parameters
    ----------
    data
        Contiguous bytes.
    level
        zstd's level; higher is smaller and slower.
    """
    frame: bytes = _compressor(level).compress(data)  # type: ignore[arg-type]
    return frame


def zstd_decompress(
    frame: bytes | memoryview,
    nbytes: int,
    decompressor: zstandard.ZstdDecompressor | None = None,
    where: str = "",
) -> bytes:
    """Return the bytes of a frame that must hold exactly `nbytes`.

    Never allocates more than `nbytes` and a window (by default of 8 MB), whatever the frame claims.

    Parameters
    ----------
    frame, nbytes
        The frame and the size of its content.
    decompressor
        For a frame with a magic number; by default frames have none.
    where
        Place in messages.

    Raises
    ------
    DamagedError
        The frame is damaged, holds another number of bytes, or is followed by others.
    """
    kind = _MAGICLESS if decompressor is None else zstandard.FORMAT_ZSTD1
    decompressor = decompressor or _decompressor()
    try:
        claimed = zstandard.get_frame_parameters(frame, format=kind).content_size
        # zstd would allocate what its frame claims, whatever limit it is given.
        if claimed not in (zstandard.CONTENTSIZE_UNKNOWN, nbytes) or claimed == 0:
            raise DamagedError(
                "a zstd frame claims another size",
                where=where,
                expected=f"{nbytes} bytes",
                found=str(claimed),
            )
        data: bytes = decompressor.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"a zstd frame does not decode: {error}", where=where) from error
    if len(data) != nbytes:
        raise DamagedError(
            "a zstd frame holds another number of bytes",
            where=where,
            expected=str(nbytes),
            found=str(len(data)),
        )
    return data
