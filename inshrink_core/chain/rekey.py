"""Frames written once more: as keyframes that stand alone, or as they are under another parent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from inshrink_core.archive import FrameWriter
from inshrink_core.chain.archive import Archive
from inshrink_core.chain.attachments import (
    DROPPED,
    add_attachments,
    attachments_of,
    dropped_of,
    stored_view,
    tensor_digest,
)
from inshrink_core.chain.base import BASE, BaseRecord
from inshrink_core.chain.meta import pack_attributes, spec_of
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.codec import TensorReference, codec_for_block
from inshrink_core.errors import IncompatibleError
from inshrink_core.frame import Block, BlockEntry, FrameInfo

REKEYED: Final = "rekeyed"
"""Key of meta: the id of the frame that was made from decoded values. Frames after it inherit the key, and
know by the id that it does not speak of them."""

TensorDone = Callable[[TensorSpec], None]
"""Called after each tensor; may raise to cancel."""


def copy_frame(archive: Archive, info: FrameInfo, target: FrameWriter) -> FrameInfo:
    """Write a frame's blocks as they are into another frame, and commit it.

    Raises
    ------
    DamagedError, MissingFrameError
        A block cannot be read.
    StorageError
        The system refused.
    """
    frame = archive.frame(info)
    for entry in frame.entries:
        target.add(
            entry.key,
            entry.codec,
            frame.read(entry),
            attributes=entry.attributes,
            attachment=entry.attachment,
        )
    return target.commit(frame.meta)


class Rest(NamedTuple):
    """A frame without its optimizer's state.

    Parameters
    ----------
    view
        What stays of its checkpoint.
    meta
        What describes it then, with what was dropped.
    """

    view: Checkpoint
    meta: Mapping[str, Any]

    @property
    def dropped(self) -> frozenset[str]:
        """The keys of the tensors that go, or have gone before."""
        return frozenset(key for keys in self.meta[DROPPED][1] for key in keys)


def without_state(archive: Archive, info: FrameInfo) -> Rest | None:
    """Return what a frame is without its optimizer's state; None where it has none.

    The files that held any of it go with it, as where a run is archived without (`stored_view`).
    """
    frame, whole = archive.frame(info), archive.checkpoint(info)
    view = stored_view(whole, "drop")
    kept = _blocks_of(archive, info, view)
    dropped = [list(keys) for keys in dropped_of(frame)] or [[] for _ in range(info.n_parts)]
    for entry in frame.entries:
        if not entry.attachment and entry.key not in kept and entry.key not in dropped[entry.part]:
            dropped[entry.part].append(entry.key)
    meta = {**frame.meta, DROPPED: [info.frame_id, dropped]}
    if BASE in meta:
        meta[BASE] = BaseRecord.without(meta[BASE], [spec.key in kept for spec in whole.specs])
    return None if len(view) == len(whole) else Rest(view, meta)


def _blocks_of(archive: Archive, info: FrameInfo, view: Checkpoint) -> set[str]:
    """Return the keys of the blocks that hold the tensors of a view: cells have keys of their own."""
    return {entry.key for spec in view.specs for entry in archive.blocks(info, spec.key)}


def attachments_held(archive: Archive, info: FrameInfo, rest: Rest | None = None) -> dict[str, bytes]:
    """Return the attachments of a frame, or of what it is without its optimizer's state."""
    if rest is not None:
        return dict(attachments_of(rest.view))
    entries = archive.frame(info).entries
    return {entry.key: archive.attachment(info, entry.key) for entry in entries if entry.attachment}


