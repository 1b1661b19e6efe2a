"""The archive as a user sees it: steps that decode to checkpoints, lazily."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.archive import ArchiveReader, FrameReader
from inshrink_core.chain.parts import LAYOUT_KEY, decode_part, unpack_layout
from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    MODEL_ROLES,
    Checkpoint,
    FileLayout,
    LayerType,
    TensorRole,
    TensorSpec,
)
from inshrink_core.codec import codec_for_block
from inshrink_core.errors import DamagedError, NotFoundError
from inshrink_core.frame import Block, BlockEntry, FrameInfo

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from inshrink_core.codec import TensorReference

__all__ = ["Archive", "pack_attributes", "spec_of"]

_MAX_DIMENSIONS = 64


def pack_attributes(spec: TensorSpec) -> tuple[Any, ...]:
    """Return what a tensor's block entry carries of its spec: role, dtype, shape, exact, layer type."""
    layer = spec.layer.value if spec.layer else None
    return (spec.role.value, spec.dtype, list(spec.shape), spec.exact, layer)


def spec_of(entry: BlockEntry, where: str = "") -> TensorSpec:
    """Return the spec of a tensor's block.

    Raises
    ------
    DamagedError
        The attributes are not those of a tensor.
    """
    try:
        role_value, dtype, shape, exact, layer = entry.attributes
        role = TensorRole(role_value)
        spec = TensorSpec(
            name=entry.key if role in MODEL_ROLES else entry.key.removesuffix(f"@{role.value}"),
            role=role,
            dtype=dtype,
            shape=tuple(shape),
            exact=bool(exact),
            layer=LayerType(layer) if layer else None,
        )
        valid = (
            dtype in DTYPE_SIZES
            and spec.key == entry.key
            and len(shape) <= _MAX_DIMENSIONS
            and all(isinstance(n, int) and n >= 0 for n in shape)
        )
    except (ValueError, TypeError) as error:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged ({error})", where=where) from error
    if not valid:
        raise DamagedError(f"the entry of tensor '{entry.key}' is damaged", where=where)
    return spec


@dataclass(frozen=True)
class _State:
    """A tensor's state after a frame; kept so that the next step need not start at the keyframe."""

    frame_id: bytes
    tensor: Tensor
    reference: TensorReference


