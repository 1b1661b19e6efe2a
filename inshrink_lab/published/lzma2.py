"""LZMA2 without container, as in 7-zip's archives: the published back end of ExCP.

The coder is the standard library's liblzma at its highest preset with the extreme flag. The dictionary is
limited to the size of the data, so that a decoder allocates no more than about that size; matches cannot be
farther away.
"""

from __future__ import annotations

import lzma
from typing import Any

from inshrink_core.errors import DamagedError

_PRESET = 9 | lzma.PRESET_EXTREME
"""7-zip's "ultra"."""

_SMALLEST_DICTIONARY = 1 << 12
"""Smallest dictionary of liblzma: 4 kB."""

_LARGEST_DICTIONARY = 1 << 26
"""Dictionary of preset 9."""


def _filters(nbytes: int) -> list[dict[str, Any]]:
    """Return the coder's settings, which the decoder derives from the size it knows."""
    dictionary = 1 << max(nbytes - 1, 0).bit_length()
    size = min(max(dictionary, _SMALLEST_DICTIONARY), _LARGEST_DICTIONARY)
    return [{"id": lzma.FILTER_LZMA2, "preset": _PRESET, "dict_size": size}]


def lzma_compress(data: bytes) -> bytes:
    """Return the LZMA2 stream of some bytes; its length depends on the version of liblzma."""
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=_filters(len(data)))


def lzma_decompress(stream: bytes | memoryview, nbytes: int) -> bytes:
    """Return the bytes of a stream that must hold exactly `nbytes`.

    Raises
    ------
    DamagedError
        The stream is damaged, cut short, followed by other bytes, or holds another number of bytes.
    """
    decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_filters(nbytes))
    try:
        data = decompressor.decompress(bytes(stream), max_length=nbytes + 1)
    except lzma.LZMAError as error:
        raise DamagedError(f"an LZMA stream does not decode: {error}") from error
    except EOFError as error:
        raise DamagedError("an LZMA stream is empty") from error
    if len(data) != nbytes or not decompressor.eof or decompressor.unused_data:
        raise DamagedError(
            "an LZMA stream holds another number of bytes, or does not end with the payload",
            expected=str(nbytes),
            found=str(len(data)),
        )
    return data
