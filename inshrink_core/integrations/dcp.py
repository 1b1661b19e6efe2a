"""`torch.distributed.checkpoint`: each rank of a training writes its part of an archive.

``dcp.save(state, storage_writer=InshrinkWriter(...))`` compresses each rank's shards against those of the
previous save. No tensor leaves its rank: ranks exchange statistics and objects that are not tensors.
"""

from __future__ import annotations

import io
import math
import os
import re
import threading
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from inshrink_core.archive import ArchiveReader, ArchiveWriter, PartWriter, commit_parts, is_archive
from inshrink_core.archive.parts import SharedFrame, WrittenPart
from inshrink_core.archive.storage.contract import Lock
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.chain import Archive, ChainWriter
from inshrink_core.chain.attachments import stored_view
from inshrink_core.chain.base import BaseLike
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.meta import spec_of
from inshrink_core.chain.parts import Shards, box_of, cells_of
from inshrink_core.checkpoint import Box, Checkpoint, FileLayout, TensorSpec
from inshrink_core.codec import AnyCodec
from inshrink_core.errors import ConflictError, InputError, StepConflictError
from inshrink_core.execution.threads import default_threads, ordered_map
from inshrink_core.formats.dcp_state import (
    STATE,
    NamedState,
    SavedState,
    StatePath,
    loaded,
    named_state,
    saved_state,
    storage_metadata,
)
from inshrink_core.formats.distributed import METADATA
from inshrink_core.frame import FrameInfo
from inshrink_core.integrations.dcp_ranks import Ranks, ShardedEvaluator
from inshrink_core.training.check import Check, CheckedWriter, require_check_options

_Value = TypeVar("_Value")

_STEP: Final = re.compile(r"(\d+)\D*$", re.ASCII)

_AGREED: Final = ("codec", "config", "optimizer", "keyframe_every")
"""Options that all ranks must be given alike."""

_SALT_NBYTES: Final = 16

_OBSERVATIONS: Final = "the exchange of observations"


@dataclass(frozen=True)
class _SaveInfo:
    """The coordinator's description of a save, which all ranks get."""

    step: int
    archive_id: bytes
    salt: bytes
    generation: int | None
    parent_id: bytes | None
    is_restored: bool
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    paths: Mapping[str, StatePath]


_RankTensor: TypeAlias = "tuple[str, Tensor, Box | None]"
"""Name, tensor or a rank's shard of it, and the shard's region; None for a full tensor."""


@dataclass(frozen=True)
class _RankSource:
    """A `TensorSource` of a rank's tensors."""

    tensors: Mapping[str, Tensor]
    state: bytes

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a copy in host memory, since training continues with the tensor."""
        return self.tensors[spec.key].detach().to("cpu", copy=True).contiguous()

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the state without tensors."""
        return self.state


