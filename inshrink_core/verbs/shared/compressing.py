"""Compress a run: find the steps that the archive lacks, write them, and report the result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from inshrink_core.archive import ArchiveWriter, is_archive, segment
from inshrink_core.archive.storage.registry import place_of
from inshrink_core.chain.append import Appended, ChainWriter
from inshrink_core.chain.archive import Archive, open_base
from inshrink_core.chain.attachments import holds_content, stored_view, tensor_digest
from inshrink_core.chain.base import BaseModel, require_base_codec
from inshrink_core.chain.config import ChainConfig, LargeError, is_exact, optimizer_of
from inshrink_core.chain.encoder import look_ahead
from inshrink_core.chain.report import OriginalChecks, original_checks
from inshrink_core.chain.sizes import ArchiveSize, archive_size
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec, Unseen
from inshrink_core.codec import DEFAULT_CODEC, FALLBACK_CODEC, AnyCodec, get_codec, make_codec
from inshrink_core.errors import (
    CheckFailedError,
    DamagedError,
    InputError,
    MissingFrameError,
    NotFoundError,
    StepConflictError,
    StorageError,
    named,
)
from inshrink_core.evaluate.comparison import Compared
from inshrink_core.evaluate.own_samples import AUTO, likely_evaluator
from inshrink_core.execution.progress import Counter
from inshrink_core.formats import Run, Skipped, unreadable_error
from inshrink_core.frame import NAMED_BRANCH, FrameInfo
from inshrink_core.report import Report, plain_value
from inshrink_core.search.bounded import BoundedWriter, BoundRecord, open_bounded
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds
from inshrink_core.search.search import choose_steps
from inshrink_core.search.trials import BoundEvaluator
from inshrink_core.verbs.shared.groups import Compressing, PathLike, steps_of
from inshrink_core.verbs.shared.measured import EvaluatorId, Measurements, question_of
from inshrink_core.verbs.shared.showing import counted_fates, optimizer_text


def write_branches(request: Compressing) -> tuple[str, ...]:
    """Append the named branches of a run to an archive that holds its steps; return their names."""
    run = request.opened_run(request.run)
    if not run.branches:
        return ()
    run = run.matched(_archived_last(request.archive))
    with ArchiveWriter(request.archive) as writer:
        config = request.chain_config(request.archive, device=request.device, threads=request.threads)
        if request.bounds.requested() is not None or request.evaluator is not None:
            config = config.made_exact(config.config.made_exact() or get_codec(FALLBACK_CODEC)())
        return _Session(request, run, writer, ChainWriter(writer, config)).write_branches()


def write_run(request: Compressing) -> CompressReport:
    """Write the steps that the archive lacks, in this process."""
    begun = time.perf_counter()
    opened = request.opened_run(request.run)
    if request.allow_damaged:
        opened = opened.allowing_damage()
    opened = opened.matched(_archived_last(request.archive))
    asked = steps_of(opened, request.steps)
    chosen = _chosen(opened, asked)
    chain_config = request.chain_config(request.archive, device=request.device, threads=request.threads)
    if request.resumed_from is not None:
        # Check before the writer creates an archive: a branch needs an existing one.
        Archive.open(request.archive).reader.find(request.resumed_from)
    model = None if request.base is None else open_base(request.base)
    if model is not None:
        _check_base(model, request.archive, chain_config.config, [opened[step] for step in chosen[:1]])
    bounds = _bounds_of(request)
    bounded: BoundedWriter | None = None
    if bounds is not None:
        # The evaluator compares every step with its neighbours, so all of them must be readable.
        opened = opened.readable(chosen)
        chosen = tuple(step for step in chosen if step in opened)
    with ExitStack() as stack:
        if bounds is not None and chosen:
            resumed = is_archive(request.archive)
            bounded = stack.enter_context(
                open_bounded(opened, chosen, chain_config, bounds, request, resumed=resumed)
            )
        writer = stack.enter_context(
            ArchiveWriter(request.archive, create=True, grouped=len(chosen) > segment.MAX_SMALL_FILES)
        )
        parent = None if request.resumed_from is None else writer.reader.find(request.resumed_from)
        branch = None if parent is None else writer.reader.next_branch
        chain = ChainWriter(writer, chain_config, parent=parent, branch=branch, restored=parent, base=model)
        if request.look_ahead and chain.parent is None:
            chain.initial_memory = look_ahead(chain_config, chosen, opened.__getitem__)
        session = _Session(request, opened, writer, chain, chosen, bounded)
        session.run_all()
        bound_record = None if bounded is None else bounded.bound_record
        compared = None if bounded is None else bounded.compared()  # its originals close with the context
        branches = session.write_branches() if asked is None else ()
    finished = Archive.open(request.archive)
    session.written.note(opened, chosen, chain_config.device, session.run.skipped)
    report = report_on(
        request,
        chain_config,
        finished,
        [session.written],
        begun,
        branches=branches,
        bound_record=bound_record,
        unreadable=session.run.unreadable,
        fates=counted_fates(session.run, finished.listed_steps, skip_damaged=request.skip_damaged),
        hint="" if bounds is not None or not chosen else _hint(opened, chain_config.config),
    )
    if bounded is not None and compared is not None and compared.steps:
        _store_compared(finished, opened, bounded.evaluator, compared)
    in_vain = None if asked is None else set(asked) - set(session.run.steps)
    failure = unreadable_error(report.unreadable, opened.address, in_vain)
    if failure is not None and not request.skip_damaged:
        failure.report = report
        raise failure
    return report


def _bounds_of(request: Compressing) -> Bounds | None:
    """Return the requested bounds; by default, an evaluator bounds the restore cost."""
    bounds = request.bounds.requested()
    if bounds is None and (request.evaluator is not None or request.trust_run):
        return Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    return bounds


def _hint(run: Run, config: AnyCodec) -> str:
    """Return the option that would bound the quality of this run, if any; execute nothing."""
    if config != make_codec(DEFAULT_CODEC, {}) or run.is_elsewhere:
        return ""
    if run.settings.file is not None:
        return f"'{run.settings.file}' can judge this run: --trust-run bounds the restore cost of every step"
    found = likely_evaluator(run.directory / "evaluator.py", run.path_of(run.steps[-1]), run.directory)
    if found == AUTO:
        return "this run can be judged without data: --evaluator auto stores about half as much"
    return f"--evaluator {found}:evaluate bounds the restore cost of every step" if found else ""


def _store_compared(archive: Archive, run: Run, evaluator: BoundEvaluator, compared: Compared) -> None:
    """Store the evaluations made while an archive was written, as a comparison."""
    steps = [row.step for row in compared.steps]
    asked = EvaluatorId(evaluator.spec, evaluator.digest)
    question = question_of(asked, run, steps, dict(zip(steps, [None, *steps], strict=False)))
    store = Measurements.of_archive(archive)
    store.add("compare", question, plain_value(compared))


def _chosen(run: Run, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the steps to write: all of them, or the readable ones among those asked for.

    Raises
    ------
    UnreadableStepError
        No step asked for can be read.
    NotFoundError
        The run lacks a step asked for.
    """
    if not asked:
        return choose_steps(run, None) if asked is None else ()
    lost = {row.step for row in run.unreadable} - set(run.steps)
    readable = [step for step in asked if step not in lost]
    if not readable and (error := unreadable_error(run.unreadable, run.address, asked)):
        raise error
    return choose_steps(run, readable)


