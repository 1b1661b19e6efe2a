"""Appending checkpoints to an archive: references, companions and the keyframe policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain.archive import Archive, pack_attributes
from inshrink_core.chain.content import content_digest, parts_of, stored_view, tensor_digest
from inshrink_core.chain.parts import LAYOUT_KEY, encode_part
from inshrink_core.chain.recall import HELD_NBYTES, Origin, RecalledReference
from inshrink_core.chain.sizes import frame_size
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorRole, TensorSpec
from inshrink_core.codec import CodecConfig, TensorInput, TensorReference, get_codec
from inshrink_core.execution import ordered_map
from inshrink_core.formats.source import FileSource
from inshrink_core.frame import Block, FrameInfo, FrameKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Appended", "ChainConfig", "ChainWriter", "TensorDone"]

OPTIMIZER_CHOICES = ("lossless", "drop")

_WORTHWHILE = 0.99
"""A delta that saves less than a hundredth is not worth its dependence on the frames before."""

_SLICE = 1 << 20
"""Values measured together: four temporary copies of a slice, not of a tensor."""

TensorDone = Callable[[TensorSpec], None]
"""Called after each tensor is written; may raise to cancel, which leaves the archive as it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainConfig:
    """How a run is written.

    Parameters
    ----------
    codec
        Name of the codec of weights and buffers.
    config
        Its config.
    optimizer
        ``lossless`` keeps optimizer state bit-exact; ``drop`` leaves it out, so that training cannot
        be resumed without warming the optimizer up again.
    keyframe_every
        Frames from one keyframe to the next; restoring a step decodes at most that many frames.
    device
        Device the codec works on, as torch names it.
    threads
        Tensors encoded at a time; does not change the bytes.
    """

    codec: str
    config: CodecConfig
    optimizer: str = "lossless"
    keyframe_every: int = 32
    device: str = "cpu"
    threads: int = 1

    def record(self) -> dict[str, Any]:
        """Return what the frame says of how it was made."""
        return {
            "codec": self.codec,
            "config": dataclasses.asdict(self.config),  # type: ignore[call-overload]
            "optimizer": self.optimizer,
        }


class Appended(NamedTuple):
    """One frame that was written: its place in the archive, and the squared error of its weights."""

    info: FrameInfo
    squared_error: float
    squared_norm: float


class _TensorResult(NamedTuple):
    """What one worker hands to the writing thread."""

    spec: TensorSpec
    block: Block
    reference: TensorReference
    squared_error: float
    squared_norm: float


