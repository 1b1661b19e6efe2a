"""Zstandard frames without magic number and content size, which the decoder knows."""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from inshrink_core.errors import DamagedError

_MAGICLESS = zstandard.FORMAT_ZSTD1_MAGICLESS

_MAX_WINDOW_NBYTES = 1 << 23
"""Largest window of levels up to 19. A decoder allocates the window that a frame declares before reading a
block."""


class _Context(threading.local):
    """Compressors by level and a decompressor for each thread, since none of them is thread-safe."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(format=_MAGICLESS, max_window_size=_MAX_WINDOW_NBYTES)


_context = _Context()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """Return a cached compressor, since making one costs more than compressing a small plane."""
    if level not in _context.compressors:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, format=_MAGICLESS, write_content_size=False, write_checksum=False, write_dict_id=False
        )
        _context.compressors[level] = zstandard.ZstdCompressor(compression_params=parameters)
    return _context.compressors[level]


def zstd_compress(data: bytes | memoryview | NDArray[np.uint8], level: int) -> bytes:
    """Compress bytes to one zstd frame.

    Parameters
    ----------
    data
        Contiguous bytes.
    level
        Compression level of zstd; higher is smaller and slower.
    """
    frame: bytes = _compressor(level).compress(data)  # type: ignore[arg-type]
    return frame


def zstd_decompress(
    frame: bytes | memoryview,
    nbytes: int,
    decompressor: zstandard.ZstdDecompressor | None = None,
    where: str = "",
) -> bytes:
    """Decompress a frame with exactly `nbytes` of content.

    Never allocates more than `nbytes` and a window (by default of 8 MB), whatever the frame declares.

    Parameters
    ----------
    frame, nbytes
        The frame, and the size of its content.
    decompressor
        Decompressor for a frame with a magic number; by default frames have none.
    where
        Location for error messages.

    Raises
    ------
    DamagedError
        The frame is damaged, has content of another size, or is followed by other bytes.
    """
    kind = _MAGICLESS if decompressor is None else zstandard.FORMAT_ZSTD1
    decompressor = decompressor or _context.decompressor
    try:
        claimed = zstandard.get_frame_parameters(frame, format=kind).content_size
        # zstd allocates the declared size, even if it exceeds the given limit.
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