def rewrite_frame(
    archive: Archive,
    info: FrameInfo,
    target: FrameWriter,
    previous: Mapping[str, bytes] | None,
    *,
    rest: Rest | None = None,
    standing: Collection[str] = (),
    children: Sequence[FrameInfo] = (),
) -> FrameInfo:
    """Write a frame upon another version of its parent, and commit it; every tensor decodes as before.

    Parameters
    ----------
    archive
        The archive; a sequential view where several frames of one chain are written in order.
    info, target
        The frame, and the one to fill.
    previous
        The attachments of the parent's new version; None for a keyframe.
    rest
        Write this of it alone.
    standing
        Keys of tensors that the parent's new version lacks: they are re-keyed, decoded and compared.
    children
        Delta frames that will have the new frame as their reference.

    Raises
    ------
    IncompatibleError, DamagedError, MissingFrameError, StorageError
        As `rekey_frame`.
    """
    frame = archive.frame(info)
    kept = None if rest is None else _blocks_of(archive, info, rest.view)
    for entry in frame.entries:
        if entry.attachment or (kept is not None and entry.key not in kept):
            continue
        if entry.key in standing:
            spec = spec_of(entry, archive.where(info))
            block = _rekeyed(archive, info, spec, entry, children)
        else:
            block = Block(entry.codec, frame.read(entry))
        target.add(entry.key, block.codec, block.payload, attributes=entry.attributes)
    add_attachments(target, attachments_held(archive, info, rest), previous)
    return target.commit(frame.meta if rest is None else rest.meta)


def rekey_frame(
    archive: Archive,
    info: FrameInfo,
    target: FrameWriter,
    *,
    view: Checkpoint | None = None,
    meta: Mapping[str, Any] | None = None,
    children: Sequence[FrameInfo] = (),
    done: TensorDone | None = None,
) -> FrameInfo:
    """Write a frame as a keyframe that decodes to the same bits, and commit it.

    Parameters
    ----------
    archive
        The archive; a sequential view where several frames of one chain are re-keyed in order.
    info
        The frame.
    target
        The keyframe to fill.
    view
        What of the frame's checkpoint to write; by default all of it, in the frame's own order.
    meta
        What describes the new frame; by default what describes the old one, and that it was re-keyed.
    children
        Delta frames that will have the new frame as their reference.
    done
        Called after each tensor.

    Raises
    ------
    IncompatibleError
        A codec broke its promise: the new block, or a child's upon it, does not decode to the old bits.
    DamagedError, MissingFrameError
        The frame cannot be decoded.
    StorageError
        The system refused.

    Notes
    -----
    Every tensor written is decoded again and compared. Memory is bounded by a few copies of the
    largest tensor, beside the archive's own states.
    """
    frame = archive.frame(info)
    if view is None:
        entries: Sequence[BlockEntry] = [entry for entry in frame.entries if not entry.attachment]
        attachments = {
            entry.key: archive.attachment(info, entry.key) for entry in frame.entries if entry.attachment
        }
    else:
        entries = [entry for spec in view.specs for entry in archive.blocks(info, spec.key)]
        attachments = dict(attachments_of(view))
    for entry in entries:
        spec = spec_of(entry, archive.where(info))
        block = _rekeyed(archive, info, spec, entry, children)
        target.add(entry.key, block.codec, block.payload, attributes=pack_attributes(spec))
        if done is not None:
            done(spec)
    add_attachments(target, attachments)
    return target.commit({**frame.meta, REKEYED: info.frame_id} if meta is None else meta)


def _rekeyed(
    archive: Archive, info: FrameInfo, spec: TensorSpec, entry: BlockEntry, children: Sequence[FrameInfo]
) -> Block:
    """Return a block that stands alone, once it and the children's blocks upon it decode as before."""
    where = f"{archive.where(info)}, tensor '{entry.key}'"
    tensor, reference = archive.decode(info, entry.key)
    block = codec_for_block(entry.codec, where).rekey(spec, reference)
    decoded = codec_for_block(block.codec, where).decode(spec, block, None, archive.device)
    same = tensor_digest(decoded.tensor) == tensor_digest(tensor)
    for child in children:
        same = same and _child_digest(archive, child, entry.key, reference) == _child_digest(
            archive, child, entry.key, decoded.reference
        )
    if not same:
        raise IncompatibleError(
            f"the codec of '{block.codec}' does not re-key this tensor to the same bits",
            where=where,
            remedy="keep the frames before it, and report this",
        )
    return block


def _child_digest(archive: Archive, child: FrameInfo, key: str, reference: TensorReference) -> bytes:
    """Return the digest of what a child's tensor decodes to upon a reference; empty if it has none."""
    frame = archive.frame(child)
    entry = next((entry for entry in frame.entries if entry.key == key and not entry.attachment), None)
    if entry is None:
        return b""
    where = archive.where(child)
    codec = codec_for_block(entry.codec, where)
    block = Block(entry.codec, frame.read(entry))
    return tensor_digest(codec.decode(spec_of(entry, where), block, reference, archive.device).tensor)
