"""The saver of a training loop: it archives saves while training continues."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.archive.storage.contract import storage_errors
from inshrink_core.archive.storage.registry import place_of
from inshrink_core.chain import Archive, open_base
from inshrink_core.chain.archive import open_base_at
from inshrink_core.chain.attachments import dropped_of
from inshrink_core.chain.base import BaseFinder, BaseLike, require_base_codec
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.restoring import read_lineage
from inshrink_core.codec import AnyCodec
from inshrink_core.errors import InputError, LockedError, StepConflictError, named
from inshrink_core.execution.files import working_folder
from inshrink_core.formats import write_checkpoint
from inshrink_core.formats.state_tree import SAVE_KEY
from inshrink_core.frame import FrameInfo
from inshrink_core.retention import Retention, metrics_of
from inshrink_core.search.bounded import StepWriter
from inshrink_core.training.archiver import Archiver
from inshrink_core.training.extra import pack, unpack
from inshrink_core.training.gradients import GradientAverage, finite
from inshrink_core.training.spool import (
    GRADIENTS_NAME,
    OPTIMIZER_NAME,
    QuarantinedSave,
    Spool,
    SpooledSave,
    load_save,
    spool_folder,
)
from inshrink_core.training.staging import Staging, address
from inshrink_core.training.state import (
    Also,
    Optimizers,
    TrainingState,
    memory,
    parts_of,
    states_of,
    tensors_in,
)

if TYPE_CHECKING:
    from inshrink_core.training.check import Check, CheckedWriter

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)


class Saver:
    """Archives a PyTorch training, or checkpoints that another program writes, and restores it.

    Parameters
    ----------
    archive
        The archive, created if needed. Locked against other writers until `close`.
    model, optimizer
        Saved, and restored in place. Without an optimizer, only the model; without a model, only folders
        and files (`save_folder`, `save_files`). Several optimizers are a list. Wrappers
        (DistributedDataParallel, torch.compile) may differ between save and restore.
    codec, config
        How weights are stored; by default as in the archive, else the default codec.
    optimizer_state
        How the optimizer is stored (`inshrink_core.chain.ChainConfig`). By default as in the archive,
        else compressed: training continues from a restore, but not bit for bit. ``exact`` keeps every
        bit; ``drop`` omits it, so that it starts anew after a restore.
    keyframe_every
        Frames from one keyframe to the next.
    device
        Where frames are encoded, as torch names it; ``auto`` is CUDA if available. Does not change the
        bytes.
    threads
        Tensors encoded at a time during training; by default one.
    check
        ``check(model)`` returns the loss on a fixed small batch, a number; or a dict of ``loss`` and
        ``log_probs`` (n, classes) or ``predictions``. Each save is decoded and evaluated during training,
        on a copy of the model in eval mode. It is written as coarsely as `max_restore_cost` allows, or
        exactly. The check must not draw random numbers or have side effects.
    max_restore_cost
        Bound of the restore cost of every save: the expected relative rise of the checked loss; by default
        `DEFAULT_MAX_RESTORE_COST`.
    check_every
        Check every n-th save; saves between use the settings of the last one checked.
    step_writer
        Writes each save, on the saver's thread; by default determined by `codec`, `config` and `check`.
    base
        The model that a fine-tuning begins from, a file or a state dict, which is copied
        (`inshrink_core.chain.open_base`). The archive's first frame is encoded relative to it. Needed again
        to open the archive, unless it is found at its recorded path.
    also
        Further models, optimizers or pairs of them, by name: ``{"ema": average, "D": (net, optimizer)}``.
        They are stored like `model` and `optimizer`, ``ema.fc.weight`` beside ``fc.weight``, and restored
        in place.
    retention
        Which steps stay; applied after every eighth save and at `close`. `keep_best` uses numbers in a
        save's `extra`, or in the dict ``metrics`` in it.

    Attributes
    ----------
    path
        The archive's path or URL.
    last_step
        The step of the last save or restore, or the archive's last; None if there is none.
    extra
        The `extra` of the step restored last.

    Raises
    ------
    LockedError
        Another process is writing the archive, or another saver of this process that is in use: inside its
        ``with`` statement or in another thread. An unclosed saver of this thread is taken over.

    Notes
    -----
    `save` writes one torch file into ``ARCHIVE.spool``, waits until it is durable, and returns; a
    background thread turns it into a frame and removes it. The save then survives the death of the process
    and a power loss: the next saver of the archive archives what is left. At most two saves wait; a third
    `save` blocks.

    A save that cannot be spooled raises at once, and training can continue. Later errors, on the thread, are
    logged and listed in `failures`. If the disk or the archive refuses, the save waits in the spool and each
    later call tries again. If the save itself is at fault, its files are `quarantined` and later saves
    continue; after three in a row the fourth waits, too. `flush` and `close` raise if a save is not in
    the archive, and so does a `save` behind two that wait.

    `restore` sets the lineage: the next save continues from the restored frame, on a new branch if later
    steps exist, and the codec gets the values that training continued from.

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
        self._state = TrainingState(model, optimizer, also)
        self._gradients = GradientAverage(self._state.parameters())
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
        """The archive's last frame, if training would continue from it and it is missing."""

    def _open_writer(self) -> ArchiveWriter:
        """Open the archive for writing; an unused saver of this process releases it."""
        self._used_in, self._process = weakref.ref(threading.current_thread()), os.getpid()
        try:
            writer = ArchiveWriter(self.path, create=True)
        except LockedError:
            before = _HOLDING.get(_identity(self.path))
            if before is None or before._process != self._process:
                raise
            before._yield_lock()
            writer = ArchiveWriter(self.path, create=True)
        _HOLDING[_identity(self.path)] = self
        return writer

    def _yield_lock(self) -> None:
        """Close for another saver of this process, unless this one is in use.

        It is in use inside its ``with`` statement, and while another living thread used it last. A notebook
        cell that runs again makes a new saver while a variable or a traceback still refers to the first.
        """
        thread = self._used_in()
        if thread is not None and (thread is threading.current_thread() or not thread.is_alive()):
            thread = None
        if self._entered or thread is not None:
            place = "its `with` statement" if thread is None else f"thread '{thread.name}'"
            raise LockedError(
                f"a saver of this process is writing this archive, in {place}",
                where=str(self.path),
                remedy="close that one first, or give each training an archive of its own",
            )
        self._taken_over = True
        try:
            self.close()
        except Exception as error:  # the next saver finds the save in the spool
            _logger.warning("a save is not archived yet and waits in the spool: %s", error)

    @property
    def is_usable_here(self) -> bool:
        """Whether this process opened the archive; false in a forked child."""
        return self._process == os.getpid()

    def _use(self) -> None:
        """Record which thread uses the saver.

        Raises
        ------
        LockedError
            A later saver has taken over, or the saver belongs to the parent process.
        InputError
            The saver is closed.
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
                remedy="use that one; the saves of this one are archived",
            )
        if not self._finalizer.alive:
            raise InputError("the saver is closed", where=str(self.path))
        self._used_in = weakref.ref(threading.current_thread())

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
    def quarantined(self) -> tuple[QuarantinedSave, ...]:
        """The saves that could not be archived, with their folders and reasons; of earlier processes, too."""
        return self._spool.quarantined_saves

    @property
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step, including those behind a refused one."""
        found = self._archiver.failures
        behind = self._archiver.pending if found else ()
        return dict.fromkeys(behind, "it waits in the spool behind an earlier save") | found

    @property
    def check_failures(self) -> Mapping[int, str]:
        """Why saves could not be checked, by step; these are stored exactly."""
        return {} if self._checked is None else dict(self._checked.failures)

    def check_with(self, model: nn.Module, check: Check, max_restore_cost: float | None = None) -> None:
        """Check every save from now on, and bound its restore cost.

        Parameters
        ----------
        model
            The model in training; a copy of it is evaluated.
        check, max_restore_cost
            As for the saver.

        Raises
        ------
        ConfigError
            The codec has no tunable parameter.
        EvaluatorError
            The model cannot be copied, or the check fails.
        """
        from inshrink_core.training.check import CheckedWriter

        resumed = self.last_step is not None
        checked = CheckedWriter.beside(model, check, self._config, max_restore_cost, resumed=resumed)
        with contextlib.suppress(Exception):  # refused saves wait in the spool
            self._drain()
        self._archiver.write_with(checked)
        self._checked = checked

    def record(self) -> None:
        """Add this batch's gradients to their average; call it after ``backward``.

        Codecs may read the average as a sensitivity (``taylor``); without it they read the optimizer's first
        moment. Costs one pass over the gradients.
        """
        self._gradients.record()

    def save(self, step: int, extra: Mapping[str, Any] | None = None, *, wait: bool = True) -> None:
        """Save model and optimizer.

        Parameters
        ----------
        step
            The training step; greater than that of the last save or restore.
        extra
            Everything else that training needs to continue: numbers, strings, tensors, NumPy arrays, and
            lists and dicts of them, such as the state of a scheduler or a generator. Stored bit for bit.
        wait
            Whether the save is durable when this returns. If not, it is copied while training continues,
            and the optimizer's next step waits for the copy: until then only the optimizer may change
            parameters and state. The next `save`, `flush`, `restore` or `close` raises errors.

        Raises
        ------
        StepConflictError
            The step is not after the last one.
        MissingFrameError
            The file of the archive's last frame is missing, and no other step was restored.
        InputError
            `extra` has an unsupported value, or model or optimizer have a value that could not be read
            back. Nothing is saved.
        StorageError
            The disk is full. Training can continue without this save.
        InshrinkError
            Two earlier saves wait in the spool and cannot be archived.

        Notes
        -----
        Blocks while the checkpoint is written to the disk, and while two saves are pending. Without `wait`,
        buffers are copied at once, and a thread copies parameters and optimizer state and writes them; host
        memory has one copy of all. The save survives the process only after that.
        """
        self._require_models()
        self._use()
        self._staging.finish()
        self._require_next(step)
        files = self._files(step, extra)
        metrics = (extra or {}).get("metrics")
        measured = {**(extra or {}), **(metrics if isinstance(metrics, Mapping) else {})}
        self._archiver.wait_for_room()
        gradients = self._gradients.take()
        about: dict[str, Any] = {
            "restored": self._restored,
            "parent": self._parent,
            "metrics": metrics_of(self._retention, measured),
            "apart": self._is_apart and bool(self._state.optimizers),
        }

        def spool(files: Mapping[str, Any]) -> None:
            recorded = finite(gradients)
            files = {**files, GRADIENTS_NAME: recorded} if recorded else files
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
        """Archive a finished checkpoint, a folder or a file, that another program has written.

        Parameters
        ----------
        path
            The checkpoint. It may be deleted when this returns; it must not be written again in place.
        step
            Its training step; greater than that of the last save.
        parameters
            Names of the optimizers' parameters (`inshrink_core.training.recorded.record_of`), if known;
            otherwise optimizer state is matched by its order.
        metrics
            Metrics of the step, by name. Those that `retention` uses are stored.

        Raises
        ------
        InshrinkError
            As `save`.

        Notes
        -----
        Makes hard links to the files and returns: 0.3 ms for a folder of Hugging Face's trainer. The save
        then survives the process, and a power loss after the thread has synced it.
        """
        self._spool_next(
            step, metrics, lambda **about: self._spool.link(step, Path(path), parameters=parameters, **about)
        )

    def save_files(
        self, files: Mapping[str, Any], step: int, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Archive a checkpoint of several files.

        Parameters
        ----------
        files
            Content by file name: bytes, or an object for `torch.save`.
        step, metrics
            As for `save_folder`.

        Raises
        ------
        InshrinkError
            As `save`.
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
                remedy="to resume from an earlier step, restore that step first",
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
        """Whether optimizer state is archived as a separate file, so that it can be dropped later."""
        policy = self._retention
        return policy is not None and policy.optimizer_last is not None and self._config.optimizer != "drop"

    def _files(self, step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the files of a save, by name."""
        # Omitted from the file, not only from the archive: a file with holes cannot be restored.
        is_dropped = self._config.optimizer == "drop" or self._is_apart
        content = self._state.content(optimizers=not is_dropped)
        beside = self._state.content(models=False) if is_dropped and self._state.optimizers else {}
        storages: set[int] = set()

        def is_shared(tensor: Tensor) -> bool:
            # torch.save stores shared memory once, so the tensor would get the error of the weights.
            if not storages:
                storages.update(map(memory, tensors_in([content, beside])))
            return memory(tensor) in storages

        values, kinds = pack(extra, is_shared)
        content |= {"step": step, **({"extra": values} if values else {})}
        content[SAVE_KEY]["values"] = kinds
        return {"checkpoint": content, **({OPTIMIZER_NAME: beside} if beside else {})}

    def _settled(self, files: Mapping[str, Any]) -> frozenset[int]:
        """Return the `id` of all values that only optimizers change; their next steps wait for a copy."""
        optimizers = [optimizer for group in self._state.optimizers.values() for optimizer in group]
        if not self._hooks:
            self._hooks = [each.register_step_pre_hook(self._staging.wait_for_copy) for each in optimizers]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = {address(parameter) for group in groups for parameter in group["params"]}
        return frozenset(
            id(value)
            for content in files.values()
            for part in parts_of(content)
            for value in [
                *(tensor for tensor in part.get("model", {}).values() if address(tensor) in trained - {0}),
                *(state["state"] for state in states_of(part)),
            ]
        )

    def before_step(self) -> None:
        """Wait for the copy of a save without `wait`, where no optimizer hook does.

        Call it before parameters change by anything but the optimizer's ``step``: a replayed CUDA graph, or
        weights set by hand.
        """
        self._staging.wait_for_copy()

    def resume(self, step: int, folder: str | os.PathLike[str] | None = None) -> None:
        """Set where training continues after another program restored it; the next save follows that step.

        Parameters
        ----------
        step
            The step that training has reached; 0 for a new training.
        folder
            The checkpoint that was loaded. If it was restored from this archive, the codec gets the values
            that training continues from.

        Raises
        ------
        StepConflictError
            The archive has later steps, but not this one.
        MissingFrameError
            The frame to continue from is missing.
        LockedError
            A later saver of this process has taken over.
        """
        self._use()
        with contextlib.suppress(Exception):  # refused saves wait in the spool
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
        """Set the frame that training continues from; the next save follows it."""
        self._restored = self._parent = frame.frame_id
        self.last_step, self._lost = frame.step, None

    def restore(self, step: int | None = None, *, partial: Iterable[str] | None = None) -> int | None:
        """Load model and optimizer from the archive, in place; pending saves are archived first.

        Parameters
        ----------
        step
            The step; by default the last one.
        partial
            Names of the tensors that were lost while the others are still in memory; those of a further
            model begin with its name, ``D.fc.weight``. Only these are loaded, with their optimizer state,
            and training continues at its current step (SCAR: Qiao et al., ICML 2019, section 4).

        Returns
        -------
        int or None
            The step restored; None if the archive is empty, and nothing changed. `extra` has what was saved
            beside the models.

        Raises
        ------
        NotFoundError
            The archive has no such step.
        MissingFrameError
            The file of the step is missing.
        InputError
            Model or optimizer do not match those saved, or `partial` has an unknown name; nothing changed.
        BaseModelError
            The base model is missing or another one; nothing changed.
        """
        self._require_models()
        names = None if partial is None else self._state.known_names(partial)
        self._drain()
        reader = self._archiver.reader
        info = reader.head if step is None else reader.find(step)
        if info is None:
            return None
        content = self._read(info)
        self._state.require_same(content, f"{self.path}, step {info.step}")
        if names is not None:
            self._state.load_lost(content, names)
        else:
            self._state.load(content)
            self.extra = content["extra"]
            self.resume_from(info)
        self._gradients.forget()
        return info.step

    def read(self, step: int) -> dict[str, Any]:
        """Return the contents of a save: ``model``, ``optimizer``, ``step``, ``also`` and ``extra``.

        Raises
        ------
        NotFoundError, MissingFrameError, InputError, BaseModelError
            As `restore`.
        """
        self._drain()
        return self._read(self._archiver.reader.find(step))

    def _read(self, info: FrameInfo) -> dict[str, Any]:
        """Return the contents of a frame's file."""
        reader, where = self._archiver.reader, f"{self.path}, step {info.step}"
        archive = Archive(reader, bases=BaseFinder(reader.path, self._base, open_base_at))
        checkpoint, content = archive.checkpoint(info), None
        if {file.kind for file in checkpoint.files} == {"torch"} and len(checkpoint.files) <= 2:
            # Beside the archive, which has room for a checkpoint; /tmp may be too small.
            near = spool_folder(self.path).absolute().parent
            with (
                storage_errors("the step cannot be restored", str(self.path)),
                working_folder(near) as folder,
            ):
                files = write_checkpoint(checkpoint, folder)
                content = _joined({file.name: _loaded(file, where) for file in files})
        dropped = dropped_of(archive.frame(info))
        if isinstance(content, dict) and isinstance(content.get("model"), dict):
            if dropped:
                _logger.warning("the optimizer's state of step %s was pruned: it begins anew", info.step)
            return _as_saved(content)
        if dropped:
            raise InputError(
                "the optimizer's state of this step was pruned, and with it the file that held all",
                where=where,
                remedy="its weights are left: inshrink_core.verbs.load_state_dict(archive, step)",
            )
        raise InputError(
            "this step was not written by a saver",
            where=where,
            remedy="write it to a file with `inshrink restore`, and load that",
        )

    def flush(self, *, remote: bool = False) -> None:
        """Wait until every save is archived.

        Parameters
        ----------
        remote
            For an archive in a bucket, also wait for the uploads. Otherwise the last frames may be only on
            this machine's disk.

        Raises
        ------
        InshrinkError
            A save could not be archived.
        """
        self._drain()
        self._archiver.require_archived()
        if remote:
            self.upload()

    def upload(self) -> None:
        """Wait until the frames of an archive in a bucket are uploaded; pending saves are not."""
        self._archiver.upload()

    def _drain(self) -> None:
        """Wait until no save is pending."""
        self._use()
        self._staging.finish()
        self._archiver.flush()

    def close(self) -> None:
        """Archive pending saves and release the archive; may be repeated.

        Raises
        ------
        InshrinkError
            A save could not be archived. It stays in the spool for the next saver, or was quarantined.
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
"""The saver that opened an archive last in this process, by the identity of the archive's folder."""


def _identity(archive: Path | str) -> str | tuple[int, int]:
    if isinstance(archive, str):
        return archive.rstrip("/")
    found = archive.stat()
    return found.st_dev, found.st_ino


def _loaded(file: Path, where: str) -> Any:
    try:
        return load_save(file)
    except pickle.UnpicklingError as error:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        raise InputError(
            "the save holds classes that torch.load does not know",
            where=where,
            found=named(sorted(unknown)),
            remedy="import what defines them, such as torchao.optim, before you restore",
        ) from error


def _joined(contents: Mapping[str, Any]) -> Any:
    """Return the contents of a save, with the optimizers that are in a separate file."""
    optimizers = contents.get(OPTIMIZER_NAME)
    models = [content for name, content in contents.items() if name != OPTIMIZER_NAME]
    if len(models) != 1 or not isinstance(optimizers, dict) or not isinstance(models[0], dict):
        return models[0] if len(models) == 1 and optimizers is None else None
    joined = {**models[0], "also": {name: dict(part) for name, part in models[0].get("also", {}).items()}}
    for name, part in {"": optimizers, **optimizers.get("also", {})}.items():
        if "optimizer" in part:
            (joined if not name else joined["also"].setdefault(name, {}))["optimizer"] = part["optimizer"]
    return joined


def _as_saved(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a file as `Saver.read` does; of another writer, the rest is `extra`."""
    record = content.get(SAVE_KEY)
    known = {key: content[key] for key in ("model", "optimizer", "step") if key in content}
    if not isinstance(record, dict):
        return {**known, "extra": {key: value for key, value in content.items() if key not in known}}
    return {
        **known,
        "also": content.get("also", {}),
        "extra": unpack(content.get("extra", {}), record.get("values", {})),
    }
