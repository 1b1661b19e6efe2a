"""Attachments: the content of a checkpoint outside its tensors, stored bit for bit.

A frame has one attachment for each file (its skeleton) and one for the file layout, under the empty key. Each
is compressed with the same attachment of the previous frame as dictionary, so constant content (a tokenizer,
the structure of a pickle) takes a few bytes. Files with the step in their name are matched by position.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import zstandard
from blake3 import blake3

from inshrink_core.archive.document import raw_dictionary
from inshrink_core.archive.layout import newer
from inshrink_core.checkpoint import (
    MODEL_ROLES,
    Box,
    Checkpoint,
    FileLayout,
    Member,
    Region,
    TensorRole,
    TensorSpec,
    ZipEntry,
)
from inshrink_core.coding.zstd import zstd_decompress
from inshrink_core.errors import DamagedError, InputError, named
from inshrink_core.formats.carried import carried_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.archive import FrameReader, FrameWriter


DROPPED: Final = "dropped"
"""Meta key: the id of the frame, and for each part the keys of the optimizer tensors that pruning removed
from it. Later frames may inherit the key."""

LAYOUT_KEY = ""
"""Key of the layout attachment; no file has an empty path."""

_STORED, _ZSTD, _SAME = "stored/1", "zstd/1", "same/1"

RENAMED = "renamed/1"
"""Like ``zstd/1``, with the attachment at the same position in the reference frame as dictionary."""
_LEVEL = 12
"""Attachments are a few kB; higher levels do not reduce their size measurably."""
_MAX_BYTES = 1 << 31
MAX_LAYOUT_NBYTES = 64 << 20
"""Largest layout in bytes: a million tensors, the limit of a frame's index."""
LAYOUT_MEMORY = 64
"""Largest number of bytes of Python objects for a byte of layout (an empty map, or a region of three)."""
_LENGTH_BYTES = 5
"""A zstd attachment begins with its uncompressed length, little-endian."""


def encode_attachment(content: bytes, previous: bytes | None, *, renamed: bool = False) -> tuple[str, bytes]:
    """Encode an attachment and return (codec, payload), given its version in the reference frame.

    Parameters
    ----------
    content
        The bytes to store.
    previous
        The same attachment in the reference frame; None in a keyframe.
    renamed
        Whether it has a different key in the reference frame.
    """
    if previous is not None and content == previous and not renamed:
        return _SAME, b""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL,
        source_size=len(content),
        dict_size=len(previous or b""),
        write_content_size=0,
        enable_ldm=len(content) > 1 << 20,
    )
    dictionary = raw_dictionary(previous)
    packed = zstandard.ZstdCompressor(compression_params=parameters, dict_data=dictionary).compress(content)
    payload = len(content).to_bytes(_LENGTH_BYTES, "little") + packed
    return (RENAMED if renamed else _ZSTD, payload) if len(payload) < len(content) else (_STORED, content)


def add_attachments(
    frame: FrameWriter, attachments: Mapping[str, bytes], previous: Mapping[str, bytes] | None = None
) -> None:
    """Write attachments to a frame, given those of its reference frame."""
    for key, codec, payload in encode_attachments(attachments, previous):
        frame.add(key, codec, payload, attachment=True)


def encode_attachments(
    attachments: Mapping[str, bytes], previous: Mapping[str, bytes] | None = None
) -> Iterator[tuple[str, str, bytes]]:
    """Yield (key, codec, payload) of each attachment, given those of the reference frame in its order."""
    before = previous or {}
    by_place = dict(zip(attachments, before.values(), strict=False))
    for key, content in attachments.items():
        renamed = key not in before and key in by_place
        yield key, *encode_attachment(content, by_place[key] if renamed else before.get(key), renamed=renamed)


def attachment_nbytes(codec: str, payload: bytes, previous: bytes | None) -> int:
    """Return the declared size of an attachment in bytes; `decode_attachment` verifies it.

    Parameters
    ----------
    codec, payload
        The attachment, or a prefix of it.
    previous
        The same attachment in the reference frame.
    """
    if codec == _SAME:
        return len(previous or b"")
    return int.from_bytes(payload[:_LENGTH_BYTES], "little") if codec in (_ZSTD, RENAMED) else len(payload)


