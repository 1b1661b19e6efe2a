"""Archives whose checksums are all right and whose claims are not."""

from collections.abc import Mapping
from typing import Any

import msgpack
import zstandard

from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain.attachments import LAYOUT_KEY

META: Mapping[str, Any] = {"codec": "lossless", "config": {}, "optimizer": "lossless"}

Tensor = tuple[tuple[Any, ...], str, bytes]
"""Attributes, bitstream and payload of a block."""


def constant(shape, dtype="float32", element=bytes(4)):
    """Return a tensor of one value: a few bytes, whatever its shape."""
    return ("weight", dtype, shape, False, "linear"), "lossless/1", b"\2" + element


def layout(*files, aliases=()):
    """Return a layout; a file is [path, nbytes, kind, regions, zip entries]."""
    packed: bytes = msgpack.packb({"files": list(files), "aliases": list(aliases)})
    return packed


def zeros_part(nbytes, *, claim=None, in_frame=False):
    """Return a part of zeros that says it has `claim` bytes, in the zstd frame too."""
    maker = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(3, write_content_size=in_frame)
    )
    stream = maker.compressobj(size=claim or nbytes) if in_frame else maker.compressobj()
    chunk = bytes(min(nbytes, 1 << 20))
    frame = b"".join(stream.compress(chunk) for _ in range(max(1, nbytes >> 20)))
    frame += stream.flush() if not in_frame else b""
    return "zstd/1", (claim or nbytes).to_bytes(5, "little") + frame


def build(path, tensors, described, parts=None, meta=META):
    """Write an archive of one keyframe."""
    with (
        ArchiveWriter(path, create=True) as writer,
        writer.begin(step=1, kind="keyframe", parent_id=None) as frame,
    ):
        for key, (attributes, codec, payload) in tensors.items():
            frame.add(key, codec, payload, attributes=attributes)
        for key, part in {LAYOUT_KEY: described, **(parts or {})}.items():
            codec, payload = part if isinstance(part, tuple) else ("stored/1", part)
            frame.add(key, codec, payload, attachment=True)
        frame.commit(dict(meta))
    return path


def small_header(nbytes):
    """Return the file of one tensor `w` of `nbytes` behind a header of 8 bytes."""
    return ["m.bin", nbytes + 8, "safetensors", [[8, nbytes, [[0, 0, None]]]], []]