class Archive(Mapping[int, Checkpoint]):
    """A compressed run: a read-only mapping from step to `Checkpoint`, decoded on demand.

    Parameters
    ----------
    reader
        The archive's frames.
    keep_state
        Remember each tensor's state at the last step read, so that walking the steps in order
        decodes every frame once. Costs the memory of one decoded checkpoint.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:2])
    >>> archive = inshrink_core.open(target)
    >>> archive[archive.steps[1]]["conv1.weight"].shape
    torch.Size([16, 1, 3, 3])
    """

    def __init__(self, reader: ArchiveReader, *, keep_state: bool = False) -> None:
        self.reader = reader
        self.path = Path(reader.path)
        self._states: dict[str, _State] | None = {} if keep_state else None
        self._parts: dict[tuple[bytes, str], bytes] = {}
        self._frames: dict[bytes, FrameReader] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Archive:
        """Open an archive for reading; reads its manifest alone.

        Raises
        ------
        NotFoundError, IncompatibleError, DamagedError
            There is no archive, or it cannot be read.
        """
        return cls(ArchiveReader.open(path))

    def sequential(self) -> Archive:
        """Return a view for reading the steps in order: each frame is decoded once."""
        return Archive(self.reader, keep_state=True)

    @property
    def keeps_state(self) -> bool:
        """Whether tensors that were decoded are kept for the steps after them."""
        return self._states is not None

    @property
    def frames(self) -> tuple[FrameInfo, ...]:
        """Frames of the head's history that are there, from the first keyframe to the newest step."""
        return self.reader.history()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the head's history whose frames are there, ascending."""
        return tuple(sorted({frame.step for frame in self.frames}))

    @property
    def listed_steps(self) -> tuple[int, ...]:
        """Steps of the head's history, those included whose frames are missing, ascending.

        What is to cover all of a history goes by these: asking for a missing one is an error.
        """
        return tuple(sorted({frame.step for frame in self.reader.listed_history()}))

    @property
    def last(self) -> FrameInfo:
        """The last frame of the newest branch.

        Raises
        ------
        NotFoundError
            The archive has no frames.
        MissingFrameError
            The frame's file is missing.
        """
        head = self.reader.head
        if head is None:
            raise NotFoundError("the archive holds no steps yet", where=self.reader.path)
        return head

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk so far."""
        return self.reader.bytes_read

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __getitem__(self, step: int) -> Checkpoint:
        return self.checkpoint(self.reader.find(step))

    def __contains__(self, step: object) -> bool:
        return step in self.steps

    def frame(self, info: FrameInfo) -> FrameReader:
        """Return the reader of a frame; its index is read once."""
        with self._lock:
            if info.frame_id not in self._frames:
                self._frames[info.frame_id] = self.reader.frame(info.frame_id)
            return self._frames[info.frame_id]

    def checkpoint(self, info: FrameInfo) -> Checkpoint:
        """Return the checkpoint of one frame; values are decoded when asked for."""
        frame = self.frame(info)
        specs = tuple(spec_of(entry, self.where(info)) for entry in frame.entries if not entry.part)
        files, aliases = self._layout(info, tuple(spec.key for spec in specs))
        return Checkpoint(
            step=info.step,
            specs=specs,
            source=_FrameSource(self, info),
            files=files,
            aliases=aliases,
            origin=self.where(info),
        )

    def where(self, info: FrameInfo) -> str:
        """Name a frame in messages."""
        return f"{self.reader.path}, step {info.step}"

    def decode(self, info: FrameInfo, key: str) -> tuple[Tensor, TensorReference]:
        """Decode one tensor of one frame, through its chain.

        Returns
        -------
        tensor, reference
            The values, and the state the next delta needs. Treat both as read-only.

        Raises
        ------
        DamagedError, MissingFrameError, IncompatibleError
            The tensor cannot be decoded.
        """
        chain = self.reader.chain(info.frame_id)
        state = self._states.get(key) if self._states is not None else None
        start, tensor, reference = 0, None, None
        if state is not None:
            position = next((i for i, f in enumerate(chain) if f.frame_id == state.frame_id), None)
            if position is not None:
                start, tensor, reference = position + 1, state.tensor, state.reference
        for link in chain[start:]:
            frame = self.frame(link)
            try:
                entry = frame.entry(key)
            except NotFoundError:
                tensor, reference = None, None
                continue
            tensor, reference = self._decode_entry(link, frame, entry, reference)
        if tensor is None or reference is None:
            raise NotFoundError(f"no tensor '{key}'", where=self.where(info))
        if self._states is not None:
            self._states[key] = _State(info.frame_id, tensor, reference)
        return tensor, reference

    def _decode_entry(
        self, info: FrameInfo, frame: FrameReader, entry: BlockEntry, reference: TensorReference | None
    ) -> tuple[Tensor, TensorReference]:
        """Decode one block, saying in every error which one it was."""
        where = f"{self.where(info)}, tensor '{entry.key}'"
        spec = spec_of(entry, where)
        codec = codec_for_block(entry.codec, where)
        payload = frame.read(entry)
        try:
            return codec.decode(spec, Block(entry.codec, payload), reference)
        except DamagedError as error:
            if error.where:
                raise
            raise DamagedError(
                error.what, where=where, expected=error.expected, found=error.found, remedy=error.remedy
            ) from error

    def part(self, info: FrameInfo, key: str) -> bytes:
        """Return one part of a frame (`inshrink_core.chain.parts`).

        Raises
        ------
        DamagedError
            The part is missing or does not decode.
        """
        content: bytes | None = None
        for link in self.reader.chain(info.frame_id):
            cached = self._parts.get((link.frame_id, key))
            if cached is not None:
                content = cached
                continue
            frame = self.frame(link)
            try:
                entry = frame.entry(key, part=True)
            except NotFoundError:
                content = None
                continue
            content = decode_part(entry.codec, frame.read(entry), content, f"{self.where(link)}, '{key}'")
        if content is None:
            raise DamagedError(f"the frame holds no part '{key}'", where=self.where(info))
        with self._lock:
            self._parts = {k: v for k, v in self._parts.items() if k[1] != key}
            self._parts[info.frame_id, key] = content
        return content

    def _layout(
        self, info: FrameInfo, keys: tuple[str, ...]
    ) -> tuple[tuple[FileLayout, ...], dict[str, str]]:
        """Read how the files of a step are put together."""
        return unpack_layout(self.part(info, LAYOUT_KEY), keys, self.where(info))


@dataclass(frozen=True)
class _FrameSource:
    """A `TensorSource` over one frame."""

    archive: Archive
    info: FrameInfo

    def read(self, spec: TensorSpec) -> Tensor:
        """Decode a tensor; a copy where the archive keeps the original as its state."""
        tensor, _ = self.archive.decode(self.info, spec.key)
        return tensor.clone() if self.archive.keeps_state else tensor

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its tensors, as `TensorSource` orders them."""
        content = self.archive.part(self.info, layout.path)
        between = layout.nbytes - sum(region.nbytes for region in layout.regions)
        if not between <= len(content) <= layout.nbytes:
            raise DamagedError(
                f"the skeleton of '{layout.path}' has the wrong length",
                where=self.archive.where(self.info),
                expected=f"at least {between} bytes",
                found=f"{len(content)}",
            )
        return content