class InshrinkWriter(StorageWriter):
    """Writes the archive of a sharded training.

    ``dcp.save(state, storage_writer=writer, checkpoint_id="step-100")``, or ``dcp.async_save``, on all ranks.
    Use one writer for the whole training: it has the state that the next save is encoded relative to.

    Parameters
    ----------
    archive
        The folder, on a file system that all ranks share, or an address in a bucket; created if needed.
    codec, config, optimizer, keyframe_every, device, threads
        As for `inshrink_core.verbs.compress`. By default the ranks of a machine share its processors.
    resumed_from
        The step of the archive that training was restored from: later steps stay, on another branch. By
        default frames follow the last one.
    process_group, no_dist
        As for ``dcp.save``.
    timeout
        Seconds to wait for a rank.
    model, check, max_restore_cost, check_every
        As for `inshrink_core.Saver`: the model whose state is saved, and a function of it that all ranks
        call together. Restored values are loaded into the model, the function is called, and the model's
        values are put back. Such a writer works with ``dcp.save`` only.

    Raises
    ------
    InputError
        Options contradict each other or the archive, or the checkpoint's name has no step.
    ConflictError
        Ranks disagree, or one failed or did not come; nothing is committed.
    StepConflictError
        The step is not after the one that it continues from.

    Notes
    -----
    A save is in the archive when ``dcp.save`` returns, or the future of ``dcp.async_save`` has its result.
    If a rank does not finish, the save is not in the archive, and the next save removes its parts. Errors
    after all ranks have met are raised as DCP's ``CheckpointException``. Sharded tensors are stored in cells
    of 2^18 elements, cut at the same rows on any number of ranks (docs/format.md, *Cells*).
    """

    _of_process: ClassVar[dict[str, InshrinkWriter]] = {}

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        codec: str | None = None,
        config: Mapping[str, Any] | AnyCodec | None = None,
        optimizer: str | None = None,
        keyframe_every: int = 32,
        device: str = "cpu",
        threads: int | None = None,
        resumed_from: int | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        timeout: float = 600.0,
        model: nn.Module | None = None,
        check: Check | None = None,
        max_restore_cost: float | None = None,
        check_every: int = 1,
    ) -> None:
        super().__init__()
        require_check_options(check, max_restore_cost, check_every)
        if (model is None) != (check is None):
            raise InputError("a check needs a model", remedy="give the writer both, or neither")
        self._model, self._check = model, check
        self._max_restore_cost, self._check_every = max_restore_cost, check_every
        self._evaluator: ShardedEvaluator | None = None
        self._checked: CheckedWriter | None = None
        self._thread = threading.get_ident()
        self.archive = os.fspath(archive)
        storage = storage_at(archive)
        if not (storage.exclusive or storage.writable):
            storage.share()  # refuses
        self._options: dict[str, Any] = dict(
            codec=codec,
            config=config,
            optimizer=optimizer,
            keyframe_every=keyframe_every,
            device=device,
            threads=threads or _threads_of_rank(),
        )
        make_chain_config(self.archive, **self._options)  # check the options now
        self._resumed_from, self._timeout, self._no_dist = resumed_from, timeout, no_dist
        self._process_group = process_group
        self._ranks: Ranks | None = None
        self._step: int | None = None
        self._chain: ChainWriter | None = None
        # Used by the coordinator:
        self._plans: list[SavePlan] = []
        self._info: _SaveInfo | None = None
        self._last: bytes | None = None
        self._written: bytes | None = None
        self._lock: Lock | None = None
        self._shared_frame: SharedFrame | None = None
        self._parts: list[WrittenPart] = []

    def __reduce__(self) -> tuple[Any, ...]:
        self._require_live(there=False)
        # A process that saves during training unpickles the writer for each save, and keeps the first.
        options = dict(resumed_from=self._resumed_from, no_dist=self._no_dist, timeout=self._timeout)
        return _writer_of_process, (self.archive, {**self._options, **options})

    def _require_live(self, *, there: bool = True) -> None:
        """Refuse to load states into a model while it is trained."""
        if self._check is not None and not (there and threading.get_ident() == self._thread):
            raise InputError(
                "a check puts states into the model, which training must not use meanwhile",
                where=self.archive,
                remedy="save with dcp.save, on the thread that made the writer",
            )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save: meet the other ranks and compare options.

        Parameters
        ----------
        checkpoint_id
            The checkpoint's name, which ends with the step.

        Raises
        ------
        InputError
            The name has no step.
        ConflictError
            A rank did not come in time, or has other options than the first.
        """
        self._require_live()
        if self._ranks is None:
            timeout = timedelta(seconds=self._timeout)
            self._ranks = Ranks(self._process_group, timeout, no_dist=self._no_dist)
        self._step = None
        self._ranks.meet(f"save {checkpoint_id}")

        def options() -> dict[str, Any]:
            agreed: dict[str, Any] = {name: self._options[name] for name in _AGREED}
            agreed |= {"check": "none" if self._check is None else "a check"}
            agreed |= {"max_restore_cost": self._max_restore_cost, "check_every": self._check_every}
            step = {"step": step_of(checkpoint_id), "archive": self.archive}
            return step | {name: str(value) for name, value in agreed.items()}

        numbers = self._ranks.numbers
        first, *others = self._ranks.gathered(options, "the comparison of options")
        for rank, other in zip(numbers[1:], others, strict=True):
            for what, value in other.items():
                if value != first[what]:
                    raise ConflictError(
                        f"rank {rank} saves with another {what} than rank {numbers[0]}",
                        where=self.archive,
                        expected=f"{first[what]}",
                        found=f"{value}",
                        remedy="give every rank the same",
                    )
        self._step = first["step"]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint's name ends with its step."""
        return _STEP.search(os.fspath(checkpoint_id)) is not None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse to save without collectives, since ranks would not know each other's plans."""
        if not kwargs.get("use_collectives", True):
            raise InputError("ranks must save together", remedy="leave out use_collectives=False")
        if self._step is None:
            raise InputError("the save has no name", expected='checkpoint_id="step-400"')

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove parts of an earlier save, and choose the frame that this one continues from."""
        ranks = self._started
        if len(plans) != ranks.n_ranks:
            raise InputError(
                "the writer was made for other ranks than those that save",
                expected=f"{ranks.n_ranks}",
                found=f"{len(plans)}",
                remedy="give process_group and no_dist to the writer, too",
            )
        self._release()
        if storage_at(self.archive).exclusive:
            if not is_archive(self.archive):
                ArchiveWriter(self.archive, create=True).close()
            commit_parts(self.archive, discard=True)
            # Until the commit, no other training may remove parts of these ranks.
            self._lock = storage_at(self.archive).share()
        else:
            if self._last is None or self._last != self._written:
                # An earlier training or a failed save may have left parts, which this removes.
                ArchiveWriter(self.archive, create=True).close()
            self._shared_frame = SharedFrame(self.archive)
        try:
            self._info = self._describe(plans)
        except BaseException:
            self._release()
            raise
        return plans

    def _describe(self, plans: Sequence[SavePlan]) -> _SaveInfo:
        reader = ArchiveReader.open(self.archive)
        parent, is_restored = self._parent(reader)
        step = cast("int", self._step)
        if parent is not None and parent.step >= step:
            raise StepConflictError(
                f"step {step} does not follow step {parent.step} of the archive",
                where=self.archive,
                remedy="say which step training was restored from: resumed_from",
            )
        tensors, paths = self._described(plans)
        salt = os.urandom(_SALT_NBYTES)
        generation = None if self._shared_frame is None else self._shared_frame.generation
        parent_id = _id_of(parent)
        return _SaveInfo(step, reader.archive_id, salt, generation, parent_id, is_restored, tensors, paths)

    def _parent(self, reader: ArchiveReader) -> tuple[FrameInfo | None, bool]:
        """Return the frame that a save continues from, and whether training was just restored from it."""
        head = reader.head
        if self._last is None:
            if self._resumed_from is None:
                return head, False
            return reader.find(self._resumed_from), True
        # Opening the archive may have completed a failed commit.
        if head is None or head.frame_id not in (self._last, self._written):
            raise ConflictError(
                "another training has written into the archive since the last save",
                where=self.archive,
                remedy="give every training an archive of its own",
            )
        return head, False

    def _described(
        self, plans: Sequence[SavePlan]
    ) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, StatePath]]:
        """Return dtypes and shapes of all tensors, in the order of the state, and all paths."""
        if not self._plans and not all(plan.usable for plan in plans):
            raise InputError("the plan of another writer's save is used", remedy="give each writer a planner")
        before = self._plans or plans
        self._plans = [now if now.usable else old for now, old in zip(plans, before, strict=True)]
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        paths: dict[str, StatePath] = {}
        for rank, plan in zip(self._started.numbers, self._plans, strict=True):
            paths.update(plan.planner_data or {})
            for item in plan.items:
                if (data := item.tensor_data) is not None:
                    row = (str(data.properties.dtype).removeprefix("torch."), tuple(data.size))
                    if found.setdefault(item.index.fqn, row) != row:
                        raise ConflictError(
                            f"rank {rank} has another tensor '{item.index.fqn}' than the ranks before it",
                            where=self.archive,
                            expected=f"{found[item.index.fqn]}",
                            found=f"{row}",
                        )
        order = {name: place for place, name in enumerate(paths)}
        names = sorted(found, key=lambda name: order.get(name, len(order)))
        return {name: found[name] for name in names}, paths

    @property
    def _started(self) -> Ranks:
        if self._ranks is None or self._step is None:
            raise InputError("the save was not begun", remedy='give it a name: checkpoint_id="step-400"')
        return self._ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the frame."""
        ranks, self._step = self._started, None
        try:
            info = cast("_SaveInfo", ranks.gathered(lambda: self._info, "the exchange of the plan")[0])
            ready = self._prepared(info, ranks, plan, planner)
            chain = ready.chain
            with ranks.exchanging():
                chain.split = Shards(ready.places, lambda value: ranks.gathered(lambda: value, _OBSERVATIONS))
                if self._check is None:
                    chain.append(ready.checkpoint, keyframe=chain.keyframe_is_due)
                else:
                    self._checked_for(ready, ranks).append(chain, ready.checkpoint)
            _part_of(chain).suspend()
            self._written = _id_of(chain.parent)
            if info.generation is not None:
                self._parts = ranks.gathered(lambda: _part_of(chain).written, "the list of parts")
        except BaseException:
            if self._chain is not None:
                _part_of(self._chain).suspend()
            self._chain = None
            self._forget_checked()
            self._release()
            raise
        return _done([WriteResult(item.index, _nbytes(item), None) for item in plan.items])

    def _prepared(self, info: _SaveInfo, ranks: Ranks, plan: SavePlan, planner: SavePlanner) -> _Ready:
        """Return what this rank appends, and to which chain; if one rank fails, all do."""
        tensors: list[_RankTensor] = []

        def resolved() -> dict[str, bytes]:
            objects = {}
            for item in plan.items:
                data, stored = planner.resolve_data(item), item.tensor_data
                if isinstance(data, io.BytesIO):
                    objects[item.index.fqn] = data.getvalue()
                    continue
                box = None
                if stored is not None and item.type is WriteItemType.SHARD:
                    box = Box(tuple(stored.chunk.offsets), tuple(stored.chunk.sizes))
                tensors.append((item.index.fqn, data, box))
            for content, name in {content: name for name, content in objects.items()}.items():
                loaded(name, content, self.archive)  # refuses unreadable objects
            return objects

        objects = dict(ChainMap(*ranks.gathered(resolved, "the exchange of objects")))
        named = named_state(info.tensors, objects, info.paths, self.archive)
        state = SavedState({name: spec.key for name, spec in named.specs.items()}, objects, info.paths)
        order = {key: place for place, key in enumerate(state.tensors.values())}
        made: list[tuple[ChainWriter, Checkpoint]] = []

        def opened() -> tuple[list[_Row], bool]:
            before, chain = self._chain, self._chain_for(info, ranks)
            cells = sorted(_cut(tensors, named).items(), key=lambda item: _row(item[0], order))
            full = _checkpoint(info.step, dict(cells), named, state, self.archive)
            made.append((chain, stored_view(full, chain.config.optimizer)))
            return [_row(spec, order) for spec in made[0][1].specs], chain is before

        rows_by_rank = ranks.gathered(opened, "the exchange of names")
        if not all(goes_on for _, goes_on in rows_by_rank):
            self._forget_checked()
        rows = sorted(row for rows, _ in rows_by_rank for row in rows)
        (chain, checkpoint), places = made[0], {row: place for place, row in enumerate(rows)}
        rank_places = {spec.key: places[_row(spec, order)] for spec in checkpoint.specs}
        return _Ready(chain, checkpoint, rank_places, tuple(named.specs.values()))

    def _checked_for(self, ready: _Ready, ranks: Ranks) -> CheckedWriter:
        """Return the writer with a check; all ranks try the check when they start."""
        model = cast("nn.Module", self._model)
        if self._evaluator is None:
            self._evaluator = ShardedEvaluator(model, cast("Check", self._check), ranks)
        self._evaluator.begin(ready.specs, ready.checkpoint.specs)
        if self._checked is None:
            self._checked = CheckedWriter.following(
                self._evaluator,
                model,
                ready.chain.config,
                self._max_restore_cost,
                every=self._check_every,
                resumed=ready.chain.parent is not None,
            )
        return self._checked

    def _forget_checked(self) -> None:
        checked, self._checked = self._checked, None
        if checked is not None:
            checked.close()

    def _chain_for(self, info: _SaveInfo, ranks: Ranks) -> ChainWriter:
        """Return the chain that a save continues: the previous one, if it was committed."""
        chain = self._chain
        if chain is not None and _id_of(chain.parent) == info.parent_id:
            _part_of(chain).resume(info.salt, info.generation)
            return chain
        if not is_archive(self.archive) or ArchiveReader.open(self.archive).archive_id != info.archive_id:
            raise ConflictError(
                "the first rank writes another archive than this one sees",
                where=self.archive,
                remedy="the archive must be on a file system that all ranks share",
            )
        config = make_chain_config(self.archive, **self._options)
        writer = PartWriter(self.archive, ranks.rank, ranks.n_ranks, info.salt, info.generation)
        try:
            parent = None if info.parent_id is None else writer.reader.info(info.parent_id)
            restored = parent if info.is_restored else None
            self._chain = ChainWriter(writer, config, parent=parent, restored=restored)
        except BaseException:
            writer.suspend()
            raise
        return self._chain

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the frame."""
        shared_frame = self._shared_frame
        self._release()
        if shared_frame is not None:
            shared_frame.commit(self._parts)
            self._last = self._written
            return
        commit_parts(self.archive)
        if self._written not in {frame.frame_id for frame in ArchiveReader.open(self.archive).listed}:
            raise ConflictError(
                "the frame lacks parts that its ranks have written",
                where=self.archive,
                remedy="the archive must be on a file system that all ranks share",
            )
        self._last = self._written

    def _release(self) -> None:
        """Release the archive for other writers."""
        self._shared_frame = None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


class _Ready(NamedTuple):
    """What a rank appends, to which chain and at which places of the frame, and the specs of all ranks."""

    chain: ChainWriter
    checkpoint: Checkpoint
    places: Mapping[str, int]
    specs: tuple[TensorSpec, ...]


_Row: TypeAlias = tuple[int, tuple[int, ...]]
"""The place of a tensor in the state, and the offsets of a cell in it."""


def _row(spec: TensorSpec, order: Mapping[str, int]) -> _Row:
    return order[spec.full_spec.key], box_of(spec).offsets


def _part_of(chain: ChainWriter) -> PartWriter:
    return cast("PartWriter", chain.writer)


def _id_of(frame: FrameInfo | None) -> bytes | None:
    return None if frame is None else frame.frame_id


def _threads_of_rank() -> int:
    """Return this rank's share of the processors."""
    return max(1, default_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _writer_of_process(archive: str, options: dict[str, Any]) -> InshrinkWriter:
    key = f"{archive} {options}"
    if key not in InshrinkWriter._of_process:
        InshrinkWriter._of_process[key] = InshrinkWriter(archive, **options)
    return InshrinkWriter._of_process[key]


def step_of(checkpoint_id: str | os.PathLike[str] | None) -> int:
    """Return the step at the end of a checkpoint's name.

    Raises
    ------
    InputError
        The name has none.

    Examples
    --------
    >>> step_of("runs/step-400")
    400
    """
    match = None if checkpoint_id is None else _STEP.search(os.fspath(checkpoint_id))
    if match is None:
        raise InputError(
            "the checkpoint's name has no step", expected='checkpoint_id="step-400"', found=str(checkpoint_id)
        )
    return int(match[1])


def _cut(tensors: Iterable[_RankTensor], named: NamedState) -> dict[TensorSpec, Tensor]:
    """Return full tensors, and cells of sharded ones."""
    cells: dict[TensorSpec, Tensor] = {}
    for name, tensor, box in tensors:
        spec = named.specs[name]
        if box is None:
            cells[spec] = tensor
        else:
            cells |= {cell: tensor[place.slices] for cell, place in cells_of(spec, box)}
    return cells


def _checkpoint(
    step: int, cells: Mapping[TensorSpec, Tensor], named: NamedState, state: SavedState, where: str
) -> Checkpoint:
    numbers = dict(named.hyperparameters)
    numbers |= {spec.name: numbers[spec.parameter] for spec in cells if spec.parameter in numbers}
    packed = state.packed()
    return Checkpoint(
        step=step,
        specs=tuple(cells),
        source=_RankSource({spec.key: tensor for spec, tensor in cells.items()}, packed),
        files=(FileLayout(path=METADATA, nbytes=len(packed), kind=STATE),),
        hyperparameters=numbers,
        origin=f"{where}, step {step}",
    )


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _done(value: _Value) -> Future[_Value]:
    future: Future[_Value] = Future()
    future.set_result(value)
    return future


class InshrinkReader(StorageReader):
    """Reads a step of an archive: ``dcp.load(state, storage_reader=InshrinkReader(archive, step=400))``.

    Each rank decodes what it needs, on any number of ranks. In archives that ranks did not write, tensors are
    named ``model.NAME`` and ``optimizer.state.NAME.exp_avg``.

    Parameters
    ----------
    archive
        The archive.
    step
        The step; by default that of ``checkpoint_id``, else the last.
    base
        The base model that its first frame is encoded relative to (`Archive.open`).
    threads
        Tensors decoded at a time; by default the ranks of a machine share its processors.

    Raises
    ------
    NotFoundError, MissingFrameError
        The archive or step does not exist.
    DamagedError
        It cannot be decoded.
    UnsafePickleError
        It has an object of a type that is not loaded: allow it with `torch.serialization.add_safe_globals`.

    Notes
    -----
    Errors while tensors are read are raised as DCP's ``CheckpointException``, which names the rank.
    """

    def __init__(
        self,
        archive: str | os.PathLike[str],
        *,
        step: int | None = None,
        base: BaseLike | None = None,
        threads: int | None = None,
    ) -> None:
        self._archive = Archive.open(archive, base=base)
        self._asked, self._threads = step, threads or _threads_of_rank()
        self._open(step)

    def _open(self, step: int | None) -> None:
        """Set the frame of a step, its state, and the cells of each tensor by key and offsets."""
        archive = self._archive
        self._info = archive.last if step is None else archive.reader.find(step)
        self._state = saved_state(archive.checkpoint(self._info))
        where = archive.where(self._info)
        self._cells: dict[str, dict[tuple[int, ...], TensorSpec]] = {}
        for key in dict.fromkeys(self._state.tensors.values()):
            specs = [spec_of(entry, where) for entry in archive.blocks(self._info, key)]
            self._cells[key] = {box_of(spec).offsets: spec for spec in specs}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load; the step of the reader takes precedence over the name."""
        self._archive.reader.refresh()
        named = self._asked is None and checkpoint_id is not None
        self._open(step_of(checkpoint_id) if named else self._asked)

    validate_checkpoint_id = InshrinkWriter.validate_checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the step; reads only indexes."""
        state = self._state
        described: dict[str, Any] = {
            name: storage_metadata(self._cells[key].values()) for name, key in state.tensors.items()
        }
        described |= {name: BytesStorageMetadata() for name in state.objects}
        paths = {name: path for name, path in state.paths.items() if name in described}
        return Metadata(described, paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with its frame."""
        return replace(plan, storage_data=self._info)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, if all are for one frame; the last one may have changed meanwhile."""
        for rank, plan in enumerate(plans):
            if plan.storage_data.frame_id != plans[0].storage_data.frame_id:
                raise ConflictError(
                    f"rank {rank} loads another step than rank 0",
                    where=str(self._archive.path),
                    expected=f"step {plans[0].storage_data.step}",
                    found=f"step {plan.storage_data.step}",
                    remedy="say which step: InshrinkReader(archive, step=400)",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode the tensors of a plan, each cell once."""
        archive, state = self._archive, self._state
        wanted: dict[TensorSpec, list[ReadItem]] = {}
        for item in plan.items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            if item.type is LoadItemType.BYTE_IO:
                loaded(name, state.objects[name], str(archive.path))  # refuses unsafe objects
                planner.load_bytes(item, io.BytesIO(state.objects[name]))
            else:
                cells = self._cells[state.tensors[name]]
                cell = next(iter(cells.values())) if offset is None else cells[tuple(offset)]
                wanted.setdefault(cell, []).append(item)

        def decoded(spec: TensorSpec) -> tuple[TensorSpec, Tensor]:
            return spec, archive.decode(self._info, spec.key)[0]

        for spec, tensor in ordered_map(
            decoded, wanted, threads=self._threads, weight=lambda spec: spec.nbytes
        ):
            for item in wanted[spec]:
                target = planner.resolve_tensor(item).detach()
                target.copy_(tensor[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices])
                planner.commit_tensor(item, target)
        return _done(None)


__all__ = ["InshrinkReader", "InshrinkWriter"]