@dataclass(slots=True)
class Written:
    """Result of writing a run, or one part of it, in one process.

    Parameters
    ----------
    appended, skipped
        Steps written now, and steps that the archive held already.
    raw_bytes, squared_error, squared_norm, large_errors
        Sums over the steps written now.
    left_out, unseen, device
        As in `CompressReport`.
    """

    appended: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    raw_bytes: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    large_errors: list[LargeError] = field(default_factory=list)
    left_out: tuple[Skipped, ...] = ()
    unseen: Unseen = field(default_factory=Unseen)
    device: str = "cpu"

    def note(self, run: Run, steps: Iterable[int], device: str, skipped: Iterable[Skipped]) -> None:
        """Record which parts of a run are not archived, and the device that encoded its steps."""
        self.left_out = tuple(row for row in skipped if not row.unreadable)
        self.unseen = Unseen.of(layout for step in steps for layout in run[step].files)
        self.device = device

    def add(self, step: int, raw_bytes: int, appended: Appended) -> None:
        """Count a step that was written."""
        self.appended.append(step)
        self.raw_bytes += raw_bytes
        self.squared_error += appended.squared_error
        self.squared_norm += appended.squared_norm
        self.large_errors += appended.large_errors


def report_on(
    request: Compressing,
    config: ChainConfig,
    finished: Archive,
    written: Sequence[Written],
    begun: float,
    **more: Any,
) -> CompressReport:
    """Return the report on an archive that one or more processes wrote into."""
    appended = sorted({step for part in written for step in part.appended})
    norm = math.fsum(part.squared_norm for part in written)
    error = (math.fsum(part.squared_error for part in written) / norm) ** 0.5 if norm else None
    large_errors = [row for part in written for row in part.large_errors]
    first = written[0]
    return CompressReport(
        path=place_of(request.archive),
        size=archive_size(finished),
        appended=tuple(appended),
        skipped=tuple(step for step in first.skipped if step not in appended),
        seconds=time.perf_counter() - begun,
        raw_bytes_read=sum(part.raw_bytes for part in written),
        relative_error=error if appended else None,
        large_errors=tuple(sorted(large_errors) if len(written) > 1 else large_errors),
        codec=config.codec,
        config=config.config.settings(),
        optimizer=config.optimizer,
        left_out=first.left_out,
        originals=original_checks(finished, finished.frames),
        unseen=first.unseen,
        device=first.device,
        **more,
    )


