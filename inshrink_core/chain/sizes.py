"""Sizes of an archive by step, by tensor and in total, and the resources for restoring a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from inshrink_core.chain.archive import Archive
from inshrink_core.chain.attachments import LAYOUT_KEY, LAYOUT_MEMORY
from inshrink_core.chain.base import BaseRecord
from inshrink_core.chain.config import is_exact
from inshrink_core.chain.meta import WRITTEN, decoding_nbytes, spec_of
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.codec import FALLBACK_CODEC, get_codec, make_codec
from inshrink_core.errors import ConfigError, TooLargeError
from inshrink_core.formats.write import restorable_layout, written_nbytes
from inshrink_core.frame import FrameInfo
from inshrink_core.metrics import bits_per_parameter, ratio
from inshrink_core.report import Report


class TensorSize(NamedTuple):
    """One tensor's block in one frame."""

    spec: TensorSpec
    codec: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size(Report):
    """Sizes of one or several frames. Everything that is no tensor counts as weights."""

    tensors: tuple[TensorSize, ...]
    overhead_nbytes: int
    nbytes: int

    @property
    def raw_weights(self) -> int:
        """Raw bytes of weights and buffers."""
        return sum(tensor.spec.nbytes for tensor in self.tensors if tensor.spec.role in MODEL_ROLES)

    @property
    def raw_total(self) -> int:
        """Uncompressed bytes of the tensors."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def weights_nbytes(self) -> int:
        """Bytes for weights and buffers, including the overhead."""
        blocks = sum(tensor.nbytes for tensor in self.tensors if tensor.spec.role in MODEL_ROLES)
        return blocks + self.overhead_nbytes

    @property
    def n_weights(self) -> int:
        """Number of weights and buffer elements."""
        return sum(tensor.spec.numel for tensor in self.tensors if tensor.spec.role in MODEL_ROLES)

    @property
    def ratio_weights(self) -> float | None:
        """Raw bytes over stored bytes of weights and buffers, including headers and indexes."""
        return ratio(self.raw_weights, self.weights_nbytes)

    @property
    def ratio_total(self) -> float | None:
        """Raw bytes over stored bytes of everything; None for an empty archive."""
        return ratio(self.raw_total, self.nbytes)

    @property
    def bits_per_weight(self) -> float | None:
        """Mean stored bits of one weight at one step."""
        return bits_per_parameter(self.weights_nbytes, self.n_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSize(_Size):
    """Bytes of one frame, by content.

    Parameters
    ----------
    tensors
        The block of each tensor.
    overhead_nbytes
        Header, index, trailer and padding. Counted in full as weights.
    nbytes
        Size of the frame.
    info
        The frame.
    base
        The base model that the frame is encoded against; these bytes do not include it.
    """

    info: FrameInfo
    base: BaseRecord | None = None

    KEYS: ClassVar = "step=info.step kind=info.kind branch=info.branch bytes=nbytes ratio_weights ratio_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSize(_Size):
    """Sizes of a set of frames, including the manifest (`ArchiveSize.of`).

    Parameters
    ----------
    tensors
        The blocks of all frames.
    overhead_nbytes
        The overhead of all frames, and the manifest. Counted in full as weights.
    nbytes
        Bytes of the frames and the manifest.
    frames
        In step order.
    """

    frames: tuple[FrameSize, ...]

    @classmethod
    def of(cls, frames: Sequence[FrameSize], manifest_nbytes: int) -> ArchiveSize:
        """Return the sum over some frames and the manifest."""
        return cls(
            tensors=tuple(tensor for frame in frames for tensor in frame.tensors),
            overhead_nbytes=sum(frame.overhead_nbytes for frame in frames) + manifest_nbytes,
            nbytes=sum(frame.nbytes for frame in frames) + manifest_nbytes,
            frames=tuple(frames),
        )

    @property
    def base(self) -> BaseRecord | None:
        """The base model that decoding some of the frames requires; None if none does."""
        return next((frame.base for frame in self.frames if frame.base is not None), None)


def frame_size(archive: Archive, info: FrameInfo) -> FrameSize:
    """Return the sizes of one frame; reads only its index."""
    frame = archive.frame(info)
    where = archive.where(info)
    tensors: dict[str, TensorSize] = {}
    for entry in frame.tensors:
        spec = spec_of(entry, where).full_spec
        before = tensors.get(spec.key)
        nbytes = entry.stored_nbytes + (before.nbytes if before else 0)
        tensors[spec.key] = TensorSize(spec, entry.codec, nbytes)
    return FrameSize(
        info=info,
        tensors=tuple(tensors.values()),
        overhead_nbytes=frame.overhead_nbytes,
        nbytes=info.nbytes,
        base=archive.base_of(info),
    )


def archive_size(archive: Archive, frames: Sequence[FrameInfo] | None = None) -> ArchiveSize:
    """Return the sizes of some frames (by default the head's history); reads only their indexes."""
    chosen = archive.frames if frames is None else frames
    archive.reader.fetch(chosen)
    return ArchiveSize.of([frame_size(archive, info) for info in chosen], archive.reader.manifest_nbytes)


class Exactness(NamedTuple):
    """Roles by how exactly their tensors are stored.

    Parameters
    ----------
    exact
        Roles whose tensors are all stored bit for bit.
    lossy
        Roles with some tensors stored with an error.
    """

    exact: tuple[str, ...]
    lossy: tuple[str, ...]


def exactness_of(
    archive: Archive, frames: Iterable[FrameInfo], keys: Callable[[str], bool] | None = None
) -> Exactness:
    """Return which roles are stored exactly in some frames; files and attachments always are.

    Parameters
    ----------
    archive, frames
        The archive and its frames to examine.
    keys
        Predicate for the tensors to count; by default all.

    Raises
    ------
    DamagedError, MissingFrameError
        An index is not readable.
    """
    exact: dict[str, bool] = {}
    for info in frames:
        frame, where = archive.frame(info), archive.where(info)
        keeps_bits = _rule_of(frame.meta, info)
        for entry in frame.tensors:
            if keys is None or keys(entry.key):
                spec = spec_of(entry, where)
                role = spec.role.value
                exact[role] = exact.get(role, True) and keeps_bits(spec, entry.codec)
    return Exactness(
        tuple(role for role, same in exact.items() if same),
        tuple(role for role, same in exact.items() if not same),
    )


def _rule_of(meta: Mapping[str, Any], info: FrameInfo) -> Callable[[TensorSpec, str], bool]:
    """Return a predicate on (spec, bitstream): whether a block of the frame has the original's bits."""
    codec, settings = str(meta.get("codec", FALLBACK_CODEC)), meta.get("config", {})
    try:
        roles = make_codec(codec, settings).takes()
    except (ConfigError, TypeError):
        # The codec or a setting is unknown here, so no block is known to have the original's bits.
        return lambda spec, bitstream: False
    all_exact, rekeyed = is_exact(codec, settings), is_rekeyed(meta, info)
    lossless, written = get_codec(FALLBACK_CODEC).bitstream, meta.get(WRITTEN, {})

    def keeps_bits(spec: TensorSpec, bitstream: str) -> bool:
        if spec.parameter in written:
            return False
        if bitstream != lossless:
            return spec.role in MODEL_ROLES and all_exact
        if spec.exact or all_exact or not rekeyed:
            return True
        # A re-keyed block holds decoded values: it is exact only for roles that the codec does not cover.
        return spec.role not in roles - {TensorRole.BUFFER}

    return keeps_bits


def is_rekeyed(meta: Mapping[str, Any], info: FrameInfo) -> bool:
    """Whether a frame was made from decoded values, which its lossless blocks then hold."""
    return meta.get("rekeyed") == info.frame_id or "source" in meta


class StepNeeds(NamedTuple):
    """Approximate bytes for restoring a step.

    `decoding` is the largest peak of decoding one tensor, `resident` the memory in use until the step is
    written, `state` the cached states for the next step of a sequence, and `disk` the size of its files.
    """

    decoding: int
    resident: int
    state: int
    disk: int

    def memory(self, threads: int = 1) -> int:
        """Return the memory for restoring only this step, with tensors decoded on some threads."""
        return self.resident + self.decoding * (1 if threads <= 1 else threads + 1)

    @property
    def memory_in_turn(self) -> int:
        """Memory for restoring it in a sequence of steps, with each frame decoded once."""
        return self.memory() + self.state


def step_needs(
    archive: Archive, info: FrameInfo, checkpoint: Checkpoint | None = None, layout: str | None = None
) -> StepNeeds:
    """Return the resources for restoring a step; reads its index and its layout.

    Parameters
    ----------
    archive, info
        The archive and the frame.
    checkpoint
        The frame's checkpoint, if it is open already.
    layout
        Output layout (`inshrink_core.formats.write_checkpoint`); by default the original one if it can be
        restored.

    Raises
    ------
    DamagedError, MissingFrameError
        The index or the layout is not readable.
    """
    if checkpoint is None:
        checkpoint = archive.checkpoint(info)
    skeletons = sum(_skeleton_nbytes(checkpoint, file) for file in checkpoint.files)
    regions = (region for file in checkpoint.files for region in file.regions)
    mixed = [
        2 * r.nbytes + max((checkpoint.spec(m.key).nbytes for m in r.members if m.box is not None), default=0)
        for r in regions
        if len(r.members) != 1 or r.members[0].stride is not None or r.members[0].box is not None
    ]
    described = LAYOUT_MEMORY * len(archive.attachment(info, LAYOUT_KEY))
    written_as = layout or restorable_layout(checkpoint)
    tensors = archive.frame(info).tensors
    # PyTorch's writer needs all tensors at once.
    at_once = checkpoint.raw_bytes() if written_as == "torch" else 0
    return StepNeeds(
        decoding=max((decoding_nbytes(spec_of(entry), entry) for entry in tensors), default=0),
        resident=skeletons + described + at_once + max(mixed, default=0),
        state=2 * checkpoint.raw_bytes(),
        disk=written_nbytes(checkpoint, written_as),
    )


def _skeleton_nbytes(checkpoint: Checkpoint, file: FileLayout) -> int:
    """Return an upper bound on a file's skeleton: its size minus the bytes filled by tensors."""
    filled = sum(
        min(region.nbytes, sum(m.nbytes_in(checkpoint.spec(m.key)) for m in region.members))
        for region in file.regions
    )
    return file.nbytes - filled


def sequential_within(archive: Archive, needs: Iterable[StepNeeds]) -> Archive:
    """Return a view that decodes each frame once, if its cached states fit the memory limit.

    Raises
    ------
    TooLargeError
        Not even a single step fits the limit.
    """
    rows = tuple(needs)
    where = archive.reader.path
    try:
        most = max((row.memory_in_turn for row in rows), default=0)
        archive.limits.require_memory(most, "decoding each frame once", where)
    except TooLargeError:
        most = max((row.memory() for row in rows), default=0)
        archive.limits.require_memory(most, "decoding a step", where)
        return archive
    return archive.sequential()
