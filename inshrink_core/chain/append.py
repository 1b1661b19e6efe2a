"""Append checkpoints to an archive: references, lineage and the keyframe policy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from inshrink_core.archive import ArchiveWriter, PartWriter
from inshrink_core.chain.archive import Archive, open_base_at
from inshrink_core.chain.attachments import add_attachments, attachments_of, content_digest, stored_view
from inshrink_core.chain.base import BASE, BaseFinder, BaseModel, require_base_codec
from inshrink_core.chain.config import ChainConfig, LargeError, large_errors
from inshrink_core.chain.encoder import (
    RESIDENT_NBYTES,
    ChainState,
    FramePlan,
    PreparedFrame,
    RecalledReference,
    read_again,
)
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
from inshrink_core.checkpoint import Checkpoint, TensorSource, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, TensorReference, get_codec
from inshrink_core.errors import NotFoundError
from inshrink_core.formats.source import FileSource
from inshrink_core.frame import FrameInfo, FrameKind

if TYPE_CHECKING:
    from torch import Tensor


WORTHWHILE: Final = 0.99
"""A delta frame must be smaller by a hundredth, or it does not justify its dependence on earlier frames."""

_Value = TypeVar("_Value")

TensorDone = Callable[[TensorSpec], None]
"""Called after each tensor is written; may raise to cancel, which leaves the archive unchanged."""


class Appended(NamedTuple):
    """One written frame: its place in the archive, and the squared error of its weights.

    `as_prepared` is whether the frame's weights have the bytes of the prepared frame.
    """

    info: FrameInfo
    squared_error: float
    squared_norm: float
    as_prepared: bool = False
    large_errors: tuple[LargeError, ...] = ()


class ChainWriter:
    """Appends checkpoints to an archive; holds the state between frames.

    Parameters
    ----------
    writer
        The archive, open for writing.
    config
        How to encode frames; may change between frames.
    parent
        The frame to continue from; by default the archive's head.
    branch
        Branch of the new frames; by default the parent's, or a new one if the parent already has a successor.
    restored
        The frame from which training was last restored; by default the parent's record.
    base
        The base model for the archive's first frame.
    split
        Assignment of tensors to parts, if `writer` writes one part of each frame; or the tensors of a rank of
        a training, set anew before each frame.

    Raises
    ------
    ConfigError
        The codec cannot encode against a base model.

    Attributes
    ----------
    initial_memory
        Memory for planning the archive's first frame (`look_ahead`); None for none.
    unchanged
        Keys of the tensors that the next frame leaves unchanged if it is a delta frame; a keyframe stores
        all.
    metrics
        The training metrics at the next frame's step, by name.
    before
        When writing a part: the original checkpoint of the parent's step, if available. The next frame's
        tensors are observed relative to it, so that all parts compute the same plan.

    Notes
    -----
    The writer holds one state for each tensor between frames, which takes a byte a weight for codebook
    codecs. The state of a losslessly stored tensor is the tensor itself. It is read again for the next frame,
    and held only if it is small, did not come from a file, or was left unchanged. Encoding holds two tensors
    a thread and their temporaries.
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
        self._part = writer.part if isinstance(writer, PartWriter) else 0  # part 0 has the attachments
        self.parent = parent if parent is not None else writer.reader.head
        if branch is None:
            continues = self.parent is None or self.parent == writer.reader.listed_head
            branch = (self.parent.branch if self.parent else 0) if continues else writer.reader.next_branch
        self.branch = branch
        # State and attachments of the parent, loaded from the archive on first use.
        self._references: dict[str, TensorReference] | None = None
        self._attachments: Mapping[str, bytes] | None = None
        self.archive = Archive(writer.reader, bases=BaseFinder(writer.reader.path, base, open_base_at))
        self._meta: Mapping[str, Any] = self.archive.frame(self.parent).meta if self.parent else {}
        known = {frame.frame_id: frame for frame in writer.reader.frames}
        self._restored_from = restored or known.get(self._meta.get("restored", b""))
        self._restored: dict[str, Tensor] = {}

    @property
    def keyframe_is_due(self) -> bool:
        """Whether the keyframe policy requires the next frame to be a keyframe."""
        return self.parent is None or len(self._chain) >= self.config.keyframe_every

    @property
    def _chain(self) -> tuple[FrameInfo, ...]:
        """The frames from the last keyframe to the parent."""
        return () if self.parent is None else self.archive.reader.chain(self.parent.frame_id)

    def state(self, *, keyframe: bool, specs: Iterable[TensorSpec] = ()) -> ChainState:
        """Return the chain state for encoding the next frame.

        For a keyframe it contains only the codec's memory. For the first keyframe it also contains the base
        model's tensors, if there is one.
        """
        references: dict[str, TensorReference] = {}
        if not keyframe:
            self._load_parent()
            references.update(self._references or {})
        elif self.base is not None and self.parent is None:
            references.update(self.base.references(specs))
        memory = self.initial_memory
        if self.parent is not None:
            memory = self._meta.get("memory") if self._meta.get("codec") == self.config.codec else None
        return ChainState(
            references=references,
            memory=memory,
            restored=self._restored_value,
            after_restore=self._restored_from is not None
            and self.parent is not None
            and self._restored_from.frame_id == self.parent.frame_id,
            unchanged=frozenset() if keyframe else self.unchanged,
            observed=self._observed(keyframe=keyframe) if isinstance(self.split, Split) else None,
            shards=self.split if isinstance(self.split, Shards) else None,
        )

    def _restored_value(self, spec: TensorSpec) -> Tensor | None:
        """Return the restored values of a tensor; None without a restore or if the frame lacks the tensor."""
        info, known = self._restored_from, self._restored.get(spec.key)
        if info is None or known is not None:
            return known
        stored, tensor_spec = self.archive.checkpoint(info), spec.full_spec
        if tensor_spec.key not in stored or stored.spec(tensor_spec.key).shape != tensor_spec.shape:
            return None
        try:
            value = self.archive.decode(info, spec.key)[0]
        except NotFoundError:  # in other cells
            value = self.archive.decode(info, tensor_spec.key)[0][box_of(spec).slices].contiguous()
        return self._restored.setdefault(spec.key, value)

    def of_all(self, value: _Value) -> Sequence[_Value]:
        """All-gather a value over the ranks that write a frame together; a single writer gets its own."""
        return self.split.gathered(value) if isinstance(self.split, Shards) else [value]

    def _owns(self, spec: TensorSpec) -> bool:
        """Whether this writer writes a tensor, as its only writer or as the owner of its part."""
        return not isinstance(self.writer, PartWriter) or (
            self.split is not None and self.split.owns(spec, self.writer.part)
        )

    def _observed(self, *, keyframe: bool) -> dict[str, TensorReference]:
        """Return the originals of the parent's step, relative to which the parts of a frame observe tensors.

        No part has the decoded states of all tensors, but all parts must compute the same plan.
        """
        before = None if keyframe else self.before
        if before is None:
            return {}
        read = before.source.read

        def original(spec: TensorSpec) -> RecalledReference:
            return RecalledReference(lambda: (read(spec), None))

        return {spec.key: original(spec) for spec in before.specs}

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
            The checkpoint to store; each tensor is read twice, one at a time.
        done
            Called after each tensor.
        keyframe
            Whether the frame is a keyframe; by default as in the notes. The first frame always is. Writers
            of parts do not know the size of a delta, so their default is a keyframe when it is due.
        quality
            The frame's record of its restore cost and how the cost is known (`QUALITY`).
        prepared
            Tensors encoded in advance; used if they match the frame that would be encoded now.

        Notes
        -----
        The frame is a keyframe if it is the first, if `keyframe_every` frames have passed, or if the delta's
        blocks are less than a hundredth smaller than the last keyframe's, relative to the raw bytes.
        """
        stored = stored_view(checkpoint, self.config.optimizer)
        attachments = dict(attachments_of(stored)) if self._part == 0 else {}
        write = functools.partial(self._write, checkpoint, attachments, quality, prepared)
        if keyframe is None and self.split is not None:
            keyframe = self.keyframe_is_due
        if not (self.keyframe_is_due if keyframe is None or self.parent is None else keyframe):
            worthwhile = int(WORTHWHILE * self._keyframe_rate() * stored.raw_bytes())
            appended = write(FrameKind.DELTA, math.inf if keyframe is False else worthwhile, done)
            if appended is not None:
                return appended
            done = None  # already called for each tensor
        appended = write(FrameKind.KEYFRAME, math.inf, done)
        if appended is None:
            raise RuntimeError("a frame without a limit was not committed")
        return appended

    def _keyframe_rate(self) -> float:
        """Return the last keyframe's bytes for each raw byte, the limit for deltas.

        A keyframe encoded against a base model does not predict the size of another keyframe.
        """
        keyframe = self._chain[0]
        if self.archive.base_of(keyframe) is not None:
            return 1.0
        entries = self.archive.frame(keyframe).tensors
        raw_bytes = sum(spec_of(entry).nbytes for entry in entries)
        return sum(entry.nbytes for entry in entries) / max(1, raw_bytes)

    def _load_parent(self) -> None:
        """Load the parent's state from the archive, unless this writer wrote the parent."""
        if self._references is not None:
            return
        attachments: dict[str, bytes] = {}
        self._references, self._attachments = {}, attachments
        if self.parent is None:
            return
        archive = self.archive
        frame, where = archive.frame(self.parent), archive.where(self.parent)
        for entry in frame.attached if self._part == 0 else ():
            attachments[entry.key] = archive.attachment(self.parent, entry.key)
        for entry in frame.tensors:
            if self._owns(spec := spec_of(entry, where)):
                is_recalled = _is_recalled(spec, entry.codec)
                self._references[spec.key] = (
                    self._recalled(spec) if is_recalled else archive.recalled(self.config, self.parent, spec)
                )

    def _recalled(
        self,
        spec: TensorSpec,
        source: TensorSource | None = None,
        digest: bytes = b"",
        context_state: Tensor | None = None,
    ) -> RecalledReference:
        """Return a reference that reads a losslessly stored tensor on demand.

        When it is read, the frame being written has become the parent.
        """

        def recall() -> tuple[Tensor, Tensor | None]:
            tensor = None if source is None else read_again(source, spec, digest)
            if tensor is not None:
                return tensor, context_state
            if self.parent is None:
                raise RuntimeError("a state is asked for before its frame was committed")
            return self.archive.decode(self.parent, spec.key)[1].exact_state()

        return RecalledReference(recall)

    def _write(
        self,
        checkpoint: Checkpoint,
        attachments: Mapping[str, bytes],
        quality: Mapping[str, Any] | None,
        prepared: PreparedFrame | None,
        kind: FrameKind,
        limit: float,
        done: TensorDone | None,
    ) -> Appended | None:
        """Write one frame; abandon it and return None if its tensors reach `limit` bytes."""
        delta, parent = kind is FrameKind.DELTA, self.parent
        stored = stored_view(checkpoint, self.config.optimizer)
        references: dict[str, TensorReference] = {}
        digests: dict[str, bytes] = {}
        nbytes, squared_error, squared_norm = 0, 0.0, 0.0
        record, large = self.config.record(), list[LargeError]()
        written_here = replace(stored, specs=tuple(filter(self._owns, stored.specs)))
        shared = isinstance(self.split, Shards)
        places = {spec.key: place for place, spec in enumerate(stored.specs)}
        if isinstance(self.split, Shards):
            places = dict(self.split.places)
        # Until the commit, only the archive holds the states of the parent: each state is released when its
        # successor exists.
        state = self.state(keyframe=not delta, specs=stored.specs)
        based = frozenset() if delta else state.references.keys()
        self._references = None
        with self.writer.begin(
            step=stored.step,
            kind=kind,
            parent_id=parent.frame_id if parent else None,
            branch=self.branch,
            external=bool(based),
        ) as frame:
            if prepared is not None and prepared.holds(self.config, checkpoint, state, stored.specs):
                plan, ready = prepared.plan, prepared.results
            else:
                plan, ready = FramePlan(self.config, checkpoint, state, stored.specs), {}
            unchanged = state.unchanged
            del state
            for spec, block, reference, digest, error, norm in plan.encode(written_here.specs, ready):
                attributes, place = pack_attributes(spec), places[spec.key]
                frame.add(spec.key, block.codec, block.payload, attributes=attributes, place=place)
                from_file = isinstance(stored.source, FileSource) and spec.key not in unchanged
                if from_file and _is_recalled(spec, block.codec):
                    reference = self._recalled(spec, stored.source, digest, reference.exact_state()[1])
                references[spec.key], digests[spec.key] = reference, digest
                nbytes += len(block.payload)
                squared_error += error
                squared_norm += norm
                if norm:
                    large += large_errors(record, spec, stored.step, math.sqrt(error / norm))
                if nbytes >= limit:
                    return None
                if done is not None:
                    done(spec)
            add_attachments(frame, attachments, self._attachments if delta else None)
            source, written = checkpoint.source, self._meta.get(WRITTEN, {})
            path = Path(self.writer.reader.path)
            names = dict.fromkeys(spec.parameter for spec in stored.specs if spec.key in unchanged)
            is_named = checkpoint.folder not in ("", f"checkpoint-{checkpoint.step}")
            entries = {
                **record,
                QUALITY: None if quality is None else dict(quality),
                # No rank has the whole checkpoint, and each stores the memory of its own tensors.
                "content": None if shared else content_digest(written_here, digests, attachments),
                ORIGINALS: source.checks_record(checkpoint.files) if isinstance(source, FileSource) else None,
                "memory": memory_of(plan.memory, frozenset(references)) if shared else plan.memory,
                WRITTEN: {name: written.get(name, parent.step) for name in names} if parent else None,
                NAME: checkpoint.branch,
                FOLDER: checkpoint.folder if is_named else None,
                MODELS: list(checkpoint.models),
                METRICS: dict(self.metrics),
                "restored": self._restored_from.frame_id if self._restored_from else None,
                BASE: self.base.record(stored.specs, based, path) if self.base and based else None,
            }
            always = {*record, "memory", QUALITY, ORIGINALS}
            meta = {k: v for k, v in entries.items() if v or (k in always and v is not None)}
            info = frame.commit(meta)
        self.parent, self._meta, self._references, self._attachments = info, meta, references, attachments
        self.unchanged, self.metrics = frozenset(), {}
        as_prepared = prepared is not None and plan is prepared.plan
        return Appended(info, squared_error, squared_norm, as_prepared, tuple(large))


def _is_recalled(spec: TensorSpec, bitstream: str) -> bool:
    """Whether a state is read again instead of held: the tensor is stored exactly and not small."""
    return spec.nbytes > RESIDENT_NBYTES and bitstream == get_codec(FALLBACK_CODEC).bitstream
