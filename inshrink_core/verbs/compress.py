"""Compressing a run: which steps are there already, which are written, and what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.checkpoint import Unseen
from inshrink_core.errors import (
    DamagedError,
    InputError,
    MissingFrameError,
    NotFoundError,
    StepConflictError,
    StorageError,
    named,
)
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution import recycling
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.report import Report, plain_value
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import (
    UNKNOWN,
    count,
    counted,
    duration,
    error_size,
    plain,
    rate,
    ratio,
    size,
    steps_in_short,
)
from inshrink_core.verbs.shared.groups import (
    AnyBase,
    Bounding,
    ChainChoice,
    Computing,
    OnEngine,
    PathLike,
    Reading,
    RunLike,
    Sparing,
    Steps,
    Writing,
    steps_of,
)
from inshrink_core.verbs.shared.measured import (
    EvaluatorId,
    Measurements,
    compared_document,
    question_of,
)
from inshrink_core.verbs.shared.showing import (
    base_text,
    counted_fates,
    fates_text,
    large_errors_text,
    named_ratio,
    optimizer_text,
    promised_facts,
    rows_in_short,
    show_facts,
    show_unreadable,
)

if TYPE_CHECKING:
    import os

    from rich.console import Console

    from inshrink_core.archive import ArchiveWriter
    from inshrink_core.chain import Archive, ArchiveSize, BaseModel, ChainWriter, OriginalChecks
    from inshrink_core.chain.config import LargeError
    from inshrink_core.chain.report import PredictedCost
    from inshrink_core.checkpoint import Checkpoint, TensorSpec
    from inshrink_core.codec import AnyCodec
    from inshrink_core.errors import CheckFailedError
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo
    from inshrink_core.search.bounded import BoundedWriter, StepWriter
    from inshrink_core.search.judge import Judged
    from inshrink_core.search.promise import Promise

__all__ = ["Compress", "CompressReport", "Compressing", "compress"]


@dataclass(frozen=True)
class Compressing(Writing, Bounding, EvaluatorRequest, Computing, Reading, Sparing):
    """How a run is written into an archive, once or as it grows.

    Parameters
    ----------
    run
        A run: a directory, a glob or a checkpoint file.
    archive
        The archive to make or to append to.
    coarseness
        Of the lattice codec, about 0.25 to 10: more is smaller and less exact; by default 0.5.
    bins
        Of the inshrinkerator codec: centroids of each tensor; by default 32.
    prune
        Of the inshrinkerator codec: fraction of each layer type set to zero.
    protect
        Of the inshrinkerator codec: fraction kept in bfloat16.
    resumed_from
        The archived step that training was restored from: the steps after it open a branch there.
    base
        Of a fine-tuning, the model it began from: the first frame is encoded relative to it, and is restored
        with it alone.
    allow_damaged
        Archive files that do not match their own checksums, too; the archive will always say so.
    """

    run: RunLike
    archive: Annotated[PathLike, Option(("--output", "-o"), metavar="ARCHIVE")]
    _: KW_ONLY
    coarseness: float | None = None
    bins: int | None = None
    prune: float | None = None
    protect: float | None = None
    resumed_from: Annotated[int | None, Option(metavar="STEP")] = None
    base: Annotated[AnyBase | None, Option(metavar="FILE|DIRECTORY|ARCHIVE@STEP")] = None
    allow_damaged: bool = False

    @property
    def reading(self) -> dict[str, Any]:
        """How the run is opened."""
        return super().reading | {"allow_damaged": self.allow_damaged}

    def chosen(self, **named: Any) -> ChainChoice:
        """Return how frames are written; a setting with an option of its own names its codec."""
        from inshrink_core.codec import codec_with

        own = {name: getattr(self, name) for name in _SHORTHANDS}
        given = {name: value for name, value in own.items() if value is not None}
        choice = super().chosen(**given, **named)
        return choice if choice.codec else choice._replace(codec=codec_with(given))


_SHORTHANDS: Final = ("coarseness", "bins", "prune", "protect")


@dataclass(frozen=True)
class Compress(Compressing, OnEngine, Request["CompressReport"]):
    """Write a run into an archive: the steps it does not hold yet.

    Parameters
    ----------
    steps
        The steps to write: a step, a list 100,200, or a range FIRST:LAST[:EVERY], both ends included; may be
        repeated; by default all.
    part
        Write one part of each step, beside other processes that write the others: I/N, or auto for what
        torchrun or Slurm tell this process.
    look_ahead
        Whether a new archive's codec may look at the whole run first, at some of the steps to be written, and
        plan for it. To be switched off where a run is written step by step as it grows.

    Raises
    ------
    StepConflictError
        A step is in the archive with other values, and `resumed_from` does not say why.
    InputError
        The archive was written with another codec, or a step does not exist.
    BaseModelError
        `base` is another model, or not the one that the archive was begun with.
    UnreadableError
        Checkpoints of the run cannot be read: they are damaged, or do not match their own checksums. All
        others are archived, and its `report` is what is returned otherwise. UnreadableStepError where
        `steps` has the step of one.
    RefusedLinkError
        Tensors lie behind a link out of the run, and `follow_links` is not set.
    EvaluatorError, UntrustedCodeError
        The evaluator failed, or may not run. Steps committed before are kept.

    Notes
    -----
    What is not said of codec, settings and optimizer is as the archive was written so far
    (`inshrink_core.chain.ChainConfig`). Under bounds (`inshrink_core.verbs.Bounds`) each step is written with
    the smallest frame found that keeps them, or exactly if no smaller one does.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> target = pathlib.Path(tempfile.mkdtemp()) / "digits.inshrink"
    >>> report = inshrink_core.compress(run, target, steps=run.steps[:3])
    >>> report.appended == run.steps[:3]
    True
    """

    steps: Steps = None
    part: Annotated[str | None, Option(("--part",), metavar="I/N|auto")] = None
    look_ahead: Annotated[bool, Option(hidden=True)] = True

    EXAMPLES: ClassVar = (
        "inshrink compress runs/digits -o digits.inshrink --coarseness 4",
        "inshrink compress runs/digits -o middle.inshrink --steps 100:500 --codec inshrinkerator --bins 16",
        "inshrink compress runs/digits -o bounded.inshrink --max-drop 0.01 --evaluator judge.py:evaluate",
        "inshrink compress runs/tuned -o tuned.inshrink --base models/pretrained.safetensors",
    )
    INTERRUPTED: ClassVar = "committed steps are kept, and the same command continues"
    MODES: ClassVar = ("inshrink_core.verbs.modes.watch:Watch",)
    THREADED: ClassVar = True

    def perform_part(self) -> Any:
        """Write one part, and commit nothing."""
        from inshrink_core.chain.parts import Share
        from inshrink_core.verbs.modes.parts import write_part

        return write_part(self, Share.parse(str(self.part)))

    def write_branches(self) -> tuple[str, ...]:
        """Append the branches of a run to an archive that holds its steps; return their names."""
        from inshrink_core.archive import ArchiveWriter
        from inshrink_core.chain import ChainWriter
        from inshrink_core.codec import FALLBACK_CODEC, get_codec

        run = self.opened_run(self.run)
        if not run.branches:
            return ()
        run = run.attributed(_archived_last(self.archive))
        with ArchiveWriter(self.archive) as writer:
            config = self.chain_config(self.archive, device=self.device, threads=self.threads)
            if self.promised() is not None or self.evaluator is not None:
                config = config.made_exact(config.config.made_exact() or get_codec(FALLBACK_CODEC)())
            session = _Session(run, writer, ChainWriter(writer, config), None, None, ())
            session.write_branches()
        return tuple(session.branches)

    def perform(self) -> CompressReport:
        """Write what is not there."""
        if self.part is not None or self.is_shared_out:
            from inshrink_core.verbs.modes.parts import compress_in_parts

            return CompressReport(**compress_in_parts(self))
        from inshrink_core.archive import MAX_SMALL_FILES, ArchiveWriter, is_archive
        from inshrink_core.archive.storage.registry import place_of
        from inshrink_core.chain import (
            Archive,
            ChainWriter,
            FrameEncoder,
            archive_size,
            open_base,
            original_checks,
        )
        from inshrink_core.chain.report import predicted_cost
        from inshrink_core.search.bounded import open_bounded
        from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds

        begun = time.perf_counter()
        opened = self.opened_run(self.run)
        if self.allow_damaged:
            opened = opened.allowing_damage()
        opened = opened.attributed(_archived_last(self.archive))
        asked = steps_of(opened, self.steps)
        chosen = _chosen(opened, asked)
        chain_config = self.chain_config(self.archive, device=self.device, threads=self.threads)
        if self.resumed_from is not None:
            # Before the writer makes an archive: a branch needs one that is there.
            Archive.open(self.archive).reader.find(self.resumed_from)
        model = None if self.base is None else open_base(self.base)
        if model is not None:
            _check_base(model, self.archive, chain_config.config, [opened[step] for step in chosen[:1]])
        bounds = self.promised()
        if bounds is None and (self.evaluator is not None or self.trust_run):
            bounds = Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
        bounded: BoundedWriter | None = None
        if bounds is not None:
            # The evaluator sees every step beside its neighbours, so all of them must be there.
            opened = opened.readable(chosen)
            chosen = tuple(step for step in chosen if step in opened)
            chain_config = chain_config.as_set()
        with ExitStack() as stack:
            stack.enter_context(recycling())  # the next frame takes the memory of the one before
            if bounds is not None and chosen:
                resumed = is_archive(self.archive)
                bounded = stack.enter_context(
                    open_bounded(opened, chosen, chain_config, bounds, self, resumed=resumed)
                )
            writer = stack.enter_context(
                ArchiveWriter(self.archive, create=True, grouped=len(chosen) > MAX_SMALL_FILES)
            )
            parent, branch = _branch_point(writer, self.resumed_from)
            chain = ChainWriter(
                writer, chain_config, parent=parent, branch=branch, restored=parent, base=model
            )
            if self.look_ahead and chain.parent is None:
                chain.initial_memory = FrameEncoder(chain_config).look_ahead(chosen, opened.__getitem__)
            session = _Session(opened, writer, chain, self.resumed_from, self.progress, chosen, bounded)
            session.run_all()
            promise = None if bounded is None else bounded.promise
            judged = None if bounded is None else bounded.judged()
            if asked is None:
                session.write_branches()
            if writer.storage.facts is not None:
                sizes = archive_size(Archive(writer.reader))
                writer.storage.facts |= {
                    "checkpoints": size(sizes.raw_total),
                    "ratio of everything": ratio(sizes.ratio_total),
                    "ratio of the weights": ratio(sizes.ratio_weights),
                    "codec": chain_config.codec,
                }
        finished = Archive.open(self.archive)
        error = (session.squared_error / session.squared_norm) ** 0.5 if session.squared_norm else None
        report = CompressReport(
            path=place_of(self.archive),
            size=archive_size(finished),
            appended=tuple(session.appended),
            skipped=tuple(session.skipped),
            branches=tuple(session.branches),
            seconds=time.perf_counter() - begun,
            raw_bytes_read=session.raw_bytes,
            relative_error=error if session.appended else None,
            large_errors=tuple(session.large_errors),
            codec=chain_config.codec,
            config=chain_config.config.settings(),
            optimizer=chain_config.optimizer,
            promise=promise,
            predicted=predicted_cost(finished),
            unreadable=session.run.unreadable,
            left_out=tuple(row for row in session.run.skipped if not row.unreadable),
            fates=counted_fates(session.run, finished.listed_steps, skip_damaged=self.skip_damaged),
            originals=original_checks(finished, finished.frames),
            unseen=Unseen.of(layout for step in chosen for layout in opened[step].files),
            device=chain_config.device,
        )
        if judged is not None and judged.steps:
            keep_judged(finished, opened, judged)
        in_vain = None if asked is None else set(asked) - set(session.run.steps)
        failure = self.failure(report.unreadable, opened.address, in_vain)
        if failure is not None:
            failure.report = report
            raise failure
        return report


compress = python_call(Compress)


def keep_judged(archive: Archive, run: Run, judged: Judged) -> None:
    """Keep what was measured of an archive while it was written, as a comparison of its steps."""
    steps = [row.step for row in judged.steps]
    question = question_of(
        EvaluatorId(judged.name, judged.digest), run, steps, dict(zip(steps, [None, *steps], strict=False))
    )
    about = judged.metric, judged.direction, archive.device
    document = compared_document(judged.steps, about, judged.n_samples, judged.standard_errors)
    Measurements.of_archive(archive, run.directory, make=True).add("compare", question, document)


def _chosen(run: Run, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the steps to write: all, or those asked for that can be read.

    Raises
    ------
    UnreadableStepError
        None of those can be.
    NotFoundError
        The run has nothing of one.
    """
    from inshrink_core.formats import unreadable_error
    from inshrink_core.search.search import choose_steps

    if not asked:
        return choose_steps(run, None) if asked is None else ()
    lost = {row.step for row in run.unreadable} - set(run.steps)
    readable = [step for step in asked if step not in lost]
    if not readable and (error := unreadable_error(run.unreadable, run.address, asked)):
        raise error
    return choose_steps(run, readable)


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
        from inshrink_core.search.bounded import AsConfigured

        self.run, self._writer, self._chain, self._bounded = run, writer, chain, bounded
        self._step_writer: StepWriter = AsConfigured() if bounded is None else bounded
        self._resumed_from, self._progress, self._steps = resumed_from, progress, steps
        self._bytes_done = 0
        self._bytes_total = sum(run[step].raw_bytes() for step in steps) if progress else 0
        self.appended: list[int] = []
        self.skipped: list[int] = []
        self.branches: list[str] = []
        self.raw_bytes = 0
        self.squared_error = self.squared_norm = 0.0
        self.large_errors: list[LargeError] = []
        self._held, self._missing = self._archived(), self._missing_steps()
        self._restored: FrameInfo | None = None

    def run_all(self) -> None:
        """Skip what is archived and append the rest, in step order, but for what cannot be read.

        A step that is bit for bit what its frame decodes to was restored from there: what follows it
        continues from that frame.
        """
        known = dict(self._held)
        for step in self._steps:
            begun_at = self._bytes_done
            try:
                self._take(step)
            except (DamagedError, NotFoundError, StorageError) as error:
                if self.run.is_elsewhere and isinstance(error, StorageError):
                    raise  # a network that is down is no damage: the same command goes on
                raw_bytes = self.run[step].raw_bytes()
                self.run = self.run.readable([step])
                if step in self.run:
                    raise
                self._bytes_done = begun_at + raw_bytes
        self.run.fetch(())
        self._check_skipped(known)

    def _take(self, step: int) -> None:
        """Append a step where it is missing."""
        checkpoint, info = self.run[step], self._held.get(step)
        if info is not None:
            checkpoint = self.run.as_archived(step, self._chain.archive.attributing(info))
        if self._resumed_from is not None and step <= self._resumed_from:
            self._pass(step, checkpoint)
            return
        if info is None and step in self._missing:
            # Behind later frames it would be another history; the error names its file.
            self._writer.reader.find(step)
        if info is None and self._restored is None and self._was_pruned(step, self._held):
            self._pass(step, checkpoint)
            return
        self.run.fetch([step, *self._steps[self._steps.index(step) + 1 :][:1]])
        if info is not None and self._is_equal(checkpoint, info):
            self._restored = None
            self._pass(step, checkpoint)
            return
        if info is not None and self._is_decoded(checkpoint, info):
            self._restored = info
            self._pass(step, checkpoint)
            return
        if self._restored is not None:
            self._continue_from(self._restored)
            self._held, self._restored = {}, None
        elif info is not None:
            raise self._conflict(checkpoint, info)
        self._append(step, checkpoint)

    def write_branches(self) -> None:
        """Append the checkpoints with names of their own, each upon the step that it belongs to."""
        from inshrink_core.chain import ChainWriter
        from inshrink_core.frame import NAMED_BRANCH

        reader, archive = self._writer.reader, self._chain.archive
        line, known = reader.history(), archive.branches
        for name, checkpoint in self.run.branches.items() if line else ():
            info = known.get(name)
            if info is not None and self._is_equal(checkpoint, info):
                continue
            parent = next((one for one in reversed(line) if one.step <= checkpoint.step), line[0])
            numbers = (one.branch for one in reader.listed if one.is_named)
            number = max(numbers, default=NAMED_BRANCH - 1) + 1 if info is None else info.branch
            chain = ChainWriter(
                self._writer, self._chain.config, parent=parent, branch=number, base=self._chain.base
            )
            try:
                if self._bounded is None:
                    chain.append(checkpoint)
                else:
                    self._bounded.append_exactly(chain, checkpoint, None, "it is no step")
            except (DamagedError, NotFoundError) as error:
                self.run = self.run.without_branch(name, error)
            else:
                self.branches.append(name)

    def _check_skipped(self, archived: Mapping[int, FrameInfo]) -> None:
        """Judge the steps that were there already: what is promised is promised of the chain."""
        view = self._chain.archive.sequential()
        for step in self.skipped:
            if self._bounded is not None and step in archived:
                self._bounded.check(view, archived[step])

    def _conflict(self, checkpoint: Checkpoint, info: FrameInfo) -> StepConflictError:
        """Return why a step that is archived with other values is not written."""
        now = {file.path for file in checkpoint.files}
        then = {file.path for file in self._chain.archive.checkpoint(info).files}
        if now and then and not now & then:
            return StepConflictError(
                f"step {info.step} is now another file than when it was archived",
                where=str(self._writer.reader.path),
                expected=named(sorted(then)),
                found=named(sorted(now)),
                remedy="new files change the order: say how names have the step with --step-pattern, or "
                "write to another archive",
            )
        return StepConflictError(
            f"step {info.step} is in the archive already, with other values",
            where=str(self._writer.reader.path),
            remedy="if training was restored and went another way, say where: --resumed-from",
        )

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
        from inshrink_core.chain import holds_content, optimizer_of, stored_view

        frame = self._writer.reader.frame(info.frame_id)
        return holds_content(frame, stored_view(checkpoint, optimizer_of(frame.meta)))

    def _is_decoded(self, checkpoint: Checkpoint, info: FrameInfo) -> bool:
        """Whether a checkpoint is what a frame restores to: training went on from there."""
        from inshrink_core.chain import tensor_digest

        restored = self._chain.archive.checkpoint(info)
        return all(
            spec.key in checkpoint
            and checkpoint.spec(spec.key) == spec
            and tensor_digest(checkpoint[spec.key]) == tensor_digest(restored[spec.key])
            for spec in restored.specs
        )

    def _continue_from(self, info: FrameInfo) -> None:
        """Write what follows as the continuation of a restored step; a branch, if others follow it."""
        from inshrink_core.chain import ChainWriter

        self._chain = ChainWriter(
            self._writer, self._chain.config, parent=info, restored=info, base=self._chain.base
        )

    def _pass(self, step: int, checkpoint: Checkpoint) -> None:
        """Count a step that needs no writing."""
        self.skipped.append(step)
        self._bytes_done += checkpoint.raw_bytes()

    def _append(self, step: int, checkpoint: Checkpoint) -> None:
        """Write one step."""
        from inshrink_core.chain import stored_view

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
        self.large_errors += appended.large_errors


