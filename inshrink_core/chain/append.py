"""Appending checkpoints to an archive: references, lineage and the keyframe policy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from inshrink_core.archive import ArchiveWriter, PartWriter
from inshrink_core.chain.archive import Archive, open_base_at
from inshrink_core.chain.attachments import (
    add_attachments,
    attachments_of,
    content_digest,
    stored_view,
)
from inshrink_core.chain.base import BASE, BaseFinder, BaseModel, require_base_codec
from inshrink_core.chain.budget import Budget, unchanged_keys
from inshrink_core.chain.config import ChainConfig, LargeError, large_errors
from inshrink_core.chain.encoder import ChainState, FrameEncoder, FramePlan, PreparedFrame, TensorResult
from inshrink_core.chain.meta import (
    FOLDER,
    METRICS,
    MODELS,
    NAME,
    ORIGINALS,
    QUALITY,
    WRITTEN,
    pack_attributes,
    spec_of,
)
from inshrink_core.chain.parts import Shards, Split, box_of, memory_of
from inshrink_core.chain.recall import HELD_NBYTES, Origin, RecalledReference
from inshrink_core.chain.sizes import frame_size
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, BaseReference, TensorReference, get_codec
from inshrink_core.errors import NotFoundError
from inshrink_core.formats.disk import holding_files
from inshrink_core.formats.source import FileSource
from inshrink_core.frame import FrameInfo, FrameKind

if TYPE_CHECKING:
    from torch import Tensor


WORTHWHILE: Final = 0.99
"""A delta that saves less than a hundredth is not worth its dependence on the frames before."""

_Value = TypeVar("_Value")

TensorDone = Callable[[TensorSpec], None]
"""Called after each tensor is written; may raise to cancel, which leaves the archive as it was."""


class Appended(NamedTuple):
    """One frame that was written: its place in the archive, and the squared error of its weights.

    `as_prepared` says that its weights are those of the frame that was prepared, byte for byte.
    """

    info: FrameInfo
    squared_error: float
    squared_norm: float
    as_prepared: bool = False
    large_errors: tuple[LargeError, ...] = ()


class _Wanted(NamedTuple):
    """A checkpoint that is to be written, as much of it as is stored, attachments, and what is said of it."""

    whole: Checkpoint
    stored: Checkpoint
    attachments: dict[str, bytes]
    said: Mapping[str, Any]
    prepared: PreparedFrame | None


class ChainWriter:
    """Appends checkpoints to an archive; owns the references between frames.

    Parameters
    ----------
    writer
        The archive, open for writing.
    config
        How frames are made; may differ from frame to frame.
    parent
        The frame the next one continues from; by default the archive's head.
    branch
        The branch new frames belong to; by default the parent's, or a new one where frames follow the parent
        already.
    restored
        The frame that training was last restored from; by default what the parent says of it.
    base
        The base model that the archive's first frame is encoded relative to.
    split
        Which tensors each part takes, where `writer` writes one part of its frames, or what a rank of a
        training holds: then it is set anew before each frame.

    Raises
    ------
    ConfigError
        The codec cannot encode relative to a base model.

    Attributes
    ----------
    initial_memory
        What an archive's first frame is planned with (`FrameEncoder.look_ahead`); None for nothing.
    unchanged
        Tensors that the next frame leaves as they are, by key, if it is a delta frame; a keyframe holds all.
    metrics
        What the training measured at the next frame's step, by name.
    before
        In parts, the original of the parent's step, where there is one: what the next frame's tensors are
        observed relative to, so that all parts plan the same.

    Notes
    -----
    Holds one state per tensor between frames, a byte a weight for codebook codecs. The state of a
    tensor stored losslessly is the tensor itself: it is read again when the next frame needs it, and
    held only where it is small, did not come from a file, or was left unchanged since. While encoding,
    holds two tensors per thread and their temporary copies.
    """

    def __init__(
        self,
        writer: ArchiveWriter | PartWriter,
        config: ChainConfig,
        *,
        parent: FrameInfo | None = None,
        branch: int | None = None,
        restored: FrameInfo | None = None,
        base: BaseModel | None = None,
        split: Split | Shards | None = None,
    ) -> None:
        if base is not None:
            require_base_codec(config.config)
        self.writer, self.base = writer, base
        self.config = config
        self.initial_memory: Any = None
        self.unchanged: frozenset[str] = frozenset()
        self.metrics: Mapping[str, float] = {}
        self.before: Checkpoint | None = None
        self.split = split
        self.parent = parent if parent is not None else writer.reader.head
        if branch is None:
            continues = self.parent is None or self.parent == writer.reader.listed_head
            branch = (self.parent.branch if self.parent else 0) if continues else writer.reader.next_branch
        self.branch = branch
        # Of the parent, as are the attachments: what is recalled from the archive is recalled from there.
        self._references: dict[str, TensorReference] | None = None
        self._attachments: dict[str, bytes] | None = None
        self.archive = Archive(writer.reader, bases=BaseFinder(writer.reader.path, base, open_base_at))
        self._meta: Mapping[str, Any] = self.archive.frame(self.parent).meta if self.parent else {}
        self._start = _Start(self.archive, restored if restored is not None else self._restored_before())
        self._since_keyframe: int | None = None
        self._keyframe_rate = 1.0

    def _restored_before(self) -> FrameInfo | None:
        """Return the frame that the parent's training was restored from."""
        frame_id = self._meta.get("restored")
        known = {frame.frame_id: frame for frame in self.writer.reader.frames}
        return known.get(frame_id) if isinstance(frame_id, bytes) else None

    @property
    def keyframe_is_due(self) -> bool:
        """Whether the next frame is a keyframe whatever it holds."""
        self._load_parent()
        return self.parent is None or (self._since_keyframe or 0) + 1 >= self.config.keyframe_every

    def state(self, *, keyframe: bool, specs: Iterable[TensorSpec] = ()) -> ChainState:
        """Return what the next frame is encoded relative to.

        For a keyframe that is nothing but what is remembered, and for the first one the values that the
        base model has for some tensors.
        """
        self._load_parent()
        if keyframe:
            return self._state(self._based(specs))
        return self._state(dict(self._references or {}), self.unchanged)

    def _based(self, specs: Iterable[TensorSpec]) -> dict[str, BaseReference]:
        """Return the base model's values for a keyframe: the archive's first is encoded relative to them."""
        return {} if self.base is None or self.parent is not None else self.base.references(specs)

    def _state(
        self, references: Mapping[str, TensorReference], unchanged: frozenset[str] = frozenset()
    ) -> ChainState:
        start = self._start.frame
        memory = self.initial_memory
        if self.parent is not None:
            memory = self._meta.get("memory") if self._meta.get("codec") == self.config.codec else None
        return ChainState(
            references=references,
            memory=memory,
            restored=self._start.value,
            after_restore=start is not None
            and self.parent is not None
            and start.frame_id == self.parent.frame_id,
            unchanged=unchanged,
            shards=self.split if isinstance(self.split, Shards) else None,
        )

    def of_all(self, value: _Value) -> Sequence[_Value]:
        """Return what all ranks give that write a frame together, in their order; of one alone, its own."""
        return self.split.gathered(value) if isinstance(self.split, Shards) else [value]

    def _owns(self, spec: TensorSpec) -> bool:
        """Whether this writer writes a tensor: all, or those of its part."""
        return not isinstance(self.writer, PartWriter) or (
            self.split is not None and self.split.owns(spec, self.writer.part)
        )

    @property
    def _is_first(self) -> bool:
        """Whether attachments are this writer's."""
        return not isinstance(self.writer, PartWriter) or self.writer.part == 0

    def _observed(self) -> dict[str, TensorReference] | None:
        """Return what tensors are observed relative to, in parts: the originals of the parent's step.

        No part has the decoded states of all tensors, and all parts must plan the same.
        """
        before = self.before
        if not isinstance(self.split, Split):
            return None
        if before is None:
            return {}
        return {
            spec.key: RecalledReference(
                origin=None,
                decode=functools.partial(BaseReference, functools.partial(before.source.read, spec)),
            )
            for spec in before.specs
        }

    def keep_within(self, checkpoint: Checkpoint, budget: Budget) -> None:
        """Choose what the next frame leaves unchanged, so that a delta frame stays within a budget."""
        self._load_parent()
        if self.parent is not None:
            stored = stored_view(checkpoint, self.config.optimizer)
            states = self._references or {}
            self.unchanged = unchanged_keys(self.archive, self.parent, stored, states, budget)

    @holding_files()
    def append(
        self,
        checkpoint: Checkpoint,
        *,
        done: TensorDone | None = None,
        keyframe: bool | None = None,
        quality: Mapping[str, Any] | None = None,
        prepared: PreparedFrame | None = None,
    ) -> Appended:
        """Encode a checkpoint and commit it as a frame.

        Parameters
        ----------
        checkpoint
            The state to store; read one tensor at a time, twice.
        done
            Called after each tensor.
        keyframe
            Whether the frame is a keyframe; by default as the notes say. The first always does. Of several
            who write it together none knows what a delta saves: by default, it is one when it is due.
        quality
            What the frame says of what a restore of it costs, and how that is known (`QUALITY`).
        prepared
            What of it was encoded already; taken over where it is what would be encoded now.

        Notes
        -----
        The frame is a keyframe where it is the first, where `keyframe_every` frames have passed, and
        where the delta's blocks save less than a hundredth, per raw byte, of the last keyframe's.
        """
        stored = stored_view(checkpoint, self.config.optimizer)
        said = {} if quality is None else {QUALITY: dict(quality)}
        attachments = dict(attachments_of(stored)) if self._is_first else {}
        wanted = _Wanted(checkpoint, stored, attachments, said, prepared)
        if keyframe is None and self.split is not None:
            keyframe = self.keyframe_is_due
        if not (self.keyframe_is_due if keyframe is None or self.parent is None else keyframe):
            self._load_parent()
            worthwhile = int(WORTHWHILE * self._keyframe_rate * stored.raw_bytes())
            limit = math.inf if keyframe is False else worthwhile
            appended = self._write(wanted, FrameKind.DELTA, limit, done)
            if appended is not None:
                return appended
            done = None  # it was called already
        appended = self._write(wanted, FrameKind.KEYFRAME, math.inf, done)
        if appended is None:
            raise RuntimeError("a frame without a limit was not committed")
        return appended

    def _load_parent(self) -> None:
        """Get the parent's state from the archive, where this writer did not write the parent itself."""
        if self._references is not None:
            return
        self._references, self._attachments = {}, {}
        if self.parent is None:
            return
        archive = self.archive
        chain = archive.reader.chain(self.parent.frame_id)
        keyframe = frame_size(archive, chain[0])
        self._since_keyframe = len(chain) - 1
        held = sum(row.nbytes for row in keyframe.tensors)
        self._keyframe_rate = _rate_of(held, keyframe.raw_total, based=keyframe.base is not None)
        frame, where = archive.frame(self.parent), archive.where(self.parent)
        lossless = get_codec(FALLBACK_CODEC)
        for spec in (spec_of(entry, where) for entry in frame.entries if not entry.attachment):
            if not self._owns(spec):
                continue
            if spec.nbytes > HELD_NBYTES and frame.entry(spec.key).codec in lossless.reads:
                self._references[spec.key] = self._recalled(spec, None)
            else:
                self._references[spec.key] = archive.recalled(self.config, self.parent, spec)
        for entry in frame.entries:
            if entry.attachment and self._is_first:
                self._attachments[entry.key] = archive.attachment(self.parent, entry.key)

    def _recalled(
        self, spec: TensorSpec, origin: Origin | None, history: Tensor | None = None
    ) -> RecalledReference:
        """Return the state of a tensor stored losslessly, without the tensor.

        By the time it is asked for, the frame that is being written has become the parent.
        """

        def decode() -> TensorReference:
            if self.parent is None:
                raise RuntimeError("a state is asked for before its frame was committed")
            return self.archive.decode(self.parent, spec.key)[1]

        return RecalledReference(origin=origin, decode=decode, history=history)

    def _write(
        self, wanted: _Wanted, kind: FrameKind, limit: float, done: TensorDone | None
    ) -> Appended | None:
        """Write one frame; gives it up, leaving nothing, where its tensors reach `limit` bytes."""
        whole, stored, attachments, said, _ = wanted
        delta = kind is FrameKind.DELTA
        references: dict[str, TensorReference] = {}
        digests: dict[str, bytes] = {}
        squared_error = squared_norm = 0.0
        record, large = self.config.record(), list[LargeError]()
        nbytes = 0
        parent_id = self.parent.frame_id if self.parent else None
        based = {} if delta else self._based(stored.specs)
        with self.writer.begin(
            step=stored.step, kind=kind, parent_id=parent_id, branch=self.branch, external=bool(based)
        ) as frame:
            unchanged = self.unchanged if delta else frozenset()
            own = replace(stored, specs=tuple(filter(self._owns, stored.specs)))
            if isinstance(self.split, Shards):
                places = self.split.places
            else:
                places = {spec.key: place for place, spec in enumerate(stored.specs)}
            # Nothing here holds the states before: each is dropped when its successor is made.
            plan, ready = self._planned(wanted, self._state_before(based, unchanged, delta=delta))
            for result in plan.encode(own.specs, ready):
                block = result.block
                frame.add(
                    result.spec.key,
                    block.codec,
                    block.payload,
                    attributes=pack_attributes(result.spec),
                    place=places[result.spec.key],
                )
                digests[result.spec.key] = result.digest
                reference = result.reference
                if result.origin is not None:
                    reference = self._recalled(result.spec, result.origin, reference.exact_state()[1])
                references[result.spec.key] = reference
                nbytes += len(block.payload)
                squared_error += result.squared_error
                squared_norm += result.squared_norm
                if result.squared_norm:
                    relative = math.sqrt(result.squared_error / result.squared_norm)
                    large += large_errors(record, result.spec, stored.step, relative)
                if nbytes >= limit:
                    return None
                if done is not None:
                    done(result.spec)
            add_attachments(frame, attachments, self._attachments if delta else None)
            meta = {
                **record,
                **({} if plan.quality is None else {QUALITY: plan.quality}),
                **said,
            }
            if not isinstance(self.split, Shards):  # whose checkpoint nobody has whole
                meta["content"] = content_digest(own, digests, attachments)
            if isinstance(whole.source, FileSource):
                meta[ORIGINALS] = whole.source.vouched(whole.files)
            if plan.memory is not None:
                shared = isinstance(self.split, Shards)
                meta["memory"] = memory_of(plan.memory, frozenset(references)) if shared else plan.memory
            if self.parent is not None and unchanged:
                before, at = self._meta.get(WRITTEN, {}), self.parent.step
                names = dict.fromkeys(spec.parameter for spec in stored.specs if spec.key in unchanged)
                meta[WRITTEN] = {name: before.get(name, at) for name in names}
            if whole.branch:
                meta[NAME] = whole.branch
            if whole.folder not in ("", f"checkpoint-{whole.step}"):
                meta[FOLDER] = whole.folder
            if whole.models:
                meta[MODELS] = list(whole.models)
            if self.metrics:
                meta[METRICS] = dict(self.metrics)
            if self._start.frame is not None:
                meta["restored"] = self._start.frame.frame_id
            if self.base is not None and based:
                meta[BASE] = self.base.record(stored.specs, based, Path(self.writer.reader.path))
            info = frame.commit(meta)
        if delta:
            self._since_keyframe = (self._since_keyframe or 0) + 1
        else:
            self._since_keyframe = 0
            self._keyframe_rate = _rate_of(nbytes, stored.raw_bytes(), based=bool(based))
        self.parent, self._meta, self._references, self._attachments = info, meta, references, attachments
        self.unchanged, self.metrics = frozenset(), {}
        as_prepared = wanted.prepared is not None and plan is wanted.prepared.plan
        return Appended(info, squared_error, squared_norm, as_prepared, tuple(large))

    def _state_before(
        self, based: Mapping[str, TensorReference], unchanged: frozenset[str], *, delta: bool
    ) -> ChainState:
        """Return what the frame that is being written is encoded relative to; this writer forgets it."""
        states = self._handed_over()
        state = self._state(states if delta else based, unchanged)
        if (observed := self._observed()) is not None:
            state = replace(state, observed=observed if delta else {})
        return replace(state, shards=self.split) if isinstance(self.split, Shards) else state

    def _planned(self, wanted: _Wanted, state: ChainState) -> tuple[FramePlan, Mapping[str, TensorResult]]:
        """Return the frame's plan, and what is encoded by it already."""
        encoder, prepared, specs = FrameEncoder(self.config), wanted.prepared, wanted.stored.specs
        if (
            prepared is not None
            and prepared.holds(self.config, wanted.whole, state)
            and prepared.plan.members == encoder.members(specs)
        ):
            return prepared.plan, prepared.results
        return encoder.plan(wanted.whole, state, specs), {}

    def _handed_over(self) -> dict[str, TensorReference]:
        """Return the states that a delta frame is encoded relative to, and hold nothing of them.

        One set of states is held so, not two; until the frame is committed there is no state to go back to
        but the archive's.
        """
        references, self._references = self._references or {}, None
        return references


def _rate_of(nbytes: int, raw: int, *, based: bool) -> float:
    """Return what a keyframe takes per raw byte: a delta has to be smaller.

    One encoded relative to a base model says nothing of what another keyframe would take.
    """
    return 1.0 if based else nbytes / max(1, raw)


class _Start:
    """The values that training last continued from after a restore; decoded once, then held."""

    def __init__(self, archive: Archive, frame: FrameInfo | None) -> None:
        self.frame = frame
        self._archive = archive
        self._values: dict[str, Tensor] = {}

    def value(self, spec: TensorSpec) -> Tensor | None:
        """Return what a tensor was restored to; None without a restore, and where it was not there."""
        if self.frame is None:
            return None
        if spec.key not in self._values:
            stored, whole = self._archive.checkpoint(self.frame), spec.whole
            if whole.key not in stored or stored.spec(whole.key).shape != whole.shape:
                return None
            try:
                self._values[spec.key] = self._archive.decode(self.frame, spec.key)[0]
            except NotFoundError:  # in other cells
                cut = self._archive.decode(self.frame, whole.key)[0][box_of(spec).slices]
                self._values[spec.key] = cut.contiguous()
        return self._values[spec.key]
