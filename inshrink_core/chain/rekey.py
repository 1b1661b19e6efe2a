"""Frames written once more: as keyframes that stand alone, or as they are under another parent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from inshrink_core.archive import FrameSink
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
from inshrink_core.chain.meta import spec_of
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.codec import TensorReference, codec_for_block
from inshrink_core.errors import IncompatibleError
from inshrink_core.frame import Block, BlockEntry, FrameInfo

REKEYED: Final = "rekeyed"
"""Key of meta: the id of the frame that was made from decoded values. Frames after it inherit the key, and
know by the id that it does not speak of them."""


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
    target: FrameSink,
    meta: Mapping[str, Any],
    *,
    view: Checkpoint | None = None,
    rekeyed: Collection[str] | None = None,
    attachments: Mapping[str, bytes] | None = None,
    previous: Mapping[str, bytes] | None = None,
    children: Sequence[FrameInfo] = (),
    done: Callable[[TensorSpec], object] = lambda spec: None,
) -> FrameInfo:
    """Write a frame once more, and commit it; every tensor decodes as before.

    Parameters
    ----------
    archive
        The archive; a sequential view where several frames of one chain are written in order.
    info, target
        The frame, and the one to fill.
    meta
        What describes the new frame.
    view
        What of the frame's checkpoint to write; by default all of it.
    rekeyed
        Keys of tensors that shall stand alone: they are decoded, encoded, and compared. By default all.
    attachments, previous
        The attachments, and those of the new version of the parent; by default, blocks as they are.
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
    Memory is bounded by a few copies of the largest tensor, beside the archive's own states.
    """
    frame, where = archive.frame(info), archive.where(info)
    kept = None if view is None else _blocks_of(archive, info, view)
    for entry in frame.entries:
        if entry.attachment:
            if attachments is None:
                target.add(entry.key, entry.codec, frame.read(entry), attachment=True)
        elif kept is None or entry.key in kept:
            spec = spec_of(entry, where)
            if rekeyed is None or entry.key in rekeyed:
                block = _rekeyed(archive, info, spec, entry, children)
            else:
                block = Block(entry.codec, frame.read(entry))
            target.add(entry.key, block.codec, block.payload, attributes=entry.attributes)
            done(spec)
    if attachments is not None:
        add_attachments(target, attachments, previous)
    return target.commit(meta)


def _rekeyed(
    archive: Archive, info: FrameInfo, spec: TensorSpec, entry: BlockEntry, children: Sequence[FrameInfo]
) -> Block:
    """Return a block that stands alone, once it and the children's blocks upon it decode as before."""
    where = f"{archive.where(info)}, tensor '{entry.key}'"
    tensor, reference = archive.decode(info, entry.key)
    block = codec_for_block(entry.codec, where).rekey(spec, reference)
    decoded = codec_for_block(block.codec, where).decode(spec, block, None, archive.device)
    same = tensor_digest(decoded.decoded()) == tensor_digest(tensor)
    for child in children:
        same = same and _child_digest(archive, child, entry.key, reference) == _child_digest(
            archive, child, entry.key, decoded
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
    return tensor_digest(codec.decode(spec_of(entry, where), block, reference, archive.device).decoded())