def decode_attachment(codec: str, payload: bytes, previous: bytes | None, where: str) -> bytes:
    """Return the bytes of an attachment; the inverse of `encode_attachment`.

    Raises
    ------
    DamagedError
        The payload does not decode to its declared size; no more than that is allocated.
    IncompatibleError
        The attachment was written by a newer version.
    """
    if codec == _STORED:
        return payload
    if codec in (_SAME, RENAMED) and previous is None:
        raise DamagedError("an attachment refers to a frame that does not hold it", where=where)
    if codec == _SAME and previous is not None:
        return previous
    if codec not in (_ZSTD, RENAMED):
        raise newer(where, "an attachment in a coding known here", f"'{codec}'")
    n_bytes = int.from_bytes(payload[:_LENGTH_BYTES], "little")
    if len(payload) < _LENGTH_BYTES or n_bytes > _MAX_BYTES:
        raise DamagedError("an attachment's length is out of range", where=where)
    decompressor = zstandard.ZstdDecompressor(
        dict_data=raw_dictionary(previous), max_window_size=1 << zstandard.WINDOWLOG_MAX
    )
    return zstd_decompress(payload[_LENGTH_BYTES:], n_bytes, decompressor, where)


def pack_layout(files: tuple[FileLayout, ...], aliases: Mapping[str, str], keys: tuple[str, ...]) -> bytes:
    """Return the layout as msgpack; tensors are referenced by their index in `keys`.

    Parameters
    ----------
    files
        Layouts of all files.
    aliases
        Additional keys of tied tensors.
    keys
        Tensor keys in the frame's order.
    """
    index = {key: i for i, key in enumerate(keys)}

    def region(extent: Region) -> list[Any]:
        rows = [[index[m.key], m.start, m.stride, *filter(None, (m.box,))] for m in extent.members]
        return [extent.offset, extent.nbytes, rows]

    document = {
        "files": [[f.path, f.nbytes, f.kind, [*map(region, f.regions)], f.zip_entries] for f in files],
        "aliases": [[alias, index[key]] for alias, key in aliases.items() if key in index],
    }
    return msgspec.msgpack.encode(document)


def unpack_layout(
    content: bytes, keys: tuple[str, ...], where: str
) -> tuple[tuple[FileLayout, ...], dict[str, str]]:
    """Return (files, aliases); the inverse of `pack_layout`.

    Raises
    ------
    DamagedError
        The bytes are not a layout of these tensors.
    """
    if len(content) > MAX_LAYOUT_NBYTES:
        raise DamagedError("the layout of the files is too large", where=where)
    try:
        document = msgspec.msgpack.decode(content, type=_Layout)
        files = tuple(file.layout(keys) for file in document.files)
        aliases = {alias: keys[i] for alias, i in document.aliases}
    except (ValueError, LookupError, RecursionError) as error:
        raise DamagedError(f"the layout of the files is damaged ({error})", where=where) from error
    return files, aliases


_Count = Annotated[int, msgspec.Meta(ge=0)]
"""A position, a length or an index."""


