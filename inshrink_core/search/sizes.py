"""What a frame would take on disk, from its blocks alone: the same layout and index, nothing written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from inshrink_core.archive.document import compress_document, pack_value
from inshrink_core.archive.index import BlockColumns, FrameIndex, pack_index
from inshrink_core.archive.layout import FRAME_HEADER_NBYTES, FRAME_TRAILER_NBYTES, align, crc32c
from inshrink_core.chain import ChainConfig
from inshrink_core.chain.needs import pack_attributes
from inshrink_core.chain.parts import LAYOUT_KEY
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.frame import Block

__all__ = ["frame_overhead"]

_PART_NBYTES: Final = 64
"""About what a skeleton takes that hardly differs from the last one's. Its own bytes are not the weights',
the number of digits of its length in the index is."""


_EXACT: Final = "exact/1"

_LOSSY_HEAD_NBYTES: Final = 16

_SMALL_NBYTES: Final = 256
"""Up to this size a tensor is mostly stored as it is, behind a byte that says so."""


def frame_overhead(
    checkpoint: Checkpoint,
    blocks: Mapping[str, Block],
    chain: ChainConfig,
    meta: Mapping[str, Any],
    parent: FrameIndex | None,
) -> tuple[int, FrameIndex]:
    """Return the bytes of a frame that are neither tensors nor parts, and its index for the next frame.

    Parameters
    ----------
    checkpoint
        What the frame holds, as stored.
    blocks
        Blocks by key; tensors without one (optimizer state that was not encoded) count as entries only.
    chain
        How the frame is made: which codec takes a tensor without a block.
    meta
        What the frame says of how it was made.
    parent
        Index of the frame before; None for a keyframe, which inherits nothing.

    Notes
    -----
    Header, index, trailer and padding, as `inshrink_core.chain.FrameSize.overhead_nbytes` has them, to a
    few bytes: checksums and digests are as long, but not the same.
    """
    keys = [spec.key for spec in checkpoint.specs]
    paths = [LAYOUT_KEY, *(file.path for file in checkpoint.files)]
    parties = chain.parties()
    bitstreams, sizes = [], []
    for spec in checkpoint.specs:
        block = blocks.get(spec.key)
        codec = next(party.codec for party in parties if spec.role in party.roles)
        bitstreams.append(block.codec if block else codec.bitstream if codec.lossy else _EXACT)
        sizes.append(len(block.payload) if block else _unknown_size(spec, lossy=codec.lossy))
    sizes += [_PART_NBYTES for _ in paths]
    index = FrameIndex(
        BlockColumns(
            tuple(keys),
            tuple(bitstreams),
            tuple(_as_tuple(pack_attributes(spec)) for spec in checkpoint.specs),
        ),
        BlockColumns(tuple(paths), tuple("raw" for _ in paths), tuple(() for _ in paths)),
        (len(keys), len(paths)),
        tuple(sizes),
        tuple(_crc(key, blocks) for key in [*keys, *paths]),
        {key: pack_value(value) for key, value in meta.items()},
    )
    document = compress_document(pack_index(index, parent))
    return FRAME_HEADER_NBYTES + _padding(sizes) + len(document) + FRAME_TRAILER_NBYTES, index


def _unknown_size(spec: TensorSpec, *, lossy: bool) -> int:
    """Return a size like a coded tensor's: a byte more where it hardly compresses, irregular elsewhere.

    Of optimizer state under a lossy rule, a small share of a bit an element.
    """
    share = _digest(spec.key) / 2**32
    if lossy:
        return _LOSSY_HEAD_NBYTES + int(spec.numel * (0.5 + share) / 16)
    return int(spec.nbytes * (1 + share) / 2) if spec.nbytes > _SMALL_NBYTES else spec.nbytes + 1


def _digest(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")


def _as_tuple(value: Any) -> Any:
    """Sequences as the archive reads them back, so that what is inherited compares equal."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _crc(key: str, blocks: Mapping[str, Block]) -> int:
    """Any four bytes do: a checksum does not compress."""
    if key in blocks:
        payload = blocks[key].payload
        return crc32c(payload if isinstance(payload, bytes) else bytes(payload))
    return _digest(key)


def _padding(sizes: Sequence[int]) -> int:
    offset, padding = FRAME_HEADER_NBYTES, 0
    for size in sizes:
        start = align(offset, size)
        padding += start - offset
        offset = start + size
    return padding + align(offset, 0) - offset