def _archived_last(archive: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the last checkpoint of an archive, which says whose optimizer state is; None of a new one."""
    from inshrink_core.archive import is_archive
    from inshrink_core.chain import Archive

    if not is_archive(archive):
        return None
    with suppress(MissingFrameError, DamagedError):  # whether it is needed, whoever appends decides
        opened = Archive.open(archive)
        head = opened.reader.head
        return None if head is None else opened.checkpoint(head)
    return None


def _check_base(
    model: BaseModel, archive: str | os.PathLike[str], codec: AnyCodec, first: Iterable[Checkpoint]
) -> None:
    """Refuse a base model that the first frame cannot be encoded relative to, before there is an archive."""
    from inshrink_core.archive import is_archive
    from inshrink_core.chain import Archive
    from inshrink_core.chain.base import require_base_codec

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
    branches
        Names of the checkpoints written now that are no steps, such as ``best``.
    fates
        Number of tensor files of the run by fate (docs/runs.md).
    seconds
        Wall time.
    raw_bytes_read
        Raw bytes of the steps written now.
    relative_error
        Root of squared error over squared norm of the weights written now; None if none were.
    large_errors
        Tensors written now for which that is above .25, unless settings of the user's ask for it.
    codec, config
        What the weights were written with; under bounds, where the search began.
    optimizer
        How optimizer state was stored (`inshrink_core.chain.ChainConfig`).
    promise
        What was promised of every restored step, and how each keeps it; None where nothing was.
    predicted
        What a restore costs at most, as predicted and not measured; None where the coarseness was set, or
        bounds were.
    unreadable
        What looks like a checkpoint of the run and cannot be read: it is not in the archive.
    left_out
        What else was passed over, and why.
    originals
        What is known of the checksums of the original files.
    unseen
        What of the run's steps lies in no tensor, and hardly shrinks.
    device
        Where the steps were encoded.
    part
        Which part of the steps was written, as ``2/8``; None: all of them.
    waiting
        Steps that wait for other parts: they are not in the archive yet.
    """

    path: Path | str
    size: ArchiveSize
    appended: tuple[int, ...]
    skipped: tuple[int, ...]
    branches: tuple[str, ...] = ()
    fates: Mapping[str, int] = field(default_factory=dict)
    seconds: float
    raw_bytes_read: int
    relative_error: float | None
    large_errors: tuple[LargeError, ...] = ()
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    promise: Promise | None = None
    predicted: PredictedCost | None = None
    unreadable: tuple[Skipped, ...] = ()
    left_out: tuple[Skipped, ...] = ()
    originals: OriginalChecks
    unseen: Unseen
    device: str = "cpu"
    part: str | None = None
    waiting: tuple[int, ...] = ()

    SAYS: ClassVar = (
        "archive=path codec config optimizer roles ratio_total=size.ratio_total "
        "ratio_weights=size.ratio_weights bits_per_weight=size.bits_per_weight raw_bytes=size.raw_total "
        "archive_bytes=size.nbytes relative_error large_errors seconds mb_per_s device appended skipped "
        "branches fates unreadable left_out originals unseen frames"
    )

    @property
    def failure(self) -> CheckFailedError | None:
        """Why the chain does not keep what was promised; None where it does, or nothing was."""
        return None if self.promise is None else self.promise.failure(self.path)

    @property
    def decided(self) -> dict[str, Any] | None:
        """The step after the first that shrinks least, and so decides the ratio; None without bounds.

        With the ratio of its weights, whether it is stored exactly, and its share of the tightest bound.
        """
        if self.promise is None:
            return None
        sizes = {one.info.step: one.ratio_weights for one in self.size.frames if one.ratio_weights}
        known = {step: size for step, size in sizes.items() if step in self.promise.steps}
        step = min(list(known)[1:] or known, key=known.__getitem__, default=None)
        if step is None:
            return None
        promise, limits = self.promise.steps[step], self.promise.bounds.limits
        used = [(getattr(promise, name), limit) for name, limit in limits.items() if 0 < limit < math.inf]
        usage = max((value / limit for value, limit in used if value is not None), default=None)
        return {"step": step, "ratio_weights": known[step], "exact": promise.exact, "usage": usage}

    @property
    def mb_per_s(self) -> float | None:
        """Raw megabytes (10^6 bytes) written per second; None where nothing was."""
        return self.raw_bytes_read / 1e6 / self.seconds if self.appended and self.seconds else None

    @property
    def roles(self) -> list[str]:
        """Roles of the tensors in the archive, sorted."""
        return sorted({row.spec.role.value for frame in self.size.frames for row in frame.tensors})

    def _rounded_buffers(self) -> str:
        from inshrink_core.chain.config import is_exact
        from inshrink_core.checkpoint import TensorRole
        from inshrink_core.codec import FALLBACK_CODEC, get_codec

        rows = [row for frame in self.size.frames for row in frame.tensors]
        buffers = {row.spec.key for row in rows if row.spec.role is TensorRole.BUFFER}
        lossless = get_codec(FALLBACK_CODEC).reads
        rounded = buffers & {row.spec.key for row in rows if row.codec not in lossless}
        settings = [f"--set {one}=exact" for one in ("one_dimensional", "buffers") if one in self.config]
        remedy = next(iter(settings), "--codec lossless")
        said = f"{count(len(rounded))} of {count(len(buffers))} rounded (statistics of normalisation layers)"
        return (
            f"{said}; {remedy} keeps every bit" if rounded and not is_exact(self.codec, self.config) else ""
        )

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
        promised = {} if self.promise is None else {**self.promise.to_json(), "decided": self.decided}
        left_out = [f"{row.path}: {row.reason}" for row in self.left_out]
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        shared = {} if self.part is None else {"part": self.part, "waiting": list(self.waiting)}
        foreseen = {} if self.predicted is None else {"predicted": self.predicted._asdict()}
        return promised | base | shared | foreseen | Report.to_json(self) | {"left_out": left_out}

    def show(self, console: Console) -> None:
        """Print what was written now, then what the archive holds altogether."""
        show_unreadable(console, self.unreadable)
        document = self.to_json()
        appended, skipped = document["appended"], document["skipped"]
        done = f"{steps_in_short(appended)}" if appended else "nothing new"
        speed = f"{duration(self.seconds)}, {rate(self.mb_per_s)} on {self.device}" if appended else ""
        frames = document["frames"]
        keyframes = sum(frame["kind"] == "keyframe" for frame in frames)
        facts = [
            ("archive", str(document["archive"])),
            ("appended", done),
            ("part", self.part or ""),
            ("waiting for other parts", steps_in_short(self.waiting) if self.waiting else ""),
            *(("not archived", row) for row in rows_in_short(document["left_out"])),
            ("checksums of the originals", str(document["originals"]["text"])),
            ("not seen into", self.unseen.text),
            ("skipped", f"{steps_in_short(skipped)}, there already" if skipped else ""),
            ("branches", ", ".join(self.branches)),
            ("files of tensors", fates_text(self.fates)),
            ("time", speed),
            ("codec", str(document["codec"])),
            ("optimizer state", optimizer_text(document["optimizer"], document["roles"])),
            ("buffers", self._rounded_buffers()),
            ("frames", f"{count(len(frames))}  ({counted(keyframes, 'keyframe')})"),
            ("base model", base_text(document.get("base"))),
            (named_ratio("ratio of everything", document.get("base")), _total(document)),
            (named_ratio("ratio of the weights", document.get("base")), ratio(document["ratio_weights"])),
            ("bits per weight", plain(document["bits_per_weight"])),
            ("relative error", _error(document)),
            ("relative error above .25", large_errors_text(self.large_errors)),
            *promised_facts(document),
            ("predicted restore cost", "" if self.predicted is None else _predicted(self.predicted)),
        ]
        show_facts(console, facts)


def _predicted(one: PredictedCost) -> str:
    """Return a cost that nobody measured, and what chose the coarseness."""
    chosen = f"(bound {one.bound * 100:g} %, coarseness {one.coarseness:g}; not measured)"
    return f"at most {one.restore_cost * 100:.2g} % of the loss  {chosen}"


def _total(document: Mapping[str, Any]) -> str:
    """Return the ratio of everything, and the sizes it is made of."""
    sizes = f"{size(document['raw_bytes'])} in {size(document['archive_bytes'])}"
    return f"{ratio(document['ratio_total'])}  ({sizes})"


def _error(document: Mapping[str, Any]) -> str:
    """Return the error of the weights written now; nothing where none were."""
    text = error_size(document["relative_error"])
    return "" if text == UNKNOWN else f"{text}  (of the weights written now, root mean square)"
