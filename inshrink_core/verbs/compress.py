"""Compressing a run: which steps are there already, which are written, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from inshrink_core.archive import MAX_SMALL_FILES, ArchiveWriter, is_archive
from inshrink_core.chain import (
    Archive,
    ArchiveSize,
    ChainWriter,
    FrameEncoder,
    OriginalChecks,
    archive_size,
    content_digest,
    open_base,
    optimizer_of,
    original_checks,
    stored_view,
    tensor_digest,
)
from inshrink_core.chain.base import require_base_codec
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.errors import DamagedError, InputError, StepConflictError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.formats import Run, open_run
from inshrink_core.report import Report, plain_value
from inshrink_core.search.bounded import AsConfigured, BoundedWriter, StepWriter, open_bounded
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds
from inshrink_core.search.search import choose_steps

if TYPE_CHECKING:
    import os

    from inshrink_core.chain import BaseLike, BaseModel
    from inshrink_core.checkpoint import Checkpoint, TensorSpec
    from inshrink_core.codec import AnyCodec
    from inshrink_core.errors import CheckFailedError
    from inshrink_core.formats import Skipped
    from inshrink_core.frame import FrameInfo
    from inshrink_core.search.bounded import Promise

__all__ = ["CompressReport", "compress"]


def compress(
    run: Run | str | os.PathLike[str],
    archive: str | os.PathLike[str],
    *,
    codec: str | None = None,
    config: Mapping[str, Any] | AnyCodec | None = None,
    optimizer: str | None = None,
    keyframe_every: int = 32,
    steps: Iterable[int] | None = None,
    resumed_from: int | None = None,
    max_drop: float | None = None,
    max_divergence: float | None = None,
    max_restore_cost: float | None = None,
    evaluator: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    trust_run: bool = False,
    timeout: float = 600.0,
    device: str = "auto",
    threads: int | None = None,
    allow_damaged: bool = False,
    look_ahead: bool = True,
    base: BaseLike | None = None,
    progress: OnProgress | None = None,
) -> CompressReport:
    """Write a run into an archive, appending the steps it does not hold yet.

    Parameters
    ----------
    run
        The run, or its path.
    archive
        The archive to create or append to.
    codec, config, optimizer
        How weights and optimizer state are stored (`inshrink_core.chain.ChainConfig`); by default as
        the archive was written so far, else `DEFAULT_CODEC` with its defaults and optimizer state
        compressed: ``optimizer="exact"`` restores it bit for bit.
    keyframe_every
        Frames from one keyframe to the next.
    steps
        The steps to write; by default all.
    resumed_from
        The archived step that training was restored from: the steps of `run` after it open a branch.
    max_drop, max_divergence, max_restore_cost
        Bounds on every restored step (`inshrink_core.verbs.Bounds`): each is then written with the smallest
        frame found that keeps them, or exactly if no smaller one does. Where an evaluator is given without
        bounds, a restore of any step costs at most `DEFAULT_MAX_RESTORE_COST`.
    evaluator, metric, direction, trust_run, timeout
        The evaluator of the bounds, as for `inshrink_core.compare`.
    device, threads
        Where and how many tensors at a time are encoded; neither changes the bytes.
    allow_damaged
        Archive files that do not match their own checksums, too; the archive will always say so.
    look_ahead
        Whether a new archive's codec may look at the whole run first, at some of the steps to be written, and
        plan for it. To be switched off where a run is written step by step as it grows.
    base
        The model that the training began from (`inshrink_core.chain.open_base`): the archive's first frame
        is told against it, and needs it to be decoded.
    progress
        Called after each tensor.

    Raises
    ------
    StepConflictError
        A step is in the archive with other values, and `resumed_from` does not say why.
    InputError
        The archive was written with another codec, or a step does not exist.
    BaseModelError
        `base` is another model, or not the one that the archive was begun with.
    RottenError
        A file does not match its own checksum, and `allow_damaged` is not set.
    RefusedLinkError
        Tensors lie behind a link out of the run (`inshrink_core.open` takes `follow_links`).
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or may not run. Steps committed before are kept.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:3])
    >>> report.appended == run.steps[:3]
    True
    """
    begun = time.perf_counter()
    opened = run if isinstance(run, Run) else open_run(run, allow_damaged=allow_damaged)
    if allow_damaged:
        opened = opened.allowing_damage()
    elif steps is None and opened.rotten:
        raise DamagedError(opened.rotten[0].reason, where=str(opened.path))
    asked_for = None if steps is None else tuple(steps)
    chosen = () if asked_for == () else choose_steps(opened, asked_for)
    chain_config = make_chain_config(archive, codec, config, optimizer, keyframe_every, device, threads)
    if resumed_from is not None:
        # Before the writer makes an archive: a branch needs one that is there.
        Archive.open(archive).reader.find(resumed_from)
    model = None if base is None else open_base(base)
    if model is not None:
        _check_base(model, archive, chain_config.config, [opened[step] for step in chosen[:1]])
    bounds = Bounds.promised(max_drop, max_divergence, max_restore_cost)
    if bounds is None and (evaluator is not None or trust_run):
        bounds = Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    bounded: BoundedWriter | None = None
    with ExitStack() as stack:
        if bounds is not None and chosen:
            asked = EvaluatorRequest(
                evaluator=evaluator, metric=metric, direction=direction, trust_run=trust_run, timeout=timeout
            )
            bounded = stack.enter_context(
                open_bounded(opened, chosen, chain_config, bounds, asked, resumed=is_archive(archive))
            )
        writer = stack.enter_context(
            ArchiveWriter(archive, create=True, grouped=len(chosen) > MAX_SMALL_FILES)
        )
        parent, branch = _branch_point(writer, resumed_from)
        chain = ChainWriter(writer, chain_config, parent=parent, branch=branch, restored=parent, base=model)
        if look_ahead and chain.parent is None:
            chain.foreseen = FrameEncoder(chain_config).look_ahead(chosen, opened.__getitem__)
        session = _Session(opened, writer, chain, resumed_from, progress, chosen, bounded)
        session.run_all()
        promise = None if bounded is None else bounded.promise
    finished = Archive.open(archive)
    error = (session.squared_error / session.squared_norm) ** 0.5 if session.squared_norm else None
    return CompressReport(
        path=Path(archive),
        size=archive_size(finished),
        appended=tuple(session.appended),
        skipped=tuple(session.skipped),
        seconds=time.perf_counter() - begun,
        raw_bytes_read=session.raw_bytes,
        relative_error=error if session.appended else None,
        codec=chain_config.codec,
        config=chain_config.config.settings(),
        optimizer=chain_config.optimizer,
        promise=promise,
        left_out=tuple(row for row in opened.skipped if row.link),
        originals=original_checks(finished, finished.frames),
        device=chain_config.device,
    )


class _Session:
    """The steps of one `compress`: which are there already, which are written, and how far it is."""

    def __init__(
        self,
        run: Run,
        writer: ArchiveWriter,
        chain: ChainWriter,
        resumed_from: int | None,
        progress: OnProgress | None,
        steps: Sequence[int],
        bounded: BoundedWriter | None = None,
    ) -> None:
        self._run, self._writer, self._chain, self._bounded = run, writer, chain, bounded
        self._step_writer: StepWriter = AsConfigured() if bounded is None else bounded
        self._resumed_from, self._progress, self._steps = resumed_from, progress, steps
        self._bytes_done = 0
        self._bytes_total = sum(run[step].raw_bytes() for step in steps) if progress else 0
        self.appended: list[int] = []
        self.skipped: list[int] = []
        self.raw_bytes = 0
        self.squared_error = self.squared_norm = 0.0

    def run_all(self) -> None:
        """Skip what is archived and append the rest, in step order.

        A step that is bit for bit what its frame decodes to was restored from there: what follows it
        continues from that frame.
        """
        archived = self._archived()
        known = dict(archived)
        missing = self._missing_steps()
        restored: FrameInfo | None = None
        for step in self._steps:
            checkpoint, info = self._run[step], archived.get(step)
            if self._resumed_from is not None and step <= self._resumed_from:
                self._pass(step, checkpoint)
                continue
            if info is None and step in missing:
                # Behind later frames it would be another history; the error names its file.
                self._writer.reader.find(step)
            if info is None and restored is None and self._was_pruned(step, archived):
                self._pass(step, checkpoint)
                continue
            if info is not None and self._is_equal(checkpoint, info):
                restored = None
                self._pass(step, checkpoint)
                continue
            if info is not None and self._is_decoded(checkpoint, info):
                restored = info
                self._pass(step, checkpoint)
                continue
            if restored is not None:
                self._continue_from(restored)
                archived, restored = {}, None
            elif info is not None:
                raise StepConflictError(
                    f"step {step} is in the archive already, with other values",
                    where=str(self._writer.reader.path),
                    remedy="if training was restored and went another way, say where: --resumed-from",
                )
            self._append(step, checkpoint)
        self._check_skipped(known)

    def _check_skipped(self, archived: Mapping[int, FrameInfo]) -> None:
        """Judge the steps that were there already: what is promised is promised of the chain."""
        view = self._chain.archive.sequential()
        for step in self.skipped:
            if self._bounded is not None and step in archived:
                self._bounded.check(view, archived[step])

    def _was_pruned(self, step: int, archived: Mapping[int, FrameInfo]) -> bool:
        """Whether a step that is not there was removed: it must not come back behind later ones."""
        return bool(archived) and step < max(archived) and bool(self._writer.manifest.tombstones)

    def _archived(self) -> dict[int, FrameInfo]:
        """Return the frame of each step of the line of training that this session continues."""
        parent = self._chain.parent
        if parent is None or self._resumed_from is not None:
            return {}
        return {frame.step: frame for frame in self._writer.reader.history(parent.frame_id)}

    def _missing_steps(self) -> frozenset[int]:
        """Return the steps of the same line whose files are missing."""
        if self._chain.parent is None or self._resumed_from is not None:
            return frozenset()
        reader = self._writer.reader
        there = {frame.frame_id for frame in reader.frames}
        line = reader.listed_history(self._chain.parent)
        return frozenset(frame.step for frame in line if frame.frame_id not in there)

    def _is_equal(self, checkpoint: Checkpoint, info: FrameInfo) -> bool:
        """Whether a frame was made from this checkpoint."""
        meta = self._writer.reader.frame(info.frame_id).meta
        view = stored_view(checkpoint, optimizer_of(meta))
        return content_digest(view) == meta.get("content")

    def _is_decoded(self, checkpoint: Checkpoint, info: FrameInfo) -> bool:
        """Whether a checkpoint is what a frame restores to: training went on from there."""
        restored = self._chain.archive.checkpoint(info)
        return all(
            spec.key in checkpoint
            and checkpoint.spec(spec.key) == spec
            and tensor_digest(checkpoint[spec.key]) == tensor_digest(restored[spec.key])
            for spec in restored.specs
        )

    def _continue_from(self, info: FrameInfo) -> None:
        """Write what follows as the continuation of a restored step; a branch, if others follow it."""
        self._chain = ChainWriter(
            self._writer, self._chain.config, parent=info, restored=info, base=self._chain.base
        )

    def _pass(self, step: int, checkpoint: Checkpoint) -> None:
        """Count a step that needs no writing."""
        self.skipped.append(step)
        self._bytes_done += checkpoint.raw_bytes()

    def _append(self, step: int, checkpoint: Checkpoint) -> None:
        """Write one step."""
        begun_at = self._bytes_done

        def done(spec: TensorSpec) -> None:
            self._bytes_done += spec.nbytes
            if self._progress is not None:
                self._progress(Progress("compress", self._bytes_done, self._bytes_total, step, spec.key))

        appended = self._step_writer.append(self._chain, checkpoint, done)
        self._bytes_done = begun_at + checkpoint.raw_bytes()
        self.appended.append(step)
        self.raw_bytes += stored_view(checkpoint, self._chain.config.optimizer).raw_bytes()
        self.squared_error += appended.squared_error
        self.squared_norm += appended.squared_norm


def _check_base(
    model: BaseModel, archive: str | os.PathLike[str], codec: AnyCodec, first: Iterable[Checkpoint]
) -> None:
    """Refuse a base model that the first frame cannot be told against, before there is an archive."""
    require_base_codec(codec)
    known = Archive.open(archive) if is_archive(archive) else None
    if known is None or not known.reader.listed:
        for checkpoint in first:
            model.references(checkpoint.specs)
        return
    records = [record for info in known.reader.frames if (record := known.base_of(info)) is not None]
    if not records:
        raise InputError(
            "the archive was begun without a base model, or stands alone by now",
            where=str(archive),
            remedy="leave out --base, or write to another archive",
        )
    for record in records:
        model.require(record, str(archive))


def _branch_point(writer: ArchiveWriter, resumed_from: int | None) -> tuple[FrameInfo | None, int | None]:
    """Return the frame to continue from and the branch to write, (None, None) for the head's own."""
    if resumed_from is None:
        return None, None
    parent = writer.reader.find(resumed_from)
    return parent, writer.reader.next_branch


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressReport(Report):
    """What `compress` did, and what the archive holds now.

    Parameters
    ----------
    path
        The archive.
    size
        Sizes over the head's history, steps archived earlier included.
    appended, skipped
        Steps written now, and steps that were there already.
    seconds
        Wall time.
    raw_bytes_read
        Raw bytes of the steps written now.
    relative_error
        Root of squared error over squared norm of the weights written now; None if none were.
    codec, config
        What the weights were written with; under bounds, where the search began.
    optimizer
        How optimizer state was stored (`inshrink_core.chain.ChainConfig`).
    promise
        What was promised of every restored step, and how each keeps it; None where nothing was.
    left_out
        What of the run was not read, and why.
    originals
        What is known of the checksums of the original files.
    device
        Where the steps were encoded.
    """

    path: Path
    size: ArchiveSize
    appended: tuple[int, ...]
    skipped: tuple[int, ...]
    seconds: float
    raw_bytes_read: int
    relative_error: float | None
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    promise: Promise | None = None
    left_out: tuple[Skipped, ...] = ()
    originals: OriginalChecks = field(default_factory=OriginalChecks)
    device: str = "cpu"

    DOCUMENT: ClassVar = (
        "archive=path codec config optimizer roles ratio_total=size.ratio_total "
        "ratio_weights=size.ratio_weights bits_per_weight=size.bits_per_weight raw_bytes=size.raw_total "
        "archive_bytes=size.nbytes relative_error seconds mb_per_s device "
        "appended skipped left_out originals frames"
    )

    @property
    def failure(self) -> CheckFailedError | None:
        """Why the chain does not keep what was promised; None where it does, or nothing was."""
        return None if self.promise is None else self.promise.failure(self.path)

    @property
    def mb_per_s(self) -> float | None:
        """Raw megabytes (10^6 bytes) written per second; None where nothing was."""
        return self.raw_bytes_read / 1e6 / self.seconds if self.appended and self.seconds else None

    @property
    def roles(self) -> list[str]:
        """Roles of the tensors in the archive, sorted."""
        return sorted({row.spec.role.value for frame in self.size.frames for row in frame.tensors})

    @property
    def frames(self) -> list[dict[str, Any]]:
        """A row a frame, with how it keeps what was promised."""
        return [
            {
                "step": frame.info.step,
                "kind": frame.info.kind.value,
                "bytes": frame.info.nbytes,
                "ratio_total": frame.ratio_total,
                "ratio_weights": frame.ratio_weights,
                **({} if self.promise is None else self.promise.step_json(frame.info.step)),
            }
            for frame in self.size.frames
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --json``."""
        promised = {} if self.promise is None else self.promise.to_json()
        left_out = [f"{row.path}: {row.reason}" for row in self.left_out]
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        return promised | base | Report.to_json(self) | {"left_out": left_out}
