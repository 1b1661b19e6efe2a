"""Draw the favicon and the logo: three frames, each smaller than the one before, as a chain shrinks."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_COLOURS = ((0x00, 0x72, 0xB2), (0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00))
_BARS = ((0.08, 0.30, 0.10, 0.90), (0.39, 0.61, 0.28, 0.72), (0.70, 0.92, 0.42, 0.58))
"""Left, right, top and bottom of each bar, as parts of the side."""

_OVERSAMPLING = 8


def draw(side: int) -> NDArray[np.uint8]:
    """Return the mark as RGBA ``[side, side, 4]``, edges smoothed by oversampling."""
    large = side * _OVERSAMPLING
    image = np.zeros((large, large, 4))
    rows, columns = np.mgrid[0:large, 0:large] / large
    for (left, right, top, bottom), colour in zip(_BARS, _COLOURS, strict=True):
        radius = min(0.06, (bottom - top) / 2)
        dx = np.maximum(np.maximum(left + radius - columns, columns - right + radius), 0)
        dy = np.maximum(np.maximum(top + radius - rows, rows - bottom + radius), 0)
        image[dx**2 + dy**2 <= radius**2] = (*colour, 255)
    blocks = image.reshape(side, _OVERSAMPLING, side, _OVERSAMPLING, 4)
    alpha = blocks[..., 3:].mean(axis=(1, 3))
    weight = blocks[..., 3:].sum(axis=(1, 3))
    colour = (blocks[..., :3] * blocks[..., 3:]).sum(axis=(1, 3)) / np.maximum(weight, 1)
    return np.concatenate([colour, alpha], axis=-1).round().astype(np.uint8)


def png(image: NDArray[np.uint8]) -> bytes:
    """Return an RGBA image as a PNG file."""
    height, width, _ = image.shape
    scanlines = b"".join(b"\0" + row.tobytes() for row in image)

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(scanlines, 9))
        + chunk(b"IEND", b"")
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "favicon.png").write_bytes(png(draw(64)))
    (folder / "logo.png").write_bytes(png(draw(128)))
