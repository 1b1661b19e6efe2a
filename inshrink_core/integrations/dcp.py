"""`torch.distributed.checkpoint`: each rank of a training writes its part of an archive, and reads its own.

``dcp.save(state, storage_writer=InshrinkWriter(...))`` compresses what each rank holds against what it held
at the save before. No tensor leaves its rank: ranks exchange observations, and objects that are no tensors.
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, cast

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from inshrink_core.archive import ArchiveReader, ArchiveWriter, PartWriter, commit_parts, is_archive
from inshrink_core.archive.parts import Gathering, Told
from inshrink_core.archive.storage import storage_at
from inshrink_core.chain import Archive, ChainWriter
from inshrink_core.chain.attachments import stored_view
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.meta import spec_of
from inshrink_core.chain.parts import Shards, box_of, cells_of
from inshrink_core.checkpoint import Box, Checkpoint, FileLayout, TensorSpec
from inshrink_core.errors import ConflictError, InputError, StepConflictError
from inshrink_core.execution import default_threads, ordered_map
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
from inshrink_core.integrations.dcp_ranks import Ranks, ShardedEvaluator
from inshrink_core.training.check import (
    CheckedWriter,
    bounds_of,
    require_check,
    require_check_options,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from inshrink_core.archive.storage import Lock
    from inshrink_core.chain.base import BaseLike
    from inshrink_core.codec import AnyCodec
    from inshrink_core.frame import FrameInfo
    from inshrink_core.training.check import Check

_Value = TypeVar("_Value")

_STEP: Final = re.compile(r"(\d+)\D*$", re.ASCII)

_AGREED: Final = ("codec", "config", "optimizer", "keyframe_every")
"""Options that all ranks must be given alike."""

_SALT_NBYTES: Final = 16

_OBSERVATIONS: Final = "the exchange of observations"


@dataclass(frozen=True)
class _Told:
    """What the coordinator tells all ranks of a save."""

    step: int
    archive_id: bytes
    salt: bytes
    generation: int | None
    parent_id: bytes | None
    is_restored: bool
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    paths: Mapping[str, StatePath]


class _Held(NamedTuple):
    """A tensor, or what a rank holds of it; `box` is where in it, None for one that is not sharded."""

    name: str
    tensor: Tensor
    box: Box | None


@dataclass(frozen=True)
class _RankSource:
    """A `TensorSource` over what a rank holds."""

    tensors: Mapping[str, Tensor]
    state: bytes

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a copy in host memory: training goes on with the tensor itself."""
        return self.tensors[spec.key].detach().to("cpu", copy=True).contiguous()

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return the state that is not tensors."""
        return self.state


class InshrinkWriter(StorageWriter):
    """Writes the archive of a sharded training.

    ``dcp.save(state, storage_writer=writer, checkpoint_id="step-100")``, or ``dcp.async_save``, on all ranks.
    Keep one writer for the whole training: it holds what the next save is encoded relative to.

    Parameters
    ----------
    archive
        The folder, on a file system that all ranks see, or its address in a bucket; made where there is none.
    codec, config, optimizer, keyframe_every, device, threads
        As of `inshrink_core.verbs.compress`. By default the ranks of a machine share its processors.
    resumed_from
        The step of the archive that training was restored from: later steps stay, on another branch. By
        default frames follow the last one.
    process_group, no_dist
        As they are given to ``dcp.save``.
    timeout
        Seconds until a rank that does not come is given up.
    model, check, max_restore_cost, check_every
        As of `inshrink_core.Saver`: the model whose state is saved, and a function of it that all ranks call
        together. What a save restores to is put into the model, the function is asked, and what the model
        held is put back. Saves are then `dcp.save`'s alone.

    Raises
    ------
    InputError
        Options that contradict each other or the archive; a checkpoint without a step in its name.
    ConflictError
        Ranks disagree, one failed or did not come; nothing is committed then.
    StepConflictError
        The step is not after the one it continues from.

    Notes
    -----
    A save is in the archive when ``dcp.save`` returns, or the future of ``dcp.async_save`` has its result;
    one that a rank did not finish is not, and the next save gives up what the others wrote of it. What is
    raised after all ranks have met comes as DCP's ``CheckpointException``. Sharded tensors are stored in
    cells of 2^18 elements, cut at the same rows whatever the number of ranks (docs/format.md, *Cells*).
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
            raise InputError("a check is of a model", remedy="give the writer both, or none: model, check")
        self._model, self._check = model, check
        self._max_restore_cost, self._check_every = max_restore_cost, check_every
        self._checked: tuple[CheckedWriter, ShardedEvaluator] | None = None
        self._thread = threading.get_ident()
        self.archive = os.fspath(archive)
        storage = storage_at(archive)
        if not (storage.exclusive or storage.gathers):
            storage.share()  # refuses
        self._options: dict[str, Any] = dict(
            codec=codec,
            config=config,
            optimizer=optimizer,
            keyframe_every=keyframe_every,
            device=device,
            threads=threads or _threads_of_rank(),
        )
        make_chain_config(self.archive, **self._options)  # misuse is refused now
        self._resumed_from, self._timeout, self._no_dist = resumed_from, timeout, no_dist
        self._process_group = process_group
        self._ranks: Ranks | None = None
        self._step: int | None = None
        self._checkpoint_id: str | os.PathLike[str] | None = None
        self._chain: ChainWriter | None = None
        # Of the coordinator:
        self._plans: list[SavePlan] = []
        self._told: _Told | None = None
        self._last: bytes | None = None
        self._written: bytes | None = None
        self._lock: Lock | None = None
        self._gathering: Gathering | None = None
        self._parts: list[Told] = []

    def __reduce__(self) -> tuple[Any, ...]:
        self._require_live(there=False)
        # A process that saves beside the training gets the writer anew for each save; it keeps the first.
        options = dict(resumed_from=self._resumed_from, no_dist=self._no_dist, timeout=self._timeout)
        return _writer_of_process, (self.archive, {**self._options, **options})

    def _require_live(self, *, there: bool = True) -> None:
        """Refuse to put states into a model that is being trained meanwhile."""
        if self._check is not None and not (there and threading.get_ident() == self._thread):
            raise InputError(
                "a check puts states into the model, which training must not use meanwhile",
                where=self.archive,
                remedy="save with dcp.save, on the thread that made the writer",
            )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save: meet the other ranks, and compare what all must agree upon.

        Parameters
        ----------
        checkpoint_id
            Its name, which ends with the step.

        Raises
        ------
        InputError
            There is no step in it.
        ConflictError
            A rank has not come in time, or saves otherwise than the first.
        """
        self._require_live()
        if self._ranks is None:
            timeout = timedelta(seconds=self._timeout)
            self._ranks = Ranks(self._process_group, timeout, no_dist=self._no_dist)
        self._checkpoint_id, self._step = checkpoint_id, None
        self._ranks.meet(f"save {checkpoint_id}")

        def said() -> dict[str, Any]:
            settings = {name: str(self._options[name]) for name in _AGREED}
            promised = {
                "check": "none" if self._check is None else "a check",
                "max_restore_cost": str(self._max_restore_cost),
                "check_every": str(self._check_every),
            }
            return {"step": step_of(checkpoint_id), "archive": self.archive, **settings, **promised}

        numbers = self._ranks.numbers
        first, *others = self._ranks.gathered(said, "the comparison of options")
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

    def storage_meta(self) -> StorageMeta | None:
        """Return what DCP logs."""
        return StorageMeta(self._checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse to save without collectives, where no rank would know what the others write."""
        if not kwargs.get("use_collectives", True):
            raise InputError("ranks must save together", remedy="leave out use_collectives=False")
        if self._step is None:
            raise InputError("the save has no name", expected='checkpoint_id="step-400"')

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give up what an earlier save left, and choose what this one continues from: all ranks are told."""
        ranks = self._started
        if len(plans) != ranks.n_ranks:
            raise InputError(
                "other ranks save than the writer was made for",
                expected=f"{ranks.n_ranks}",
                found=f"{len(plans)}",
                remedy="give process_group and no_dist to the writer, too",
            )
        self._release()
        if storage_at(self.archive).exclusive:
            if not is_archive(self.archive):
                ArchiveWriter(self.archive, create=True).close()
            commit_parts(self.archive, discard=True)
            # Until the commit, no other training gives up what the ranks of this one have written.
            self._lock = storage_at(self.archive).share()
        else:
            self._gather()
        try:
            self._told = self._tell(plans)
        except BaseException:
            self._release()
            raise
        return plans

    def _gather(self) -> None:
        """Begin a frame in a bucket; what an earlier training or a failed save left there is deleted."""
        if self._last is None or self._last != self._written:
            ArchiveWriter(self.archive, create=True).close()
        self._gathering = Gathering(self.archive)

    def _tell(self, plans: Sequence[SavePlan]) -> _Told:
        reader = ArchiveReader.open(self.archive)
        parent, is_restored = self._parent(reader)
        step = cast("int", self._step)
        if parent is not None and parent.step >= step:
            raise StepConflictError(
                f"step {step} does not follow step {parent.step} of the archive",
                where=self.archive,
                remedy="say which step training was restored from: resumed_from",
            )
        parent_id = None if parent is None else parent.frame_id
        tensors, paths = self._described(plans)
        salt = os.urandom(_SALT_NBYTES)
        generation = None if self._gathering is None else self._gathering.generation
        return _Told(step, reader.archive_id, salt, generation, parent_id, is_restored, tensors, paths)

    def _parent(self, reader: ArchiveReader) -> tuple[FrameInfo | None, bool]:
        """Return the frame that a save continues from, and whether training was restored from it just now."""
        head = reader.head
        if self._last is None:
            if self._resumed_from is None:
                return head, False
            return reader.find(self._resumed_from), True
        # A commit that failed may have been made up for when the archive was opened.
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
        """Return dtype and shape of all tensors, in the order of the state, and the paths of everything."""
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
            told = cast("_Told", ranks.gathered(lambda: self._told, "the exchange of the plan")[0])
            ready = self._prepared(told, ranks, plan, planner)
            chain = ready.chain
            with ranks.exchanging():
                chain.split = Shards(ready.places, lambda value: ranks.gathered(lambda: value, _OBSERVATIONS))
                if self._check is None:
                    chain.append(ready.checkpoint, keyframe=chain.keyframe_is_due)
                else:
                    self._checked_for(ready, ranks).append(chain, ready.checkpoint)
            _part_of(chain).suspend()
            self._written = _id_of(chain.parent)
            if told.generation is not None:
                self._parts = ranks.gathered(
                    lambda: _part_of(chain).told(cast("FrameInfo", chain.parent)), "the list of parts"
                )
        except BaseException:
            if self._chain is not None:
                _part_of(self._chain).suspend()
            self._chain = None
            self._forget_checked()
            self._release()
            raise
        return _done([WriteResult(item.index, _nbytes(item), None) for item in plan.items])

    def _prepared(self, told: _Told, ranks: Ranks, plan: SavePlan, planner: SavePlanner) -> _Ready:
        """Return what this rank appends, and to what.

        All ranks fail where one does.
        """
        held: list[_Held] = []

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
                held.append(_Held(item.index.fqn, data, box))
            for content, name in {content: name for name, content in objects.items()}.items():
                loaded(name, content, self.archive)  # refuses what could not be read back
            return objects

        objects = dict(ChainMap(*ranks.gathered(resolved, "the exchange of objects")))
        named = named_state(told.tensors, objects, told.paths, self.archive)
        state = SavedState({name: spec.key for name, spec in named.specs.items()}, objects, told.paths)
        order = {key: place for place, key in enumerate(state.tensors.values())}
        made: list[tuple[ChainWriter, Checkpoint]] = []

        def opened() -> tuple[list[_Row], bool]:
            before, chain = self._chain, self._chain_for(told, ranks)
            own = sorted(_cut(held, named).items(), key=lambda one: _row(one[0], order))
            whole = _checkpoint(told.step, dict(own), named, state, self.archive)
            made.append((chain, stored_view(whole, chain.config.optimizer)))
            return [_row(spec, order) for spec in made[0][1].specs], chain is before

        told_by = ranks.gathered(opened, "the exchange of names")
        if not all(goes_on for _, goes_on in told_by):
            self._forget_checked()
        rows = sorted(row for rows, _ in told_by for row in rows)
        (chain, checkpoint), places = made[0], {row: place for place, row in enumerate(rows)}
        own = {spec.key: places[_row(spec, order)] for spec in checkpoint.specs}
        return _Ready(chain, checkpoint, own, tuple(named.specs.values()))

    def _checked_for(self, ready: _Ready, ranks: Ranks) -> CheckedWriter:
        """Return what writes saves under the check; all ranks try that when they begin, or begin anew."""
        if self._checked is None:
            evaluator = ShardedEvaluator(cast("nn.Module", self._model), cast("Check", self._check), ranks)
            evaluator.begin(ready.specs, ready.checkpoint.specs)
            bounds = bounds_of(self._max_restore_cost)
            bounds.completed(require_check(evaluator, cast("nn.Module", self._model)))
            writer = CheckedWriter(
                ready.chain.config,
                evaluator,
                bounds,
                follows=True,
                every=self._check_every,
                resumed=ready.chain.parent is not None,
            )
            self._checked = writer, evaluator
        else:
            self._checked[1].begin(ready.specs, ready.checkpoint.specs)
        return self._checked[0]

    def _forget_checked(self) -> None:
        checked, self._checked = self._checked, None
        if checked is not None:
            checked[0].close()

    def _chain_for(self, told: _Told, ranks: Ranks) -> ChainWriter:
        """Return the chain that a save continues: the one before, if it was committed."""
        chain = self._chain
        if chain is not None and _id_of(chain.parent) == told.parent_id:
            _part_of(chain).resume(told.salt, told.generation)
            return chain
        if not is_archive(self.archive) or ArchiveReader.open(self.archive).archive_id != told.archive_id:
            raise ConflictError(
                "the first rank writes another archive than this one sees",
                where=self.archive,
                remedy="the archive must lie on a file system that all ranks share",
            )
        config = make_chain_config(self.archive, **self._options)
        writer = PartWriter(self.archive, ranks.rank, ranks.n_ranks, told.salt, told.generation)
        try:
            parent = None if told.parent_id is None else writer.reader.info(told.parent_id)
            restored = parent if told.is_restored else None
            self._chain = ChainWriter(writer, config, parent=parent, restored=restored)
        except BaseException:
            writer.close()
            raise
        return self._chain

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """List the frame: it is in the archive now."""
        gathering = self._gathering
        self._release()
        if gathering is not None:
            gathering.commit(self._parts)
            self._last = self._written
            return
        commit_parts(self.archive)
        if self._written not in {frame.frame_id for frame in ArchiveReader.open(self.archive).listed}:
            raise ConflictError(
                "the frame lacks parts that its ranks have written",
                where=self.archive,
                remedy="the archive must lie on a file system that all ranks share",
            )
        self._last = self._written

    def _release(self) -> None:
        """Let others write the archive."""
        self._gathering = None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


class _Ready(NamedTuple):
    """What a rank appends: to which chain, at which places of the frame, and what all ranks have together."""

    chain: ChainWriter
    checkpoint: Checkpoint
    places: Mapping[str, int]
    specs: tuple[TensorSpec, ...]


_Row: TypeAlias = tuple[int, tuple[int, ...]]
"""The place of a tensor in the state, and where in it a cell begins."""


def _row(spec: TensorSpec, order: Mapping[str, int]) -> _Row:
    return order[spec.whole.key], box_of(spec).offsets


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
    """Return the step that a checkpoint's name ends with.

    Raises
    ------
    InputError
        It has none.

    Examples
    --------
    >>> step_of("runs/step-400")
    400
    """
    match = None if checkpoint_id is None else _STEP.search(os.fspath(checkpoint_id))
    if match is None:
        raise InputError(
            "the checkpoint's name has no step",
            expected='checkpoint_id="step-400"',
            found=str(checkpoint_id),
        )
    return int(match[1])


def _cut(held: Iterable[_Held], named: NamedState) -> dict[TensorSpec, Tensor]:
    """Return whole tensors, and cells of sharded ones."""
    own: dict[TensorSpec, Tensor] = {}
    for name, tensor, box in held:
        spec = named.specs[name]
        if box is None:
            own[spec] = tensor
        else:
            own |= {cell: tensor[place.slices] for cell, place in cells_of(spec, box)}
    return own


def _checkpoint(
    step: int, own: Mapping[TensorSpec, Tensor], named: NamedState, state: SavedState, where: str
) -> Checkpoint:
    numbers = dict(named.hyperparameters)
    numbers |= {spec.name: numbers[spec.parameter] for spec in own if spec.parameter in numbers}
    packed = state.packed()
    return Checkpoint(
        step=step,
        specs=tuple(own),
        source=_RankSource({spec.key: tensor for spec, tensor in own.items()}, packed),
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

    Each rank decodes what it needs, on any number of ranks. Archives that were made in another way are read
    too: their tensors are called ``model.NAME`` and ``optimizer.state.NAME.exp_avg``.

    Parameters
    ----------
    archive
        The archive.
    step
        Which step; by default the one that ``checkpoint_id`` names, else the last.
    base
        The base model that its first frame is encoded relative to (`Archive.open`).
    threads
        Tensors decoded at a time; by default the ranks of a machine share its processors.

    Raises
    ------
    NotFoundError, MissingFrameError
        There is no such archive or step.
    DamagedError
        It cannot be decoded.
    UnsafePickleError
        An object in it is of a type that is not loaded: allow it with `torch.serialization.add_safe_globals`.

    Notes
    -----
    What is raised while tensors are read comes as DCP's ``CheckpointException``, which names the rank.
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
        self._opened = self._open(step)

    def _open(self, step: int | None) -> _Opened:
        info = self._archive.last if step is None else self._archive.reader.find(step)
        return _Opened.of(self._archive, info)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load; a step that was given counts more than a name."""
        self._archive.reader.refresh()
        named = self._asked is None and checkpoint_id is not None
        self._opened = self._open(step_of(checkpoint_id) if named else self._asked)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint's name ends with its step."""
        return _STEP.search(os.fspath(checkpoint_id)) is not None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the step holds; reads indexes alone."""
        there = self._opened
        described: dict[str, Any] = {
            name: storage_metadata(there.cells[key].values()) for name, key in there.state.tensors.items()
        }
        described |= {name: BytesStorageMetadata() for name in there.state.objects}
        paths = {name: path for name, path in there.state.paths.items() if name in described}
        return Metadata(described, paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with the frame that it is for."""
        return replace(plan, storage_data=self._opened.info)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, if all are for one frame: the last one may have changed meanwhile."""
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
        """Decode what a plan asks for, each cell once."""
        there, archive = self._opened, self._archive
        wanted: dict[TensorSpec, list[ReadItem]] = {}
        for item in plan.items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            if item.type is LoadItemType.BYTE_IO:
                loaded(name, there.state.objects[name], str(archive.path))  # refuses what is unsafe
                planner.load_bytes(item, io.BytesIO(there.state.objects[name]))
            else:
                cells = there.cells[there.state.tensors[name]]
                cell = next(iter(cells.values())) if offset is None else cells[tuple(offset)]
                wanted.setdefault(cell, []).append(item)

        def decoded(spec: TensorSpec) -> tuple[TensorSpec, Tensor]:
            return spec, archive.decode(there.info, spec.key)[0]

        for spec, tensor in ordered_map(
            decoded, wanted, threads=self._threads, weight=lambda spec: spec.nbytes
        ):
            for item in wanted[spec]:
                target = planner.resolve_tensor(item).detach()
                target.copy_(tensor[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices])
                planner.commit_tensor(item, target)
        return _done(None)


class _Opened(NamedTuple):
    """A step of an archive: its state, and the cells of each tensor by key and where they begin."""

    info: FrameInfo
    state: SavedState
    cells: Mapping[str, Mapping[tuple[int, ...], TensorSpec]]

    @classmethod
    def of(cls, archive: Archive, info: FrameInfo) -> _Opened:
        state, where = saved_state(archive.checkpoint(info)), archive.where(info)
        cells = {}
        for key in dict.fromkeys(state.tensors.values()):
            specs = [spec_of(entry, where) for entry in archive.blocks(info, key)]
            cells[key] = {box_of(spec).offsets: spec for spec in specs}
        return cls(info, state, cells)


__all__ = ["InshrinkReader", "InshrinkWriter"]
