"""The saver of a training loop: saves become frames of an archive while training goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, overload
from weakref import WeakValueDictionary

from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.archive.storage import storage_error
from inshrink_core.archive.storage.registry import place_of
from inshrink_core.chain import WRITTEN, Archive, BaseFinder, Budget, changed_nbytes, open_base
from inshrink_core.chain.archive import open_base_at
from inshrink_core.chain.attachments import dropped_of
from inshrink_core.chain.base import require_base_codec
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.restoring import read_lineage
from inshrink_core.errors import InputError, LockedError, StepConflictError, named
from inshrink_core.execution import working_folder
from inshrink_core.formats import write_checkpoint
from inshrink_core.formats.state_tree import SAVE_KEY
from inshrink_core.frame import FrameInfo
from inshrink_core.retention import Retention, metrics_of
from inshrink_core.search.bounded import StepWriter
from inshrink_core.training.archiver import Archiver
from inshrink_core.training.extra import pack, unpack
from inshrink_core.training.gradients import N_RECORDED, GradientAverage, finite
from inshrink_core.training.spool import (
    GRADIENTS_NAME,
    OPTIMIZER_NAME,
    SetAside,
    Spool,
    SpooledSave,
    load_save,
    spool_folder,
)
from inshrink_core.training.staging import Staging, address
from inshrink_core.training.state import TrainingState, memory, parts_of, states_of, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from inshrink_core.chain import BaseLike
    from inshrink_core.codec import AnyCodec
    from inshrink_core.training.check import Check, CheckedWriter
    from inshrink_core.training.state import Also, Optimizers

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)


class Saver:
    """Archives a PyTorch training, or the checkpoints that another program writes, and restores it.

    Parameters
    ----------
    archive
        The archive to make or to go on with. Locked against other writers until `close`.
    model, optimizer
        What is saved and restored, in place; without an optimizer, the model alone; without a model, folders
        and files alone (`save_folder`, `save_files`). Several optimizers are a list. Wrappers
        (DistributedDataParallel, torch.compile) may come and go between save and restore.
    codec, config
        How the weights are stored; by default as in the archive, else the default codec.
    optimizer_state
        How the optimizer is stored (`inshrink_core.chain.ChainConfig`). By default as in the archive,
        else compressed: training goes on from a restore, though not bit for bit. ``exact`` keeps every
        bit; ``drop`` leaves it out, so that it starts anew after a restore.
    keyframe_every
        Frames from one keyframe to the next.
    device
        Where frames are encoded, as torch names it; ``auto`` is CUDA where there is one. Does not change
        the bytes.
    threads
        Tensors encoded at a time, beside the training; by default one.
    n_recorded
        Batches before a save whose gradients `record` averages.
    check
        ``check(model)`` returns the loss on a fixed small batch, a number; or a dict of ``loss`` and of
        ``log_probs`` (n, classes) or ``predictions``. Each save is then decoded and judged beside the
        training, on a copy of the model in eval mode, and written as coarse as `max_restore_cost` allows, or
        exactly where nothing coarser does. It must neither draw random numbers nor change what it is not
        given.
    max_restore_cost
        What a restore of any save may cost, as the expected relative rise of the checked loss; by default
        `DEFAULT_MAX_RESTORE_COST`.
    check_every
        Check every so many saves; those between are written as the last one that was checked.
    step_writer
        How each save is written, on the saver's thread; by default as `codec`, `config` and `check` say.
    base
        The model that a fine-tuning begins from, a file or a state dict, which is copied
        (`inshrink_core.chain.open_base`): the archive's first frame is encoded relative to it. An archive
        that was begun so needs it again, unless it lies where it lay.
    also
        Further models, optimizers or pairs of them, by name: ``{"ema": average, "D": (net, optimizer)}``.
        They are stored as `model` and `optimizer` are, ``ema.fc.weight`` beside ``fc.weight``, and restored
        in place.
    retention
        What stays of the archive: looked at after every eighth save, and when the saver is closed. What
        `keep_best` goes by are numbers of a save's `extra`, or of the dict ``metrics`` in it.

    Attributes
    ----------
    path
        The archive: its path, or its URL.
    last_step
        The step of the last save or restore, or the archive's last; None where there is none.
    extra
        What was saved beside models and optimizers in the step restored last.
    older
        The step that a tensor is of, by its name in the archive, where that is before the step restored last:
        what saves under a budget left as it was. The optimizer's state of it is of the same step.

    Raises
    ------
    LockedError
        Another process is saving there, or a saver of this one that is in use: within its ``with`` statement,
        or in another thread. One of this thread that was not closed is taken over.

    Notes
    -----
    `save` writes one torch file into ``ARCHIVE.spool``, waits until the disk has it, and returns; a
    background thread turns it into a frame and removes it. Once `save` has returned, the save survives
    the death of the process and a power loss: what was not archived by then is archived by the next
    saver of the archive. At most two saves wait; `save` blocks before a third.

    One rule says what happens to a save that fails. One that cannot be spooled raises at once: it is not
    saved, and training can go on. What goes wrong later, on the thread, is logged and listed in `failures`.
    Where the disk or the archive refuses, the save waits in the spool, and each later call has it tried
    again; where the save itself is at fault, its files are set aside (`set_aside`) and others go on, but
    after three in a row the fourth waits, too. `flush` and `close` raise where a save is not in the archive,
    and so does a save that finds no room behind two that wait.

    A `restore` sets the lineage by itself: the next save continues from the frame restored, on a new
    branch where later steps are archived already, and the codec gets the values that training continued from.

    Examples
    --------
    >>> import pathlib, tempfile, torch
    >>> import inshrink_core
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> with inshrink_core.Saver(folder / "run.inshrink", model, optimizer) as saver:
    ...     start = saver.restore() or 0
    ...     for step in range(start + 1, start + 21):
    ...         loss = model(torch.ones(8, 64)).square().mean()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         saver.record()
    ...         optimizer.step()
    ...         if step % 10 == 0:
    ...             saver.save(step, {"rng": torch.get_rng_state()})
    ...     restored = saver.restore()
    >>> restored, sorted(saver.extra)
    (20, ['rng'])
    >>> inshrink_core.open(folder / "run.inshrink").steps
    (10, 20)
    """

    _hooks: Sequence[RemovableHandle] = ()
    _entered = False
    _taken_over = False

    def __init__(
        self,
        archive: str | os.PathLike[str],
        model: nn.Module | None = None,
        optimizer: Optimizers | None = None,
        *,
        codec: str | None = None,
        config: Mapping[str, Any] | AnyCodec | None = None,
        optimizer_state: str | None = None,
        keyframe_every: int = 32,
        device: str = "auto",
        threads: int | None = None,
        n_recorded: int = N_RECORDED,
        check: Check | None = None,
        max_restore_cost: float | None = None,
        check_every: int = 1,
        step_writer: StepWriter | None = None,
        base: BaseLike | None = None,
        also: Mapping[str, Also] | None = None,
        retention: Retention | None = None,
    ) -> None:
        from inshrink_core.training.check import CheckedWriter, require_check_options

        self.path = place_of(archive)
        self.extra: dict[str, Any] = {}
        self.older: dict[str, int] = {}
        self._state = TrainingState(model, optimizer, also)
        self._gradients = GradientAverage(self._state.parameters(), n_recorded)
        self._config = make_chain_config(
            self.path, codec, config, optimizer_state, keyframe_every, device, threads or 1
        )
        self._base = None if base is None else open_base(base)
        if self._base is not None:
            require_base_codec(self._config.config)
        require_check_options(check, max_restore_cost, check_every)
        self._checked: CheckedWriter | None = None
        if check is not None:
            self._require_models()
            step_writer = self._checked = CheckedWriter.beside(
                self._state.models[""],
                check,
                self._config,
                max_restore_cost,
                every=check_every,
                resumed=is_archive(self.path),
            )
        self._retention = retention
        self._possible_budget: int | None = None
        self._begin(step_writer)

    def _begin(self, step_writer: StepWriter | None) -> None:
        """Open archive and spool, and archive what an earlier process left."""
        writer = self._open_writer()
        try:
            self._spool = Spool(spool_folder(self.path))
            recovered = self._spool.recover()
            self._archiver = Archiver(
                writer,
                self._config,
                self._spool,
                recovered,
                step_writer=step_writer,
                base=self._base,
                retention=self._retention,
            )
            # At the end of the interpreter what is pending is archived, not abandoned.
            self._finalizer = weakref.finalize(self, self._archiver.close_quietly)
        except BaseException:
            writer.close()
            raise
        self._staging = Staging()
        head = writer.reader.listed_head
        self.last_step = recovered[-1].step if recovered else head.step if head else None
        self._restored = recovered[-1].restored if recovered else None
        self._parent: bytes | None = None
        self._lost = None if recovered or head in writer.reader.frames else head
        """The archive's last frame where training would go on from it and it is missing."""

    def _open_writer(self) -> ArchiveWriter:
        """Open the archive for writing; a saver of this process that is not in use lets go of it."""
        self._used_in, self._process = threading.current_thread(), os.getpid()
        try:
            writer = ArchiveWriter(self.path, create=True)
        except LockedError:
            before = _HOLDING.get(_identity(self.path))
            if before is None or before._process != self._process:
                raise
            before._give_way()
            writer = ArchiveWriter(self.path, create=True)
        _HOLDING[_identity(self.path)] = self
        return writer

    def _give_way(self) -> None:
        """Close for another saver of this process, unless this one is in use.

        It is within its ``with`` statement, and while the thread that used it last is alive and another one.
        A cell of a notebook that is run again makes its saver again, while a variable or a traceback still
        refers to the first.
        """
        other = self._used_in is not threading.current_thread() and self._used_in.is_alive()
        if self._entered or other:
            place = f"thread '{self._used_in.name}'" if other else "its `with` statement"
            raise LockedError(
                f"a saver of this process is writing this archive, in {place}",
                where=str(self.path),
                remedy="close that one first, or give each training an archive of its own",
            )
        self._taken_over = True
        try:
            self.close()
        except Exception as error:  # the successor finds it in the spool
            _logger.warning("a save is not archived yet and waits in the spool: %s", error)

    @property
    def is_usable_here(self) -> bool:
        """Whether this is the process that opened the archive, and not one forked from it."""
        return self._process == os.getpid()

    def _use(self) -> None:
        """Note which thread uses the saver.

        Raises
        ------
        LockedError
            Its successor has taken over, or it belongs to the process that this one was forked from.
        InputError
            It is closed.
        """
        if not self.is_usable_here:
            raise LockedError(
                f"this saver belongs to process {self._process}, from which this one was forked",
                where=str(self.path),
                remedy="save in that process, or make a saver of another archive here",
            )
        if self._taken_over:
            raise LockedError(
                "another saver, made later in this process, has taken over this archive",
                where=str(self.path),
                remedy="go on with that one; what this one saved is archived",
            )
        if not self._finalizer.alive:
            raise InputError("the saver is closed", where=str(self.path))
        self._used_in = threading.current_thread()

    def __enter__(self) -> Self:
        self._use()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise InputError(
            "a saver can be neither copied nor pickled: it writes the archive from this process",
            where=str(self.path),
            remedy="make it in the process that saves",
        )

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The saves that could not be archived, of earlier processes too: where their files are, and why."""
        return self._spool.set_aside_saves

    @property
    def n_pending(self) -> int:
        """Number of saves that are not archived yet."""
        return len(self._archiver.pending) + self._staging.is_busy

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step; those that wait behind a refused one, too."""
        found = self._archiver.failures
        behind = self._archiver.pending if found else ()
        return dict.fromkeys(behind, "it waits in the spool behind an earlier save") | found

    @property
    def check_failures(self) -> Mapping[int, str]:
        """Why saves could not be checked, by step: they are stored exactly."""
        return {} if self._checked is None else dict(self._checked.failures)

    @property
    def check_seconds(self) -> float:
        """Time that checks have taken so far, on the saver's thread."""
        return 0.0 if self._checked is None else self._checked.seconds

    def check_with(self, model: nn.Module, check: Check, max_restore_cost: float | None = None) -> None:
        """Check every save from now on, and bound what a restore of it costs.

        Parameters
        ----------
        model
            The model that trains; a copy of it is judged, beside the training.
        check, max_restore_cost
            As for the saver.

        Raises
        ------
        ConfigError
            The codec has nothing to search.
        EvaluatorError
            The model cannot be copied, or the check is of no use.
        """
        from inshrink_core.training.check import CheckedWriter

        resumed = self.last_step is not None
        checked = CheckedWriter.beside(model, check, self._config, max_restore_cost, resumed=resumed)
        with contextlib.suppress(Exception):  # what the disk refuses waits on
            self._drain()
        self._archiver.write_with(checked)
        self._checked = checked

    def record(self) -> None:
        """Take the gradients of this batch into their average; to be called after ``backward``.

        Codecs may read it to tell which weights matter (sensitivity ``taylor``); without it they read
        the optimizer's first moment. Costs one pass over the gradients.
        """
        self._gradients.record()

    def save(
        self,
        step: int,
        extra: Mapping[str, Any] | None = None,
        *,
        wait: bool = True,
        budget: int | None = None,
        max_age: int = 16,
    ) -> None:
        """Save model and optimizer as they are now.

        Parameters
        ----------
        step
            The training step; greater than that of the last save or restore.
        extra
            Whatever else training needs to continue: numbers, texts, tensors, arrays of NumPy, and lists
            and dicts of them, such as a scheduler's or a generator's state. Stored bit for bit, whatever it
            looks like.
        wait
            Whether the save is on the disk when this returns. If not, it is copied while the training
            goes on, and the optimizer's next step waits for the copy: until then nothing but the optimizer
            may change what it trains, or its state. An error is raised by the next `save`, `flush`, `restore`
            or `close`.
        budget
            Bytes that the save may add to the archive, about: it holds the tensors that changed most since
            they were last saved, with the optimizer's state of them, and leaves the others at what they were
            (SCAR: Qiao et al., ICML 2019, section 4); `older` says which, after a restore. What a tensor
            takes is taken to be what its last change took: the first two saves of an archive are whole, and
            so is every keyframe, and under a check a save whose older tensors would cost more than
            `max_restore_cost`.
        max_age
            Under a budget, every tensor is in one of so many saves in a row; those due come first, and may
            exceed the budget.

        Raises
        ------
        StepConflictError
            The step is not after the last one.
        MissingFrameError
            The file of the archive's last frame is missing, and no other step was restored.
        InputError
            `extra` holds what is no plain value. Model or optimizer hold what could not be read back: nothing
            is saved then. The budget is below what the last change of a tensor took; told by the first saves
            with a budget, not later.
        StorageError
            The disk is full. Training can go on, without this save.
        InshrinkError
            Two earlier saves wait in the spool and cannot be archived.

        Notes
        -----
        Blocks for as long as writing the checkpoint's bytes to the disk takes, and for as long as two
        saves are pending. Without `wait`, buffers are copied at once, and a thread copies the parameters and
        the optimizer's state and writes them; one copy of all that is held in host memory. The save survives
        the process only when that is done. A budget is one of the archive: the file in the spool is whole.

        Examples
        --------
        >>> import pathlib, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.inshrink"
        >>> with Saver(path, model, codec="lossless") as saver:
        ...     for step in (1, 2, 3):
        ...         for layer, distance in zip(model, (1.0, 0.01)):
        ...             _ = layer.weight.data.add_(torch.randn(64, 64), alpha=distance)
        ...         saver.save(step, budget=20_000)
        ...     restored = saver.restore()
        >>> restored, saver.older["1.weight"]
        (3, 2)
        """
        self._require_models()
        self._use()
        self._staging.finish()
        self._require_next(step)
        within = None if budget is None else Budget(budget, max_age)
        files = self._files(step, extra)
        inside = (extra or {}).get("metrics")
        measured = {**(extra or {}), **(inside if isinstance(inside, Mapping) else {})}
        if within is not None:
            self._require_possible(within)
        self._archiver.wait_for_room()
        gradients = self._gradients.take()
        about: dict[str, Any] = {
            "restored": self._restored,
            "parent": self._parent,
            "budget": within,
            "metrics": metrics_of(self._retention, measured),
            "apart": self._is_apart and bool(self._state.optimizers),
        }

        def spool(files: Mapping[str, Any]) -> None:
            recorded = finite(gradients)
            if recorded:
                files = {**files, GRADIENTS_NAME: recorded}
            self._submit(self._spool.put(step, files, **about))

        if wait:
            spool(files)
        else:
            self._staging.start(files, self._settled(files), spool)
        self.last_step = step

    def save_folder(
        self,
        path: str | os.PathLike[str],
        step: int,
        *,
        parameters: bytes | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Archive a finished checkpoint that another program has written, a folder or a file.

        Parameters
        ----------
        path
            The checkpoint. It may be deleted when this returns; it must not be written again in place.
        step
            Its training step; greater than that of the last save.
        parameters
            Names of the optimizers' parameters (`inshrink_core.training.recorded.record_of`), where the
            training knows them: else whose the optimizer's state is follows from its order alone.
        metrics
            What was measured at the step, by name: those that `retention` goes by are kept with it.

        Raises
        ------
        InshrinkError
            As of `save`.

        Notes
        -----
        Makes hard links to the files and returns: 0.3 ms for a folder of Hugging Face's trainer. The save
        outlives the process then, and a power loss when the thread has synced it.
        """
        self._spool_next(
            step, metrics, lambda **about: self._spool.link(step, Path(path), parameters=parameters, **about)
        )

    def save_files(
        self, files: Mapping[str, Any], step: int, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Archive a checkpoint of several files, with content by name: bytes, or what `torch.save` takes.

        Parameters
        ----------
        files
            The content of each file; bytes are written as they are.
        step, metrics
            As for `save_folder`.

        Raises
        ------
        InshrinkError
            As of `save`.
        """
        self._spool_next(step, metrics, lambda **about: self._spool.put(step, files, as_folder=True, **about))

    def _spool_next(
        self, step: int, metrics: Mapping[str, Any] | None, spool: Callable[..., SpooledSave]
    ) -> None:
        self._use()
        self._staging.finish()
        self._require_next(step)
        self._archiver.wait_for_room()
        found = metrics_of(self._retention, metrics)
        self._submit(spool(restored=self._restored, parent=self._parent, metrics=found))
        self.last_step = step

    def _submit(self, save: SpooledSave) -> None:
        self._archiver.submit(save)
        self._parent = None

    def _require_next(self, step: int) -> None:
        """Refuse a step that cannot follow the last one, or that would follow a frame that is missing."""
        if self._lost is not None:
            self._archiver.flush()
            _ = self._archiver.reader.head
        if type(step) is not int or step < 0:
            raise InputError("a step is a whole number from 0", found=repr(step), expected="an int ≥ 0")
        if self.last_step is not None and step <= self.last_step:
            raise StepConflictError(
                f"step {step} is not after step {self.last_step}, the last one",
                where=str(self.path),
                remedy="where training goes on from an earlier step, restore that step first",
            )

    def _require_models(self) -> None:
        if not self._state.models:
            raise InputError(
                "the saver has no model",
                where=str(self.path),
                remedy="make it with the model: Saver(path, model)",
            )

    @property
    def _is_apart(self) -> bool:
        """Whether the optimizer's state is archived as a file of its own: it can go, and the other stays."""
        policy = self._retention
        return policy is not None and policy.optimizer_last is not None and self._config.optimizer != "drop"

    def _files(self, step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the files of a save, by name; each says itself what is what."""
        # Left out of the file and not of the archive alone: a file with holes cannot be restored.
        is_dropped = self._config.optimizer == "drop" or self._is_apart
        content = self._state.content(optimizers=not is_dropped)
        beside = self._state.content(models=False) if is_dropped and self._state.optimizers else {}
        owned: set[int] = set()

        def is_owned(tensor: Tensor) -> bool:
            # What lies in the same memory would be saved once, with the error that weights are stored with.
            if not owned:
                owned.update(map(memory, tensors_in([content, beside])))
            return memory(tensor) in owned

        values, kinds = pack(extra, is_owned)
        content |= {"step": step, **({"extra": values} if values else {})}
        content[SAVE_KEY]["values"] = kinds
        return {"checkpoint": content, **({OPTIMIZER_NAME: beside} if beside else {})}

    def _require_possible(self, budget: Budget) -> None:
        """Refuse a budget that no frame could keep, once the archive tells what its tensors take."""
        if budget.nbytes == self._possible_budget:
            return
        self._drain()
        head = self._archiver.reader.head
        nbytes = {} if head is None else changed_nbytes(Archive(self._archiver.reader), head)
        if not nbytes:
            return
        name = max(nbytes, key=nbytes.__getitem__)
        if nbytes[name] > budget.nbytes:
            raise InputError(
                f"the budget is below what the last change of '{name}' took",
                where=str(self.path),
                expected=f"at least {nbytes[name]} bytes",
                found=f"{budget.nbytes}",
                remedy="give more bytes, and save less often",
            )
        self._possible_budget = budget.nbytes

    def _settled(self, files: Mapping[str, Any]) -> frozenset[int]:
        """Return what optimizers alone change, by `id`, and have their next steps wait for a copy."""
        held = [one for group in self._state.optimizers.values() for one in group]
        if not self._hooks:
            self._hooks = [one.register_step_pre_hook(self._staging.wait_for_copy) for one in held]
        trained = {address(one) for each in held for group in each.param_groups for one in group["params"]}
        return frozenset(
            id(value)
            for content in files.values()
            for part in parts_of(content)
            for value in [
                *(one for one in part.get("model", {}).values() if address(one) in trained - {0}),
                *(one["state"] for one in states_of(part)),
            ]
        )

    def before_step(self) -> None:
        """Wait for the copy of a save without `wait`, where no optimizer's hook does so.

        To be called before whatever changes the parameters and is no call of the optimizer's ``step``: a
        replayed CUDA graph, weights that are set by hand.
        """
        self._staging.wait_for_copy()

    def resume(self, step: int, folder: str | os.PathLike[str] | None = None) -> None:
        """Say where a training goes on that another program restored: the next save continues from there.

        Parameters
        ----------
        step
            The step that training has reached; 0 for one that begins.
        folder
            The checkpoint that was loaded. Where it was restored from this archive, the codec gets the
            values that training continues from.

        Raises
        ------
        StepConflictError
            The archive holds later steps, and not this one.
        MissingFrameError
            The frame to go on from is missing.
        LockedError
            A later saver of this process has taken over.
        """
        self._use()
        with contextlib.suppress(Exception):  # what the disk refuses waits on
            self._drain()
        reader = self._archiver.reader
        lineage = None if folder is None else read_lineage(Path(folder))
        known = {frame.frame_id: frame for frame in reader.frames}
        if lineage is not None and lineage.archive_id == reader.archive_id and lineage.frame_id in known:
            self.resume_from(known[lineage.frame_id])
            return
        if self.last_step is None or (self.last_step <= step and step > 0):
            return
        frames = [frame for frame in reader.frames if frame.step == step and not frame.is_named]
        if not frames:
            raise StepConflictError(
                f"the archive holds step {self.last_step} already, and training begins after step {step}",
                where=str(self.path),
                remedy="go on from a step that is archived, or give another archive",
            )
        newest = max(frames, key=lambda frame: frame.generation)
        self.resume_from(newest)
        self._restored = None

    def resume_from(self, frame: FrameInfo) -> None:
        """Say that training goes on from the values of a frame: the next save continues from it."""
        self._restored = self._parent = frame.frame_id
        self.last_step, self._lost = frame.step, None

    def restore(self, step: int | None = None, *, partial: Iterable[str] | None = None) -> int | None:
        """Load model and optimizer from the archive, in place; pending saves are archived first.

        Parameters
        ----------
        step
            The step; by default the last one.
        partial
            Names of the model's tensors that were lost, where the others are still in memory; of a further
            model behind its name, ``D.fc.weight``. These alone are loaded, and what the optimizers have
            gathered of them. All else stays as it is, the training's step too, so that training goes on
            where it is instead of where it was (SCAR: Qiao et al., ICML 2019, section 4).

        Returns
        -------
        int or None
            The step restored; None where the archive holds none yet, and nothing was changed. What was
            saved beside is in `extra`.

        Raises
        ------
        NotFoundError
            The archive has no such step.
        MissingFrameError
            The step, or the last one, is listed and its file is missing.
        InputError
            Model or optimizer are not those that were saved, or the model has no tensor of a name in
            `partial`; nothing was changed.
        BaseModelError
            The base model is needed, and it is not there or is another one; nothing was changed.
        """
        self._require_models()
        names = None if partial is None else self._state.known_names(partial)
        info = self._find(step)
        if info is None:
            return None
        content = self._read(info)
        self._state.require_same(content, f"{self.path}, step {info.step}")
        if names is not None:
            self._state.load_lost(content, names)
            self.older = self._older(info)
            self._gradients.forget()
            return info.step
        self._state.load(content)
        self.extra = content["extra"]
        self.older = self._older(info)
        self._gradients.forget()
        self.resume_from(info)
        return info.step

    def _older(self, info: FrameInfo) -> dict[str, int]:
        """Return of which step tensors are that a frame left unchanged."""
        return dict(Archive(self._archiver.reader).frame(info).meta.get(WRITTEN, {}))

    def read(self, step: int) -> dict[str, Any]:
        """Return what a save holds: ``model``, ``optimizer``, ``step``, ``also`` and ``extra``.

        Raises
        ------
        NotFoundError, MissingFrameError, InputError, BaseModelError
            As of `restore`.
        """
        return self._read(self._find(step))

    @overload
    def _find(self, step: int) -> FrameInfo: ...
    @overload
    def _find(self, step: int | None) -> FrameInfo | None: ...
    def _find(self, step: int | None) -> FrameInfo | None:
        """Return a step of the archive, by default the last one; pending saves are archived first."""
        self._drain()
        reader = self._archiver.reader
        return reader.head if step is None else reader.find(step)

    def _read(self, info: FrameInfo) -> dict[str, Any]:
        """Return the content of the file that a frame holds."""
        import torch

        reader = self._archiver.reader
        archive = Archive(reader, bases=BaseFinder(reader.path, self._base, open_base_at))
        checkpoint = archive.checkpoint(info)
        content: Any = None
        if {file.kind for file in checkpoint.files} == {"torch"} and len(checkpoint.files) <= 2:
            # Beside the archive: where that has room, one checkpoint does; /tmp may be too small.
            try:
                with working_folder(spool_folder(self.path).absolute().parent) as folder:
                    files = write_checkpoint(checkpoint, folder)
                    try:
                        contents = {file.name: load_save(file) for file in files}
                    except pickle.UnpicklingError as error:
                        unknown = [
                            name
                            for file in files
                            for name in torch.serialization.get_unsafe_globals_in_checkpoint(file)
                        ]
                        raise InputError(
                            "the save holds classes that torch.load does not know",
                            where=f"{self.path}, step {info.step}",
                            found=named(sorted(unknown)),
                            remedy="import what defines them, such as torchao.optim, before you restore",
                        ) from error
                    content = _joined(contents)
            except OSError as error:
                raise storage_error(error, "the step cannot be restored", str(self.path)) from error
        dropped = dropped_of(archive.frame(info))
        if isinstance(content, dict) and isinstance(content.get("model"), dict):
            if dropped:
                _logger.warning("the optimizer's state of step %s was pruned: it begins anew", info.step)
            return _as_saved(content)
        if dropped:
            raise InputError(
                "the optimizer's state of this step was pruned, and with it the file that held all",
                where=f"{self.path}, step {info.step}",
                remedy="its weights are left: inshrink_core.verbs.load_state_dict(archive, step)",
            )
        raise InputError(
            "this step was not written by a saver",
            where=f"{self.path}, step {info.step}",
            remedy="write it to a file with `inshrink restore`, and load that",
        )

    def flush(self, *, remote: bool = False) -> None:
        """Return when the archive holds every save.

        Parameters
        ----------
        remote
            Of an archive in a bucket, wait until the last frame is uploaded, too. Else it is on its way, and
            on this machine's disk.

        Raises
        ------
        InshrinkError
            One of them could not be archived.
        """
        self._drain()
        self._archiver.require_archived()
        if remote:
            self.upload()

    def upload(self) -> None:
        """Return when the frames of an archive in a bucket are uploaded; saves that are pending are not."""
        self._archiver.upload()

    def _drain(self) -> None:
        """Wait until nothing is being archived any more."""
        self._use()
        self._staging.finish()
        self._archiver.flush()

    def close(self) -> None:
        """Archive what is pending and release the archive; harmless when repeated.

        Raises
        ------
        InshrinkError
            A save could not be archived. It stays in the spool for the next saver, or was set aside.
        """
        if not self.is_usable_here:
            return
        self._finalizer.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        with contextlib.ExitStack() as stack:
            if self._checked is not None:
                stack.callback(self._checked.close)
            stack.callback(self._archiver.close)
            stack.callback(self._staging.close)
            self._staging.finish()
        self._archiver.require_archived()


_HOLDING: Final[WeakValueDictionary[str | tuple[int, int], Saver]] = WeakValueDictionary()
"""Which saver opened an archive last in this process, by the identity of the archive's folder."""


def _identity(archive: Path | str) -> str | tuple[int, int]:
    if isinstance(archive, str):
        return archive.rstrip("/")
    found = archive.stat()
    return found.st_dev, found.st_ino


def _joined(contents: Mapping[str, Any]) -> Any:
    """Return the content of a save whose optimizers lie in a file of their own as one."""
    beside = contents.get(OPTIMIZER_NAME)
    held = [content for name, content in contents.items() if name != OPTIMIZER_NAME]
    if len(held) != 1 or not isinstance(beside, dict) or not isinstance(held[0], dict):
        return held[0] if len(held) == 1 and beside is None else None
    parts = {"": beside, **beside.get("also", {})}
    whole = {**held[0], "also": {name: dict(part) for name, part in held[0].get("also", {}).items()}}
    for name, part in parts.items():
        if "optimizer" in part:
            (whole if not name else whole["also"].setdefault(name, {}))["optimizer"] = part["optimizer"]
    return whole


def _as_saved(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file holds as a save: of one that no saver wrote, all else is `extra`."""
    said = content.get(SAVE_KEY)
    known = {key: content[key] for key in ("model", "optimizer", "step") if key in content}
    if not isinstance(said, dict):
        return {**known, "extra": {key: value for key, value in content.items() if key not in known}}
    return {
        **known,
        "also": content.get("also", {}),
        "extra": unpack(content.get("extra", {}), said.get("values", {})),
    }