class _Member(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A stored `Member`; its tensor is an index into the keys."""

    at: _Count
    start: _Count
    stride: tuple[_Count, ...] | None
    box: tuple[tuple[_Count, ...], tuple[_Count, ...]] | None = None


class _File(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A stored `FileLayout`."""

    path: str
    nbytes: _Count
    kind: str
    regions: tuple[tuple[_Count, _Count, tuple[_Member, ...]], ...]
    zip_entries: tuple[tuple[_Count, _Count, tuple[_Count, ...]], ...]

    def layout(self, keys: Sequence[str]) -> FileLayout:
        """Return the layout, after a check that its regions ascend and fit the file."""
        regions, position = [], 0
        for offset, nbytes, rows in self.regions:
            if offset < position or offset + nbytes > self.nbytes:
                raise ValueError(f"a region of '{self.path}' is outside the file or overlaps another")
            position = offset + nbytes
            members = [Member(keys[m.at], m.start, m.stride, m.box and Box(*m.box)) for m in rows]
            regions.append(Region(offset, nbytes, tuple(members)))
        entries = tuple(ZipEntry(*entry) for entry in self.zip_entries)
        for entry in entries:
            ends = (entry.data_offset + entry.data_nbytes, *(at + 4 for at in entry.crc_offsets))
            if max(ends) > self.nbytes:
                raise ValueError(f"a zip entry of '{self.path}' is outside the file")
        return FileLayout(
            path=self.path, nbytes=self.nbytes, kind=self.kind, regions=tuple(regions), zip_entries=entries
        )


class _Layout(msgspec.Struct):
    """The stored layout of all files."""

    files: tuple[_File, ...]
    aliases: tuple[tuple[str, _Count], ...]


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the BLAKE3 of a tensor's bytes in the stored dtype."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake3(flat.numpy().data).digest()


def add_tensor(total: Any, key: str, spec: TensorSpec, digest: bytes) -> None:
    """Add a tensor to a digest over several: its key, dtype and shape, and the digest of its values."""
    total.update(f"{key}\0{spec.dtype}\0{spec.shape}\0".encode())
    total.update(digest)


def content_digest(
    checkpoint: Checkpoint,
    digests: Mapping[str, bytes] | None = None,
    attachments: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return a 16-byte digest of a checkpoint's tensors, layout and files, to compare checkpoints bit by bit.

    Parameters
    ----------
    checkpoint
        The checkpoint as stored (`stored_view`).
    digests
        Known results of `tensor_digest`, by key.
    attachments
        The attachments, if they were read already.
    """
    known = digests or {}
    total = hashlib.sha256()
    for spec in checkpoint.specs:
        digest = known.get(spec.key) or tensor_digest(checkpoint.source.read(spec))
        add_tensor(total, spec.key, spec, digest)
    rest = dict(attachments_of(checkpoint)) if attachments is None else attachments
    for key, content in rest.items():
        total.update(f"{key}\0{len(content)}\0".encode())
        total.update(content)
    return total.digest()[:16]


def holds_content(frame: FrameReader, checkpoint: Checkpoint) -> bool:
    """Whether a frame was made from a checkpoint as stored (`stored_view`).

    For a frame in parts, every available part is checked.
    """
    parts = parts_of(frame)
    keys = {spec.key for spec in checkpoint.specs}
    is_complete = len(frame.info.files) == frame.info.n_parts
    if not parts.keys() <= keys or (is_complete and len(parts) < len(keys)):
        return False
    return all(_holds_part(frame, part.number, parts, checkpoint) for part in frame.info.files)


def parts_of(frame: FrameReader) -> dict[str, int]:
    """Return the part of each tensor that the frame was made from, including tensors dropped since."""
    dropped = {key: part for part, keys in enumerate(dropped_of(frame)) for key in keys}
    return dropped | {entry.key: entry.part for entry in frame.tensors}


def dropped_of(frame: FrameReader) -> list[list[str]]:
    """Return the keys of the optimizer tensors that pruning dropped from a frame, by part; empty if none."""
    meta = frame.meta
    record = meta.get(DROPPED)
    ids = (frame.info.frame_id, *meta.get("source", ())[1:])
    return record[1] if record is not None and record[0] in ids else []


def _holds_part(frame: FrameReader, part: int, parts: Mapping[str, int], checkpoint: Checkpoint) -> bool:
    specs = tuple(spec for spec in checkpoint.specs if parts.get(spec.key) == part)
    attachments = dict(attachments_of(checkpoint)) if part == 0 else {}
    found = content_digest(dataclasses.replace(checkpoint, specs=specs), None, attachments)
    return bool(frame.meta_of(part).get("content") == found)


def attachments_of(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """Yield (key, bytes) of every attachment: the layout, then each file's skeleton."""
    keys = tuple(spec.key for spec in checkpoint.specs)
    yield LAYOUT_KEY, pack_layout(checkpoint.files, checkpoint.aliases, keys)
    for file in checkpoint.files:
        yield file.path, checkpoint.source.skeleton(file)


def stored_view(checkpoint: Checkpoint, optimizer: str) -> Checkpoint:
    """Return the part of a checkpoint that is stored.

    Parameters
    ----------
    checkpoint
        The checkpoint.
    optimizer
        ``lossless`` stores everything. ``drop`` leaves out all tensors of optimizers, gradients, and all
        files with regions of these: their skeletons alone would restore files with holes.

    Raises
    ------
    InputError
        A dropped file contains model tensors that were not read, which would be lost.
    """
    if optimizer != "drop":
        return checkpoint
    roles = MODEL_ROLES | {TensorRole.EXTRA}
    view = view_of(checkpoint, {spec.key for spec in checkpoint.specs if spec.role in roles})
    left = {file.path for file in checkpoint.files} - {file.path for file in view.files}
    gone = dataclasses.replace(checkpoint, files=tuple(f for f in checkpoint.files if f.path in left))
    if lost := [f"{row.key} ({row.kind})" for row in carried_tensors(gone) if row.role in MODEL_ROLES]:
        raise InputError(
            f"without the optimizer's file, tensors of the model would be lost: {named(lost)}",
            where=checkpoint.origin,
            remedy="keep the optimizer's state, or save these tensors as plain ones",
        )
    return view


def view_of(checkpoint: Checkpoint, keys: Collection[str]) -> Checkpoint:
    """Return the checkpoint with the given tensors only, without files that would have holes."""

    def has_all(file: FileLayout) -> bool:
        return all(member.key in keys for region in file.regions for member in region.members)

    return dataclasses.replace(
        checkpoint,
        specs=tuple(spec for spec in checkpoint.specs if spec.key in keys),
        files=tuple(file for file in checkpoint.files if has_all(file)),
        aliases={alias: key for alias, key in checkpoint.aliases.items() if key in keys},
    )