class _FrameResult(NamedTuple):
    """A committed frame, or None where it was given up for being too large; bytes of its tensors."""

    info: FrameInfo | None
    nbytes: int
    references: dict[str, TensorReference]
    squared_error: float
    squared_norm: float


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
        The branch new frames belong to.

    Notes
    -----
    Holds one state per tensor between frames, a byte a weight for codebook codecs. The state of a
    tensor stored losslessly is the tensor itself: it is read again when the next frame needs it, and
    held only where it is small or did not come from a file. While encoding, holds two tensors per
    thread and their temporary copies.
    """

    def __init__(
        self,
        writer: ArchiveWriter,
        config: ChainConfig,
        *,
        parent: FrameInfo | None = None,
        branch: int | None = None,
    ) -> None:
        self.writer = writer
        self.config = config
        self.parent = parent if parent is not None else writer.reader.head
        self.branch = branch if branch is not None else (self.parent.branch if self.parent else 0)
        # Of the parent, as are the parts: what is recalled from the archive is recalled from there.
        self._references: dict[str, TensorReference] | None = None
        self._parts: dict[str, bytes] | None = None
        self._archive = Archive(writer.reader)
        self._since_keyframe: int | None = None
        self._keyframe_rate = 1.0

    def append(self, checkpoint: Checkpoint, *, done: TensorDone | None = None) -> Appended:
        """Encode a checkpoint and commit it as a frame.

        Parameters
        ----------
        checkpoint
            The state to store; read one tensor at a time, twice.
        done
            Called after each tensor.

        Notes
        -----
        The frame is a keyframe where it is the first, where `keyframe_every` frames have passed, and
        where the delta's blocks save less than a hundredth, per raw byte, of the last keyframe's.
        """
        stored = stored_view(checkpoint, self.config.optimizer)
        parts = dict(parts_of(stored))
        self._load_parent()
        due = self.parent is None or (self._since_keyframe or 0) + 1 >= self.config.keyframe_every
        if due:
            result = self._write(stored, parts, FrameKind.KEYFRAME, None, done)
        else:
            limit = int(_WORTHWHILE * self._keyframe_rate * stored.raw_bytes())
            result = self._write(stored, parts, FrameKind.DELTA, limit, done)
            if result.info is None:
                result = self._write(stored, parts, FrameKind.KEYFRAME, None, None)
        info = result.info
        if info is None:
            raise RuntimeError("a frame without a limit was not committed")
        self._advance(stored, parts, result, info)
        return Appended(info, result.squared_error, result.squared_norm)

    def _load_parent(self) -> None:
        """Get the parent's state from the archive, where this writer did not write the parent itself."""
        if self._references is not None:
            return
        self._references, self._parts = {}, {}
        if self.parent is None:
            return
        archive = self._archive
        chain = archive.reader.chain(self.parent.frame_id)
        keyframe = frame_size(archive, chain[0])
        self._since_keyframe = len(chain) - 1
        self._keyframe_rate = sum(row.nbytes for row in keyframe.tensors) / max(1, keyframe.raw_total)
        checkpoint, frame = archive.checkpoint(self.parent), archive.frame(self.parent)
        lossless = get_codec("lossless")
        for spec in checkpoint.specs:
            if spec.nbytes > HELD_NBYTES and frame.entry(spec.key).codec in lossless.reads:
                self._references[spec.key] = self._recalled(spec, None)
            else:
                _, self._references[spec.key] = archive.decode(self.parent, spec.key)
        for key in (LAYOUT_KEY, *(file.path for file in checkpoint.files)):
            self._parts[key] = archive.part(self.parent, key)

    def _recalled(self, spec: TensorSpec, origin: Origin | None) -> RecalledReference:
        """Return the state of a tensor stored losslessly, without the tensor.

        By the time it is asked for, the frame that is being written has become the parent.
        """

        def decode() -> Tensor:
            if self.parent is None:
                raise RuntimeError("a state is asked for before its frame was committed")
            return self._archive.decode(self.parent, spec.key)[0]

        return RecalledReference(origin=origin, decode=decode)

    def _advance(
        self, stored: Checkpoint, parts: dict[str, bytes], result: _FrameResult, info: FrameInfo
    ) -> None:
        """Make the frame just committed the parent of the next."""
        if info.kind is FrameKind.KEYFRAME:
            self._since_keyframe = 0
            self._keyframe_rate = result.nbytes / max(1, stored.raw_bytes())
        else:
            self._since_keyframe = (self._since_keyframe or 0) + 1
        self.parent, self._references = info, result.references
        self._parts = parts

    def _write(
        self,
        stored: Checkpoint,
        parts: dict[str, bytes],
        kind: FrameKind,
        limit: int | None,
        done: TensorDone | None,
    ) -> _FrameResult:
        """Write one frame; gives it up, leaving nothing, where its tensors reach `limit` bytes."""
        delta = kind is FrameKind.DELTA
        old = (self._references or {}) if delta else {}
        # Each old state is dropped as its tensor is encoded, so that one set of states is held, not
        # two; until the frame is committed there is no state to go back to but the archive's.
        self._references = None
        references: dict[str, TensorReference] = {}
        digests: dict[str, bytes] = {}
        squared_error = squared_norm = 0.0
        nbytes = 0
        parent_id = self.parent.frame_id if self.parent else None
        with self.writer.begin(step=stored.step, kind=kind, parent_id=parent_id, branch=self.branch) as frame:
            for result in self._encode_all(stored, old, digests):
                block = result.block
                frame.add(
                    result.spec.key, block.codec, block.payload, attributes=pack_attributes(result.spec)
                )
                references[result.spec.key] = result.reference
                nbytes += len(block.payload)
                squared_error += result.squared_error
                squared_norm += result.squared_norm
                if limit is not None and nbytes >= limit:
                    return _FrameResult(None, nbytes, {}, 0.0, 0.0)
                if done is not None:
                    done(result.spec)
            previous = self._parts if delta and self._parts else {}
            for key, content in parts.items():
                codec, payload = encode_part(content, previous.get(key))
                frame.add(key, codec, payload, part=True)
            meta = self.config.record() | {"content": content_digest(stored, digests, parts)}
            info = frame.commit(meta)
        return _FrameResult(info, nbytes, references, squared_error, squared_norm)

    def _encode_all(
        self, stored: Checkpoint, old: dict[str, TensorReference], digests: dict[str, bytes]
    ) -> Iterator[_TensorResult]:
        """Observe every tensor of the model, plan the frame, then encode tensor by tensor."""
        codec, config = get_codec(self.config.codec), self.config.config
        model = [spec for spec in stored.specs if spec.role in MODEL_ROLES]
        prepare = partial(_prepare, stored, codec.companions(config), self.config.device)

        def observe(spec: TensorSpec) -> Any:
            return codec.observe(prepare(spec), old.get(spec.key), config)

        statistics = list(ordered_map(observe, model, threads=self.config.threads))
        plan = codec.plan(model, statistics, config)
        lossless = get_codec("lossless")
        exact_plan = lossless.plan([], [], lossless.config_type())

        def encode(spec: TensorSpec) -> _TensorResult:
            if spec.role in MODEL_ROLES:
                item = prepare(spec)
                encoded = codec.encode(item, plan, old.pop(spec.key, None))
                error, norm = _squared_error(item.tensor, encoded.reference) if codec.lossy else (0.0, 0.0)
            else:
                item = TensorInput(spec=spec, tensor=stored.source.read(spec), owned=True)
                encoded = lossless.encode(item, exact_plan, old.pop(spec.key, None))
                error = norm = 0.0
            digest = digests[spec.key] = tensor_digest(item.tensor)
            reference = encoded.reference
            if encoded.block.codec in lossless.reads and _is_lasting(stored, spec):
                reference = self._recalled(spec, Origin(stored.source, spec, digest))
            return _TensorResult(spec, encoded.block, reference, error, norm)

        yield from ordered_map(encode, stored.specs, threads=self.config.threads)


