"""Read a compressed run as a mapping from step to checkpoint; open runs, archives and base models."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from inshrink_core.archive import ArchiveReader, FrameReader, is_archive
from inshrink_core.archive.layout import damaged
from inshrink_core.archive.storage.blocks import Span, Windows
from inshrink_core.chain.attachments import (
    LAYOUT_KEY,
    LAYOUT_MEMORY,
    MAX_LAYOUT_NBYTES,
    RENAMED,
    attachment_nbytes,
    decode_attachment,
    dropped_of,
    unpack_layout,
)
from inshrink_core.chain.base import BASE, BaseFinder, BaseModel, BaseRecord
from inshrink_core.chain.config import settings_of
from inshrink_core.chain.meta import FOLDER, MODELS, NAME, check_meta, decoding_nbytes, spec_of
from inshrink_core.chain.parts import box_of, joined_specs
from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    Checkpoint,
    FileLayout,
    TensorRole,
    TensorsInMemory,
    TensorSpec,
)
from inshrink_core.codec import BaseReference, EncoderState, PastFrame, codec_for_block, enough_memory
from inshrink_core.errors import DamagedError, InputError, MissingFrameError, NotFoundError
from inshrink_core.execution.device import resolve_device
from inshrink_core.execution.resources import Limits
from inshrink_core.formats import Run, open_run
from inshrink_core.frame import Block, BlockEntry, FrameInfo, FrameKind

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.chain.base import BaseLike
    from inshrink_core.chain.config import ChainConfig
    from inshrink_core.codec import TensorReference


_Read = TypeVar("_Read")
_Tensors: TypeAlias = tuple[tuple[TensorSpec, ...], Mapping[str, tuple[TensorSpec, ...]]]

_DESCRIBED = TensorsInMemory({})
"""Source of a checkpoint description, which has specs but no values."""


@dataclass(frozen=True)
class _State:
    """A tensor's state after a frame, cached so that the next step does not decode from the keyframe."""

    frame_id: bytes
    tensor: Tensor | None
    reference: TensorReference
    nbytes: int


class _OpenFrame:
    """An open frame with validated meta; its index and, if needed, its file layout are parsed once.

    Raises
    ------
    DamagedError
        A value of the meta is malformed, or names a base model in a delta frame.
    """

    def __init__(self, reader: FrameReader, where: str) -> None:
        self.reader, self.where = reader, where
        self.described: Checkpoint | None = None
        self.base: BaseRecord | None = None
        meta = reader.meta
        check_meta(meta, where)
        # A re-keyed frame needs no base. It keeps the key because later frames refer to its meta.
        if BASE in meta and meta.get("rekeyed") != reader.info.frame_id:
            if reader.info.kind is not FrameKind.KEYFRAME:
                raise damaged("a delta frame names a base model", where)
            self.base = BaseRecord.of(meta[BASE], reader.tensors, where)

    @cached_property
    def blocks(self) -> Checkpoint:
        """The blocks as tensors, without values or layout; each cell is a tensor here."""
        specs = tuple(spec_of(entry, self.where) for entry in self.reader.tensors)
        return Checkpoint(step=self.reader.info.step, specs=specs, source=_DESCRIBED)

    @cached_property
    def tensors(self) -> _Tensors:
        """The tensors of the frame, and the cells of the tensors stored in cells, by key."""
        return joined_specs(self.blocks.specs, self.where)