class _Session:
    """One `compress`: sort the steps into archived and missing ones, and append the missing ones."""

    def __init__(
        self,
        request: Compressing,
        run: Run,
        writer: ArchiveWriter,
        chain: ChainWriter,
        steps: Sequence[int] = (),
        bounded: BoundedWriter | None = None,
    ) -> None:

        self.run, self._writer, self._chain, self._bounded = run, writer, chain, bounded
        self._resumed_from, self._steps = request.resumed_from, steps
        n_bytes = sum(run[step].raw_bytes() for step in steps) if request.progress else 0
        self._count, self.written = Counter(request.progress, "compress", n_bytes), Written()
        # The branch of training that is continued, and its frames that the archive lacks.
        continues = chain.parent is not None and request.resumed_from is None
        line = writer.reader.listed_history(chain.parent) if continues else ()
        there = {frame.frame_id for frame in writer.reader.frames}
        self._archived = {frame.step: frame for frame in line if frame.frame_id in there}
        self._missing = {frame.step for frame in line if frame.frame_id not in there}
        self._restored: FrameInfo | None = None

    def run_all(self) -> None:
        """Skip archived steps and append the rest in step order; pass over steps that cannot be read.

        A step that equals the decoded tensors of its frame bit for bit was restored from that frame: the
        steps after it continue from there.
        """
        known = dict(self._archived)
        for step in self._steps:
            end = self._count.done + self.run[step].raw_bytes()
            self._count.add(0, step)  # a bound is kept by trials before the first tensor is written
            try:
                self._take(step)
            except (DamagedError, NotFoundError, StorageError) as error:
                if self.run.is_elsewhere and isinstance(error, StorageError):
                    raise  # a network failure is not damage: the same command can be repeated
                self.run = self.run.readable([step])
                if step in self.run:
                    raise
            self._count.done = end
        self.run.fetch(())
        view = self._chain.archive.sequential()
        for step in self.written.skipped:  # the bounds hold for archived steps, too
            if self._bounded is not None and step in known:
                self._bounded.check(view, known[step])

    def _take(self, step: int) -> None:
        """Append a step unless the archive holds it."""
        checkpoint, info = self.run[step], self._archived.get(step)
        if info is not None:
            checkpoint = self.run.as_archived(step, self._chain.archive.attributing(info))
        if self._is_there(step, checkpoint, info):
            self.written.skipped.append(step)
            return
        if self._restored is not None:
            # The steps after a restored step continue from it: as a branch, if it has successors already.
            config, base = self._chain.config, self._chain.base
            self._chain = ChainWriter(
                self._writer, config, parent=self._restored, restored=self._restored, base=base
            )
            self._archived, self._restored = {}, None
        elif info is not None:
            now = {file.path for file in checkpoint.files}
            then = {file.path for file in self._chain.archive.checkpoint(info).files}
            moved = bool(now and then and not now & then)
            how = "as another file" if moved else "with other values"
            raise StepConflictError(
                f"step {step} is in the archive already, {how}",
                where=str(self._writer.reader.path),
                expected=named(sorted(then)) if moved else "",
                found=named(sorted(now)) if moved else "",
                remedy="give the step that training was restored from with --resumed-from, or the place of "
                "steps in names with --step-pattern, or write to another archive",
            )

        def done(spec: TensorSpec) -> None:
            self._count.add(spec.nbytes, step, spec.key)

        if self._bounded is None:
            appended = self._chain.append(checkpoint, done=done)
        else:
            appended = self._bounded.append(self._chain, checkpoint, done)
        stored = stored_view(checkpoint, self._chain.config.optimizer)
        self.written.add(step, stored.raw_bytes(), appended)

    def _is_there(self, step: int, checkpoint: Checkpoint, info: FrameInfo | None) -> bool:
        """Return whether a step needs no writing."""
        if self._resumed_from is not None and step <= self._resumed_from:
            return True
        if info is None and step in self._missing:
            # Appended after later frames, it would change the history; the error names its missing file.
            self._writer.reader.find(step)
        pruned = self._archived and step < max(self._archived) and self._writer.manifest.tombstones
        if info is None and self._restored is None and pruned:
            return True  # a pruned step is not appended again after later ones
        self.run.fetch([step, *self._steps[self._steps.index(step) + 1 :][:1]])
        if info is None:
            return False
        if self._is_equal(checkpoint, info):
            self._restored = None
            return True
        if self._is_decoded(checkpoint, info):
            self._restored = info
            return True
        return False

    def write_branches(self) -> tuple[str, ...]:
        """Append the named checkpoints, each to the step that it belongs to; return their names."""
        reader, archive = self._writer.reader, self._chain.archive
        line, known, written = reader.history(), archive.branches, []
        for name, checkpoint in self.run.branches.items() if line else ():
            info = known.get(name)
            if info is not None and self._is_equal(checkpoint, info):
                continue
            parent = next((frame for frame in reversed(line) if frame.step <= checkpoint.step), line[0])
            numbers = (value.branch for value in reader.listed if value.is_named)
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
                written.append(name)
        return tuple(written)

    def _is_equal(self, checkpoint: Checkpoint, info: FrameInfo) -> bool:
        """Return whether a frame was made from this checkpoint."""
        frame = self._writer.reader.frame(info.frame_id)
        return holds_content(frame, stored_view(checkpoint, optimizer_of(frame.meta)))

    def _is_decoded(self, checkpoint: Checkpoint, info: FrameInfo) -> bool:
        """Return whether a checkpoint equals a restored frame: training was resumed from it."""
        restored = self._chain.archive.checkpoint(info)
        return all(
            spec.key in checkpoint
            and checkpoint.spec(spec.key) == spec
            and tensor_digest(checkpoint[spec.key]) == tensor_digest(restored[spec.key])
            for spec in restored.specs
        )