def _is_lasting(checkpoint: Checkpoint, spec: TensorSpec) -> bool:
    """Whether a tensor is worth reading again, and likely to be found where it was read."""
    return spec.nbytes > HELD_NBYTES and isinstance(checkpoint.source, FileSource)


def _prepare(
    checkpoint: Checkpoint, companions: frozenset[TensorRole], device: str, spec: TensorSpec
) -> TensorInput:
    """Read a tensor and the companions its codec asked for."""

    def companion(*roles: TensorRole) -> Tensor | None:
        for role in roles:
            key = f"{spec.name}@{role.value}"
            if key in checkpoint and checkpoint.spec(key).shape == spec.shape:
                return checkpoint[key].to(device)
        return None

    gradient = second_moment = None
    if spec.role is TensorRole.WEIGHT and TensorRole.GRADIENT in companions:
        gradient = companion(TensorRole.GRADIENT, TensorRole.EXP_AVG)
    if spec.role is TensorRole.WEIGHT and TensorRole.EXP_AVG_SQ in companions:
        second_moment = companion(TensorRole.EXP_AVG_SQ)
    tensor = checkpoint.source.read(spec).to(device)
    return TensorInput(spec=spec, tensor=tensor, gradient=gradient, second_moment=second_moment, owned=True)


def _squared_error(tensor: Tensor, reference: TensorReference) -> tuple[float, float]:
    """Return (squared error, squared norm) of a floating tensor; non-finite values count for nothing."""
    import torch

    if not tensor.is_floating_point():
        return 0.0, 0.0
    squared_error = squared_norm = 0.0
    now, decoded = tensor.detach().reshape(-1), reference.decoded().reshape(-1)
    for start in range(0, now.numel(), _SLICE):
        original = now[start : start + _SLICE].to("cpu", torch.float32)
        kept = decoded[start : start + _SLICE].to(torch.float32)
        error = (original - kept).nan_to_num_(0.0, 0.0, 0.0)
        norm = original.nan_to_num(0.0, 0.0, 0.0)
        squared_error += float(error.square_().sum(dtype=torch.float64))
        squared_norm += float(norm.square_().sum(dtype=torch.float64))
    return squared_error, squared_norm
