"""What an archive's bytes hold, per step, per tensor and in total, and what restoring takes."""

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
class FrameSize(Report):
    """Bytes of one frame, by what they hold.

    Parameters
    ----------
    info
        The frame.
    tensors
        Every tensor's block.
    attachments_nbytes
        Blocks of the rest: skeletons, side files, layout.
    overhead_nbytes
        Header, index, trailer and padding. Counts wholly to the weights.
    base
        The base model that the frame is encoded relative to, which these bytes do without.
    """

    info: FrameInfo
    tensors: tuple[TensorSize, ...]
    attachments_nbytes: int
    overhead_nbytes: int
    base: BaseRecord | None = None

    KEYS: ClassVar = (
        "step=info.step kind=info.kind branch=info.branch bytes=info.nbytes ratio_weights ratio_total"
    )

    @property
    def raw_weights(self) -> int:
        """Raw bytes of weights and buffers."""
        return sum(tensor.spec.nbytes for tensor in self.tensors if tensor.spec.role in MODEL_ROLES)

    @property
    def raw_total(self) -> int:
        """Raw bytes of every tensor stored."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)

    @property
    def weights_nbytes(self) -> int:
        """Bytes that hold weights and buffers, overhead included."""
        blocks = sum(tensor.nbytes for tensor in self.tensors if tensor.spec.role in MODEL_ROLES)
        return blocks + self.overhead_nbytes

    @property
    def n_weights(self) -> int:
        """Number of weights and buffer elements."""
        return sum(tensor.spec.numel for tensor in self.tensors if tensor.spec.role in MODEL_ROLES)

    @property
    def ratio_weights(self) -> float | None:
        """Raw bytes of the weights over the bytes that hold them."""
        return ratio(self.raw_weights, self.weights_nbytes)

    @property
    def ratio_total(self) -> float | None:
        """Raw bytes of everything stored over the frame's bytes."""
        return ratio(self.raw_total, self.info.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSize:
    """Sizes of a set of frames, the manifest included.

    Parameters
    ----------
    frames
        In step order.
    manifest_nbytes
        Size of the manifest. Counts wholly to the weights.
    """

    frames: tuple[FrameSize, ...]
    manifest_nbytes: int

    @property
    def base(self) -> BaseRecord | None:
        """The base model without which some of the frames cannot be decoded; None where all can."""
        return next((frame.base for frame in self.frames if frame.base is not None), None)

    @property
    def raw_weights(self) -> int:
        """Raw bytes of weights and buffers, over all frames."""
        return sum(frame.raw_weights for frame in self.frames)

    @property
    def raw_total(self) -> int:
        """Raw bytes of every tensor stored, over all frames."""
        return sum(frame.raw_total for frame in self.frames)

    @property
    def weights_nbytes(self) -> int:
        """Bytes that hold weights and buffers, all overhead and the manifest included."""
        return sum(frame.weights_nbytes for frame in self.frames) + self.manifest_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the frames and the manifest."""
        return sum(frame.info.nbytes for frame in self.frames) + self.manifest_nbytes

    @property
    def ratio_weights(self) -> float | None:
        """Raw bytes of the weights over the bytes that hold them; None for an empty archive."""
        return ratio(self.raw_weights, self.weights_nbytes)

    @property
    def ratio_total(self) -> float | None:
        """Raw bytes of everything stored over all bytes; None for an empty archive."""
        return ratio(self.raw_total, self.nbytes)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the archive that hold one weight of one step, in mean."""
        return bits_per_parameter(self.weights_nbytes, sum(frame.n_weights for frame in self.frames))


def frame_size(archive: Archive, info: FrameInfo) -> FrameSize:
    """Return the sizes of one frame; reads its index alone."""
    frame = archive.frame(info)
    where = archive.where(info)
    tensors: dict[str, TensorSize] = {}
    for entry in frame.entries:
        if not entry.attachment:
            spec = spec_of(entry, where).whole
            before = tensors.get(spec.key)
            nbytes = entry.stored_nbytes + (before.nbytes if before else 0)
            tensors[spec.key] = TensorSize(spec, entry.codec, nbytes)
    return FrameSize(
        info=info,
        tensors=tuple(tensors.values()),
        attachments_nbytes=sum(entry.stored_nbytes for entry in frame.entries if entry.attachment),
        overhead_nbytes=frame.overhead_nbytes,
        base=archive.base_of(info),
    )


def archive_size(archive: Archive, frames: Sequence[FrameInfo] | None = None) -> ArchiveSize:
    """Return the sizes of some frames (by default the head's history); reads their indexes alone."""
    chosen = archive.frames if frames is None else frames
    return ArchiveSize(
        frames=tuple(frame_size(archive, info) for info in chosen),
        manifest_nbytes=archive.reader.manifest_nbytes,
    )


class Exactness(NamedTuple):
    """Roles whose every tensor is stored bit for bit, and roles of which some are stored with an error."""

    exact: tuple[str, ...]
    lossy: tuple[str, ...]


def exactness_of(
    archive: Archive, frames: Iterable[FrameInfo], keys: Callable[[str], bool] | None = None
) -> Exactness:
    """Tell of the tensors of some frames; files, and whatever is no tensor, are always exact.

    Parameters
    ----------
    archive, frames
        The archive, and which of its frames.
    keys
        Which tensors count; by default all.

    Raises
    ------
    DamagedError, MissingFrameError
        An index cannot be read.
    """
    exact: dict[str, bool] = {}
    for info in frames:
        frame, where = archive.frame(info), archive.where(info)
        is_kept = _rule_of(frame.meta, info)
        for entry in frame.entries:
            if not entry.attachment and (keys is None or keys(entry.key)):
                spec = spec_of(entry, where)
                role = spec.role.value
                exact[role] = exact.get(role, True) and is_kept(spec, entry.codec)
    return Exactness(
        tuple(role for role, same in exact.items() if same),
        tuple(role for role, same in exact.items() if not same),
    )


def _rule_of(meta: Mapping[str, Any], info: FrameInfo) -> Callable[[TensorSpec, str], bool]:
    """Return what tells, by spec and bitstream, whether a block of a frame holds the original's bits."""
    codec, settings = str(meta.get("codec", FALLBACK_CODEC)), meta.get("config", {})
    try:
        roles = make_codec(codec, settings).takes()
    except (ConfigError, TypeError):
        # A codec or a setting that is not known here: then nothing tells which bits are the original's.
        return lambda spec, bitstream: False
    all_exact, rekeyed = is_exact(codec, settings), is_rekeyed(meta, info)
    lossless, written = get_codec(FALLBACK_CODEC).bitstream, meta.get(WRITTEN, {})

    def is_kept(spec: TensorSpec, bitstream: str) -> bool:
        if spec.parameter in written:
            return False
        if bitstream != lossless:
            return spec.role in MODEL_ROLES and all_exact
        if spec.exact or all_exact or not rekeyed:
            return True
        # A block made anew holds what was decoded before: exact where the codec has no rule for the role.
        return spec.role not in roles - {TensorRole.BUFFER}

    return is_kept


def is_rekeyed(meta: Mapping[str, Any], info: FrameInfo) -> bool:
    """Whether a frame was made from decoded values: its lossless blocks hold those, not the original's."""
    return meta.get("rekeyed") == info.frame_id or "source" in meta


class StepNeeds(NamedTuple):
    """About how many bytes a step takes.

    `decoding` is the most that one tensor takes on its way, `held` what stays besides until the step is
    done, `state` what a walk over several steps keeps of it for the next, and `disk` its files.
    """

    decoding: int
    held: int
    state: int
    disk: int

    def memory(self, threads: int = 1) -> int:
        """Return what restoring the step alone takes, with tensors decoded on some threads."""
        return self.held + self.decoding * (1 if threads <= 1 else threads + 1)

    @property
    def memory_in_turn(self) -> int:
        """What restoring it as one of several takes, so that each frame is decoded once."""
        return self.memory() + self.state


def step_needs(
    archive: Archive, info: FrameInfo, checkpoint: Checkpoint | None = None, layout: str | None = None
) -> StepNeeds:
    """Return what a step takes; reads its index and its layout.

    Parameters
    ----------
    archive, info
        The step.
    checkpoint
        The same, where it is open already.
    layout
        As what it is written (`inshrink_core.formats.write_checkpoint`); by default as it was, where it can
        be.

    Raises
    ------
    DamagedError, MissingFrameError
        They cannot be read.
    """
    if checkpoint is None:
        checkpoint = archive.checkpoint(info)
    entries = [entry for entry in archive.frame(info).entries if not entry.attachment]
    skeletons = sum(_skeleton_nbytes(checkpoint, file) for file in checkpoint.files)
    regions = (region for file in checkpoint.files for region in file.regions)
    mixed = [
        2 * r.nbytes + max((checkpoint.spec(m.key).nbytes for m in r.members if m.box is not None), default=0)
        for r in regions
        if len(r.members) != 1 or r.members[0].stride is not None or r.members[0].box is not None
    ]
    described = LAYOUT_MEMORY * len(archive.attachment(info, LAYOUT_KEY))
    written_as = layout or restorable_layout(checkpoint)
    # PyTorch's writer wants all tensors at once.
    at_once = checkpoint.raw_bytes() if written_as == "torch" else 0
    return StepNeeds(
        decoding=max((decoding_nbytes(spec_of(entry), entry) for entry in entries), default=0),
        held=skeletons + described + at_once + max(mixed, default=0),
        state=2 * checkpoint.raw_bytes(),
        disk=written_nbytes(checkpoint, written_as),
    )


def _skeleton_nbytes(checkpoint: Checkpoint, file: FileLayout) -> int:
    """Return the most bytes that the skeleton of a file can have: all that no tensor fills."""
    filled = sum(
        min(region.nbytes, sum(m.nbytes_in(checkpoint.spec(m.key)) for m in region.members))
        for region in file.regions
    )
    return file.nbytes - filled


def sequential_within(archive: Archive, needs: Iterable[StepNeeds]) -> Archive:
    """Return a view that decodes each frame once, if what it keeps between steps fits the limits.

    Raises
    ------
    TooLargeError
        Not even a single step fits.
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