def _archived_last(archive: PathLike) -> Checkpoint | None:
    """Return the last checkpoint of an archive, for optimizer-state matching; None for a new archive."""
    if not is_archive(archive):
        return None
    with suppress(MissingFrameError, DamagedError):  # appending raises the error if it needs the frame
        opened = Archive.open(archive)
        head = opened.reader.head
        return None if head is None else opened.checkpoint(head)
    return None


def _check_base(model: BaseModel, archive: PathLike, codec: AnyCodec, first: Iterable[Checkpoint]) -> None:
    """Refuse a base model that does not fit the first frame, before an archive is created."""
    require_base_codec(codec)
    known = Archive.open(archive) if is_archive(archive) else None
    if known is None or not known.reader.listed:
        for checkpoint in first:
            model.references(checkpoint.specs)
        return
    records = [record for info in known.reader.frames if (record := known.base_of(info)) is not None]
    if not records:
        raise InputError(
            "the archive was started without a base model, or no longer needs one",
            where=str(archive),
            remedy="leave out --base, or write to another archive",
        )
    for record in records:
        model.require(record, str(archive))


_BOUND_FIELDS: Final = (
    *("step", "kind", "ratio_weights", "drop", "divergence", "restore_cost"),
    *("exact", "discriminative", "side"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressReport(Report):
    """Result of `compress`, and the contents of the archive.

    Parameters
    ----------
    path : str
        Path of the archive.
    size
        Sizes over the head's history, including steps archived earlier.
    appended
        Steps written now.
    skipped
        Steps archived before, or pruned.
    branches
        Names of the named checkpoints written now, such as ``best``.
    fates
        Number of tensor files of the run by fate (docs/runs.md#what-becomes-of-each-file).
    seconds
        Wall time.
    raw_bytes_read
        Raw bytes of the steps written now.
    relative_error
        Root of squared error over squared norm of the weights written now; None if none were written.
    large_errors
        Tensors with a relative error above 0.25 that no setting asks for.
    codec
        Codec of the weights.
    config
        All settings of the codec; under bounds, the start of the search.
    optimizer
        How optimizer state is stored: ``exact``, ``compressed``, ``compact`` or ``drop``.
    bound_record
        The quality bounds of every restored step, and how each step keeps them; None without bounds.
    unreadable
        Checkpoints of the run that cannot be read.
    left_out
        Other files that were passed over, and why.
    originals
        Result of checking the original files when they were archived (docs/runs.md#checksums).
    unseen
        Bytes outside parsed tensors, stored unchanged (docs/runs.md#opaque-files).
    device
        Device that encoded or decoded tensors: ``cpu`` or ``cuda``.
    part
        The part of the steps that was written, as ``2/8``; None: all of them.
    waiting
        Steps that wait for other parts; they are not in the archive yet.
    hint
        An option that would bound the quality, if none was given and the run supports one.
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
    bound_record: BoundRecord | None = None
    unreadable: tuple[Skipped, ...] = ()
    left_out: tuple[Skipped, ...] = ()
    originals: OriginalChecks
    unseen: Unseen
    device: str = "cpu"
    part: str | None = None
    waiting: tuple[int, ...] = ()
    hint: str = ""

    KEYS: ClassVar = (
        "archive=path codec config optimizer roles ratio_total=size.ratio_total "
        "ratio_weights=size.ratio_weights bits_per_weight=size.bits_per_weight raw_bytes=size.raw_total "
        "archive_bytes=size.nbytes relative_error large_errors seconds mb_per_s device appended skipped "
        "branches fates unreadable left_out originals unseen frames"
    )
    SHOWS: ClassVar = (
        "unreadable archive appended part waiting_for_other_parts=waiting not_archived=left_out originals "
        "not_seen_into=unseen.text skipped branches fates seconds mb_per_s device codec "
        "buffers=rounded_buffers optimizer_state=optimizer_state base ratio_total ratio_weights "
        "bits_per_weight raw_bytes archive_bytes relative_error large_errors bounds max_drop "
        "max_divergence max_restore_cost evaluations frames=evaluated"
    )

    @property
    def failure(self) -> CheckFailedError | None:
        """Why the chain breaks its quality bounds; None if it keeps them or has none."""
        return None if self.bound_record is None else self.bound_record.failure(self.path)

    @property
    def mb_per_s(self) -> float | None:
        """Raw megabytes (10^6 bytes) written per second; None if no step was written."""
        return self.raw_bytes_read / 1e6 / self.seconds if self.appended and self.seconds else None

    @property
    def roles(self) -> list[str]:
        """Roles of the tensors in the archive."""
        return sorted({row.spec.role.value for frame in self.size.frames for row in frame.tensors})

    @property
    def rounded_buffers(self) -> str:
        """How many buffers are rounded by default, and which option keeps them exact."""
        lossless = get_codec(FALLBACK_CODEC).bitstream
        tensors = [row for frame in self.size.frames for row in frame.tensors]
        buffers = {row.spec.key: True for row in tensors if row.spec.role is TensorRole.BUFFER}
        rounded = buffers.keys() & {row.spec.key for row in tensors if row.codec != lossless}
        if not rounded or is_exact(self.codec, self.config):
            return ""
        remedy = "--set exact=true" if "exact" in self.config else "--codec lossless"
        of = f"{len(rounded):,} of {len(buffers):,}"
        return f"{of} rounded (statistics of normalisation layers); {remedy} keeps every bit"

    @property
    def optimizer_state(self) -> str:
        """How optimizer state was stored; empty without optimizer state."""
        return optimizer_text(self.optimizer, self.roles)

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """How each frame keeps the bounds; empty without bounds."""
        rows = [] if self.bound_record is None else self.frames
        return [{name: row.get(name) for name in _BOUND_FIELDS} for row in rows]

    @property
    def frames(self) -> list[dict[str, Any]]:
        """Frames of the newest branch.

        Returns
        -------
        step : int
            Training step.
        kind : str
            ``keyframe`` (decodes alone) or ``delta`` (needs the previous frame).
        bytes : int
            Size of the frame.
        ratio_total : float
            Raw bytes over stored bytes of everything; None for an empty archive.
        ratio_weights : float
            Raw bytes over stored bytes of weights and buffers, including headers and indexes.
        config : StepQuality?
            Absent without bounds and None for steps that the run lacks, as are ``drop`` to ``side``.
        drop, divergence, restore_cost, discriminative, exact, side : StepQuality?
        """
        names = ("step", "kind", "bytes", "ratio_total", "ratio_weights")
        rows = []
        for frame in self.size.frames:
            row = frame.to_json()
            requested = {} if self.bound_record is None else self.bound_record.step_json(frame.info.step)
            rows.append({name: row[name] for name in names} | requested)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink compress --json``.

        Returns
        -------
        left_out : [str]
            Other files not archived, each with its reason.
        base : BaseRecord
            Base model that the archive needs; absent if none.
        part : str
            Part written, as ``2/8``; absent without ``--part``.
        waiting : [int]
            Steps that wait for other parts; absent without ``--part``.
        bounds : Bounds
            Limits asked for. Without bounds this key, ``evaluations``, ``decided`` and ``max_…`` are absent.
        max_drop, max_divergence, max_restore_cost : float
            Largest value of any step.
        evaluations : int
            States evaluated; originals are not counted.
        """
        requested = {} if self.bound_record is None else self.bound_record.to_json()
        left_out = [f"{row.path}: {row.reason}" for row in self.left_out]
        base = {} if self.size.base is None else {"base": plain_value(self.size.base)}
        shared = {} if self.part is None else {"part": self.part, "waiting": list(self.waiting)}
        return requested | base | shared | Report.to_json(self) | {"left_out": left_out}

    def remarks(self) -> Iterator[str]:
        """Yield remarks for the terminal."""
        if not self.appended:
            yield "nothing new"
        if self.hint:
            yield f"hint: {self.hint}"