class Archive(Mapping[int, Checkpoint]):
    """A compressed run: a read-only mapping from step to `Checkpoint`, decoded on demand.

    Parameters
    ----------
    reader
        The archive's frames.
    keep_state
        Cache each tensor's state at the last step read, so that reading the steps in order decodes every
        frame once. This takes the memory of one decoded checkpoint.
    limits
        Memory limit of decoding; by default the available memory. Every tensor and attachment is checked
        against it before anything is allocated.
    device
        Device that decodes tensors: ``cpu``, ``cuda``, or ``auto`` for CUDA if it is available. Values are
        returned in host memory, and their bits do not depend on the device.
    bases
        Finder of base models; by default it tries the path recorded in the archive.

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

    def __init__(
        self,
        reader: ArchiveReader,
        *,
        keep_state: bool = False,
        limits: Limits | None = None,
        device: str = "cpu",
        bases: BaseFinder | None = None,
    ) -> None:
        self.reader = reader
        self.device = resolve_device(device)
        self.bases = BaseFinder(reader.path, open_at=open_base_at) if bases is None else bases
        self.limits = Limits() if limits is None else limits
        self.path = Path(reader.path)
        self._states: dict[str, _State] | None = {} if keep_state else None
        self._keeps_values = keep_state
        self._attachments: dict[tuple[bytes, str], bytes] = {}
        self._lock = threading.Lock()
        self._in_use = 0
        self._windows: dict[bytes, Windows] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, base: BaseLike | None = None) -> Archive:
        """Open an archive for reading; only its manifest is read.

        Parameters
        ----------
        path
            The archive.
        base
            The base model of the first frame (`inshrink_core.chain.open_base`). By default the recorded path
            is tried, and a model found there is used only if its tensors match the record.

        Raises
        ------
        NotFoundError, IncompatibleError, DamagedError
            The archive does not exist or cannot be read.
        """
        reader = ArchiveReader.open(path)
        return cls(reader) if base is None else cls(reader, bases=BaseFinder(reader.path, open_base(base)))

    def sequential(self, *, values: bool = True) -> Archive:
        """Return a view for reading the steps in order: each frame is decoded once.

        With ``values=False`` the view takes half the memory, but decodes a step again if it is read twice.
        """
        view = self._view(keep_state=True)
        view._keeps_values = values
        return view

    def limited(self, limits: Limits) -> Archive:
        """Return a view with other limits."""
        return self._view(limits=limits)

    def on(self, device: str) -> Archive:
        """Return a view that decodes on a device.

        Raises
        ------
        InputError
            The device is not available.
        """
        return self._view(device=device)

    def _view(self, **changes: Any) -> Archive:
        """Return another view that shares the frames already open."""
        same = dict[str, Any](keep_state=self.keeps_state, limits=self.limits, device=self.device)
        return Archive(self.reader, bases=self.bases, **(same | changes))

    @property
    def keeps_state(self) -> bool:
        """Whether the view caches decoded tensors for later steps."""
        return self._states is not None

    @property
    def frames(self) -> tuple[FrameInfo, ...]:
        """Available frames of the head's history, from the first keyframe to the newest step."""
        return self.reader.history()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the head's history with available frames, ascending."""
        return tuple(sorted({frame.step for frame in self.frames}))

    @property
    def listed_steps(self) -> tuple[int, ...]:
        """Steps of the head's history, including those with missing frames, ascending.

        Use these to process a complete history: reading a missing step raises an error.
        """
        return tuple(sorted({frame.step for frame in self.reader.listed_history()}))

    @property
    def branches(self) -> dict[str, FrameInfo]:
        """Named checkpoints beside the steps, such as ``best``, by name."""
        return {self.frame(info).meta.get(NAME, str(info.branch)): info for info in self.reader.named}

    @property
    def last(self) -> FrameInfo:
        """The frame of the highest step on the newest branch, independent of the order of writing.

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
        return max(reversed(self.frames), key=lambda frame: frame.step)

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage so far."""
        return self.reader.storage.bytes_read

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __getitem__(self, step: int) -> Checkpoint:
        return self.checkpoint(self.reader.find(step))

    def __contains__(self, step: object) -> bool:
        return step in self.steps

    def frame(self, info: FrameInfo) -> FrameReader:
        """Return the reader of a frame, which caches the frame's index."""
        return self._rereading(self._frame, info).reader

    def _frame(self, info: FrameInfo) -> _OpenFrame:
        frame = self.reader.frame(info.frame_id)
        if frame.derived is None:
            frame.derived = _OpenFrame(frame, self.where(frame.info))
        opened: _OpenFrame = frame.derived
        return opened

    def base_of(self, info: FrameInfo) -> BaseRecord | None:
        """Return a frame's record of the base model it is encoded against; None for most frames."""
        return self._rereading(self._frame, info).base if info.kind is FrameKind.KEYFRAME else None

    def fetch(self, infos: Iterable[FrameInfo]) -> None:
        """Read the given steps into memory in one round trip, if the archive is remote and they are small.

        For larger steps only the frame indexes are read.
        """
        if self.reader.is_far:
            links = (link for info in infos for link in self.reader.chain(info.frame_id))
            self.reader.fetch({link.frame_id: link for link in links}.values(), blocks=True)

    @contextmanager
    def prefetch(self, info: FrameInfo, keys: Iterable[str]) -> Iterator[None]:
        """Prefetch tensors of a step while the context is open, if the archive is remote.

        Parameters
        ----------
        info
            The frame.
        keys
            Keys of the tensors, roughly in the order of decoding.

        Notes
        -----
        A column holds all blocks of the chain that one tensor is decoded from. Columns are fetched in groups
        of at most 32 MB. The next group is fetched while the current one is decoded.
        """
        if not self.reader.is_far:
            yield
            return
        columns = self._rereading(lambda now: self._columns(now, keys), info)
        windows = Windows(self.reader.storage, columns)
        self._windows[info.frame_id] = windows
        try:
            yield
        finally:
            windows.close()
            self._windows.pop(info.frame_id, None)

    def _columns(self, info: FrameInfo, keys: Iterable[str]) -> dict[str, list[Span]]:
        """Return the blocks that tensors are decoded from, by key; each cell has its own key."""
        cells = self._frame(info).tensors[1]
        parts = (part for key in keys for part in ([cell.key for cell in cells.get(key, ())] or [key]))
        return {part: self._column(info, part) for part in parts}

    def _column(self, info: FrameInfo, key: str) -> list[Span]:
        """Return the blocks of a chain that decoding a tensor still needs, given its cached state."""
        chain = self.reader.chain(info.frame_id)
        links = chain[self._start(chain, key)[0] :]
        return [span for link in links for span in self._frame(link).reader.spans(key)]

    def checkpoint(self, info: FrameInfo) -> Checkpoint:
        """Return the checkpoint of one frame; values are decoded on access."""
        return self._rereading(self._checkpoint, info)

    def _checkpoint(self, info: FrameInfo) -> Checkpoint:
        opened = self._frame(info)
        if opened.described is None:
            specs, meta, where = opened.tensors[0], opened.reader.meta, self.where(info)
            layout = self.attachment(info, LAYOUT_KEY)
            if len(layout) <= MAX_LAYOUT_NBYTES:
                self._require(LAYOUT_MEMORY * len(layout), "reading the layout of its files", where)
            files, aliases = unpack_layout(layout, tuple(spec.key for spec in specs), where)
            opened.described = Checkpoint(
                step=info.step,
                specs=specs,
                source=_DESCRIBED,  # with the archive, one view would keep another's states alive
                files=files,
                aliases=aliases,
                origin=where,
                branch=meta.get(NAME, ""),
                folder=meta.get(FOLDER, ""),
                models=tuple(meta.get(MODELS, ())),
            )
        return replace(opened.described, source=_FrameSource(self, info))

    def attributing(self, info: FrameInfo) -> Checkpoint:
        """Return the checkpoint for matching optimizer state to parameters.

        This is the frame's own checkpoint. If its optimizer state was dropped, it is the checkpoint of the
        newest frame that still has the state.
        """
        dropped = [key for keys in dropped_of(self.frame(info)) for key in keys]
        for other in reversed(self.reader.frames if dropped else ()):
            if any(entry.key == dropped[0] for entry in self.frame(other).entries):
                return self.checkpoint(other)
        return self.checkpoint(info)

    def blocks(self, info: FrameInfo, key: str) -> tuple[BlockEntry, ...]:
        """Return the blocks of a tensor in a frame: one block, or one for each cell.

        Raises
        ------
        NotFoundError
            The frame has no such tensor.
        """
        frame = self.frame(info)
        cells = self._rereading(self._frame, info).tensors[1].get(key)
        return tuple(frame.entry(cell.key) for cell in cells) if cells else (frame.entry(key),)

    def _rereading(self, read: Callable[[FrameInfo], _Read], info: FrameInfo) -> _Read:
        """Read a frame, and retry once if a file of its chain is missing.

        Pruning may replace frames during a read; the reloaded manifest names the new files.
        """
        try:
            return read(info)
        except MissingFrameError:
            self.reader.refresh()
            try:
                now = self.reader.info(info.frame_id)
            except NotFoundError:
                raise MissingFrameError(
                    f"the frame of step {info.step} was removed since it was listed",
                    where=self.reader.path,
                    remedy="open the archive again: `inshrink inspect` lists what it holds",
                ) from None
            return read(now)

    def where(self, info: FrameInfo) -> str:
        """Return the name of a frame in messages."""
        return f"{self.reader.path}, step {info.step}"

    def decode(self, info: FrameInfo, key: str) -> tuple[Tensor, TensorReference]:
        """Decode one tensor of one frame, following its chain.

        Returns
        -------
        tensor, reference
            The values, and the state that the next delta needs, on the archive's device or in host memory.
            Treat both as read-only. For a tensor in cells, the reference holds only the joined values, since
            each cell has a separate state.

        Raises
        ------
        DamagedError, MissingFrameError, IncompatibleError
            The tensor cannot be decoded.
        """
        return self._rereading(lambda now: self._decode(now, key), info)

    def recalled(self, config: ChainConfig, info: FrameInfo, spec: TensorSpec) -> TensorReference:
        """Return the state of one tensor after a frame, with the encoder state of its codec restored.

        Parameters
        ----------
        config
            The configuration that encodes the next frame.
        info
            The frame.
        spec
            The tensor.

        Raises
        ------
        DamagedError, MissingFrameError, IncompatibleError
            The tensor, or a first moment of its chain, cannot be decoded.
        """
        reference, codec = self.decode(info, spec.key)[1], config.codec_of(spec)
        if not isinstance(codec, EncoderState) or not codec.uses_past:
            return reference
        return codec.recall(reference, self._past(info, spec))

    def _past(self, info: FrameInfo, spec: TensorSpec) -> Iterator[PastFrame]:
        """Yield each block of a tensor with the first moment of the frame before."""
        archive, moment = self.sequential(values=False), None
        for earlier in self.reader.chain(info.frame_id):
            opened = archive._rereading(archive._frame, earlier)
            # Read by block: a part of a frame has no layout, and each cell has a first moment.
            frame, described = opened.reader, opened.blocks
            if spec.key in described:
                entry = frame.entry(spec.key)
                block, settings = Block(entry.codec, frame.read(entry)), settings_of(frame.meta, spec)
                yield PastFrame(block, settings, moment)
            auxiliary = described.auxiliary_spec(spec, TensorRole.EXP_AVG, TensorRole.MOMENTUM)
            moment = None if auxiliary is None else partial(archive._values, earlier, auxiliary.key)

    def _values(self, info: FrameInfo, key: str) -> Tensor:
        return self.decode(info, key)[0]

    def _decode(self, info: FrameInfo, key: str) -> tuple[Tensor, TensorReference]:
        cells = self._frame(info).tensors[1].get(key)
        if cells is not None:
            joined = self._joined(info, cells)
            return joined, BaseReference(lambda: joined)
        chain = self.reader.chain(info.frame_id)
        start, tensor, reference = self._start(chain, key)
        if self.reader.is_far:
            windows = self._windows.get(info.frame_id)
            if windows is None or not windows.need(key):
                self.reader.fetch_blocks(self._column(info, key))
        for link in chain[start:]:
            frame = self._frame(link)
            entry = frame.reader.find(key)
            if entry is None:
                tensor, reference = None, None
                continue
            tensor, reference = self._decode_entry(frame, entry, reference, follow=link is not chain[-1])
        if tensor is None or reference is None:
            raise NotFoundError(f"no tensor '{key}'", where=self.where(info))
        if self._states is not None:
            with self._lock:
                before = self._states.get(key)
                values = tensor if self._keeps_values else None
                # The values, and a state of at most the same size.
                nbytes = tensor.numel() * tensor.element_size() * (1 if values is None else 2)
                self._states[key] = _State(info.frame_id, values, reference, nbytes)
                self._in_use += nbytes - (0 if before is None else before.nbytes)
        return tensor, reference

    def _start(
        self, chain: Sequence[FrameInfo], key: str
    ) -> tuple[int, Tensor | None, TensorReference | None]:
        """Return how many frames of the chain the cached state covers, and that state."""
        state = None if self._states is None else self._states.get(key)
        if state is not None:
            last = len(chain) - (state.tensor is None)
            for start in range(last, 0, -1):
                if chain[start - 1].frame_id == state.frame_id:
                    return start, state.tensor, state.reference
        return 0, None, None

    def _joined(self, info: FrameInfo, cells: tuple[TensorSpec, ...]) -> Tensor:
        """Decode the cells of a tensor and assemble them."""
        import torch

        spec = cells[0].full_spec
        self._require(spec.nbytes, "decoding it", f"{self.where(info)}, tensor '{spec.key}'")
        joined = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for cell in cells:
            joined[box_of(cell).slices] = self._decode(info, cell.key)[0].cpu()
        return joined

    def _require(self, nbytes: int, what: str, where: str) -> None:
        """Refuse an allocation that does not fit in memory beside the cached data."""
        self.limits.require_memory(nbytes + self._in_use, what, where, allocated=self._in_use)

    def _decode_entry(
        self, frame: _OpenFrame, entry: BlockEntry, reference: TensorReference | None, *, follow: bool
    ) -> tuple[Tensor | None, TensorReference]:
        """Decode one block, or only its state for `follow`; every error names the tensor."""
        where = f"{frame.where}, tensor '{entry.key}'"
        spec = spec_of(entry, where)
        codec = codec_for_block(entry.codec, where)
        self._require(decoding_nbytes(spec, entry), "decoding it", where)
        block = Block(entry.codec, frame.reader.read(entry))
        if frame.base is not None and entry.key in frame.base.tensors:
            reference = self.bases.reference(frame.base, spec, where)
        try:
            with enough_memory(spec, self.device):
                state = codec.decode(spec, block, reference, self.device)
                return None if follow else state.decoded(), state
        except DamagedError as error:
            if error.where:
                raise
            raise DamagedError(
                error.what, where=where, expected=error.expected, found=error.found, remedy=error.remedy
            ) from error

    def attachment(self, info: FrameInfo, key: str, sizes: range | None = None) -> bytes:
        """Return one attachment of a frame (`inshrink_core.chain.attachments`).

        Parameters
        ----------
        info, key
            The frame, and the attachment's key.
        sizes
            Valid lengths in bytes, checked before decoding.

        Raises
        ------
        DamagedError
            The attachment is missing or does not decode.
        """
        content = self._rereading(lambda now: self._attachment(now, key, sizes), info)
        if sizes is not None:
            self._check_size(len(content), sizes, f"{self.where(info)}, '{key}'")
        return content

    def _check_size(self, nbytes: int, sizes: range, where: str) -> None:
        """Refuse an attachment whose length does not match the file layout."""
        if nbytes not in sizes:
            raise DamagedError(
                "an attachment has the wrong length",
                where=where,
                expected=f"at least {sizes.start} bytes",
                found=f"{nbytes}",
            )

    def _attachment(self, info: FrameInfo, key: str, sizes: range | None) -> bytes:
        links, content = self._attachment_links(info, key)
        self.reader.fetch_blocks(s for link, entry in links for s in self.frame(link).spans(entry.key, True))
        for link, entry in reversed(links):
            where = f"{self.where(link)}, '{entry.key}'"
            self._require(entry.nbytes, "reading it", where)
            payload = self.frame(link).read(entry)
            nbytes = attachment_nbytes(entry.codec, payload, content)
            if sizes is not None and link.frame_id == info.frame_id:
                self._check_size(nbytes, sizes, where)
            self._require(nbytes + len(payload) + len(content or b""), "decoding it", where)
            content = decode_attachment(entry.codec, payload, content, where)
        if content is None:
            raise DamagedError(f"the frame holds no attachment '{key}'", where=self.where(info))
        with self._lock:
            used = {(link.frame_id, entry.key) for link, entry in links}
            contents = {k: v for k, v in self._attachments.items() if k[1] != key and k not in used}
            contents[info.frame_id, key] = content
            self._in_use += sum(map(len, contents.values())) - sum(map(len, self._attachments.values()))
            self._attachments = contents
        return content

    def _attachment_links(
        self, info: FrameInfo, key: str
    ) -> tuple[list[tuple[FrameInfo, BlockEntry]], bytes | None]:
        """Return the blocks to decode an attachment from, last first, and the cached content before them."""
        links: list[tuple[FrameInfo, BlockEntry]] = []
        for link in reversed(self.reader.chain(info.frame_id)):
            if links and links[-1][1].codec == RENAMED:
                place = self.frame(links[-1][0]).attached.index(links[-1][1])
                there = self.frame(link).attached
                if place >= len(there):
                    break
                key = there[place].key
            known = self._attachments.get((link.frame_id, key))
            if known is not None:
                return links, known
            try:
                links.append((link, self.frame(link).entry(key, attachment=True)))
            except NotFoundError:
                break
        return links, None


@dataclass(frozen=True)
class _FrameSource:
    """A `TensorSource` backed by one frame."""

    archive: Archive
    info: FrameInfo

    def read(self, spec: TensorSpec) -> Tensor:
        """Decode a tensor; return a copy if the archive caches the original as its state."""
        tensor, _ = self.archive.decode(self.info, spec.key)
        host = tensor.cpu().contiguous()
        return host.clone() if host is tensor and self.archive.keeps_state else host

    def prefetch(self, specs: Iterable[TensorSpec]) -> AbstractContextManager[None]:
        """Prefetch tensors while the context is open (`Archive.prefetch`)."""
        return self.archive.prefetch(self.info, [spec.key for spec in specs])

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the bytes of a file outside its tensors, in the order that `TensorSource` defines."""
        between = layout.nbytes - sum(region.nbytes for region in layout.regions)
        return self.archive.attachment(self.info, layout.path, range(between, layout.nbytes + 1))


def open_any(path: str | os.PathLike[str], *, base: BaseLike | None = None, **options: Any) -> Run | Archive:
    """Open the run or archive at a path; only headers are read.

    Parameters
    ----------
    path
        A run directory, glob or checkpoint file; or a directory ``NAME.inshrink``.
    base
        For an archive: the base model of its first frame (`Archive.open`).
    **options
        For a run: options of `inshrink_core.formats.open_run` (`step_pattern`, `follow_links`,
        `allow_damaged`, `within`, `reading`).

    Raises
    ------
    NotFoundError
        The path holds neither a run nor an archive.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> 400 in run.steps
    True
    """
    return Archive.open(path, base=base) if is_archive(path) else open_run(path, **options)


def open_base(base: BaseLike) -> BaseModel:
    """Open a base model; only headers are read.

    Parameters
    ----------
    base
        A checkpoint file or directory; ``ARCHIVE@STEP`` or ``RUN@STEP`` (an archive without a step means its
        last step); a `Checkpoint`; or a state dict, which is copied.

    Raises
    ------
    NotFoundError
        The path holds no checkpoint.
    InputError
        The path is a run of several checkpoints, or the step itself needs a base model.

    Examples
    --------
    >>> import inshrink_core
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> open_base(run.path_of(400))
    BaseModel('step_000400.pt', 83 tensors)
    """
    if isinstance(base, BaseModel):
        return base
    if isinstance(base, Checkpoint):
        return BaseModel(base, Path(base.origin).name or f"step {base.step}")
    if isinstance(base, Mapping):
        if any(isinstance(value, Checkpoint) for value in base.values()):
            raise InputError("a base model is one checkpoint, and this is a run", remedy="give run[STEP]")
        return BaseModel(_in_memory(base), "a state dict")
    text = os.fspath(base)
    head, sign, tail = text.rpartition("@")
    if sign and head and tail.isascii() and tail.isdigit() and not os.path.lexists(text):
        return open_base_at(Path(head), int(tail))
    return open_base_at(Path(text), None)


def open_base_at(path: Path, step: int | None) -> BaseModel:
    """Open one checkpoint of a run or an archive that needs no base model itself.

    Raises
    ------
    InputError
        The path is a run of several checkpoints, or the step itself needs a base model.
    """
    if not is_archive(path):
        run = open_run(path)
        if step is None and len(run.steps) > 1:
            what = f"this holds {len(run.steps)} checkpoints, and a base model is one"
            remedy = f"say which: {path}@{run.steps[-1]}, or its file"
            raise InputError(what, where=str(path), remedy=remedy)
        if step is None:
            return BaseModel(run[run.steps[0]], path.name, path)
        return BaseModel(run[step], f"{path.name}@{step}", path, step)
    reader = ArchiveReader.open(path)
    archive = Archive(reader, bases=BaseFinder(reader.path))
    info = archive.last if step is None else reader.find(step)
    if archive.base_of(reader.chain(info.frame_id)[0]) is not None:
        remedy = f"make the archive independent first: inshrink prune {path} --stand-alone --apply"
        raise InputError(f"step {info.step} needs a base model itself", where=str(path), remedy=remedy)
    return BaseModel(archive.checkpoint(info), f"{path.name}@{info.step}", path, info.step)


def _in_memory(state: Mapping[str, Any]) -> Checkpoint:
    """Copy a state dict to a checkpoint, so that training can continue to modify the tensors."""
    import torch

    tensors = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and _dtype(value) in DTYPE_SIZES
    }
    specs = tuple(
        TensorSpec(name=name, role=TensorRole.WEIGHT, dtype=_dtype(value), shape=tuple(value.shape))
        for name, value in tensors.items()
    )
    return Checkpoint(step=0, specs=specs, source=TensorsInMemory(tensors), origin="a state dict")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
