"""Compressing one part of each step, beside other processes that compress the others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.checkpoint import Unseen
from inshrink_core.errors import ConflictError, InputError, LockedError, StepConflictError
from inshrink_core.execution.progress import Progress
from inshrink_core.execution.together import meet, part_ways
from inshrink_core.verbs.shared.groups import PathLike, steps_of
from inshrink_core.verbs.shared.sharing import shared_out

if TYPE_CHECKING:
    from inshrink_core.archive import PartWriter
    from inshrink_core.chain import ChainConfig, ChainWriter
    from inshrink_core.chain.config import LargeError
    from inshrink_core.chain.parts import Share, Split
    from inshrink_core.checkpoint import Checkpoint, TensorSpec
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo


_ONE_PROCESS = ("max_drop", "max_divergence", "max_restore_cost", "evaluator", "resumed_from", "base")
"""Options of a compression that no part can follow alone."""


class PartDone(NamedTuple):
    """What came of one part."""

    appended: tuple[int, ...]
    skipped: tuple[int, ...]
    raw_bytes: int
    squared_error: float
    squared_norm: float
    large_errors: tuple[LargeError, ...]
    left_out: tuple[Skipped, ...]
    unseen: Unseen
    device: str


def compress_in_parts(request: Any) -> dict[str, Any]:
    """Write the steps that an archive does not hold yet: one part, or all parts by an engine's workers.

    One part is committed where it was the last.

    Parameters
    ----------
    request
        What every part is given alike: an `inshrink_core.verbs.compress.Compress`.

    Returns
    -------
    dict
        Fields of a `CompressReport`.

    Raises
    ------
    InputError
        An option that needs all tensors in one process.
    ConflictError, StepConflictError, UnreadableError
        As `write_part`.
    EngineError, MissingExtraError
        As `inshrink_core.verbs.shared.sharing.shared_out`. What is whole is kept.
    """
    from inshrink_core.archive import commit_parts
    from inshrink_core.chain.parts import share_of

    begun = time.perf_counter()
    _refuse_what_needs_all(request)
    if request.is_shared_out:
        done = shared_out(request, lambda about: _begun_in(request.archive) or about)
        commit_parts(request.archive)
        return _report(request, done, begun) | {"branches": _branches(request)}
    share = share_of(request.part)
    if share is None:
        raise InputError("no part is named", expected="I/N")
    own = write_part(request, share)
    branches: tuple[str, ...] = ()
    if meet():
        commit_if_last(request.archive)
        branches = _branches(request)
    part_ways()
    return _report(request, [own], begun) | {"part": str(share), "branches": branches}


def _branches(request: Any) -> tuple[str, ...]:
    """Write the run's branches, unless steps were named or other parts are still at work."""
    from inshrink_core.archive import ArchiveReader

    reader = ArchiveReader.open(request.archive)
    return () if request.steps or reader.catalog.pending or not reader.frames else request.write_branches()


def _begun_in(archive: PathLike) -> int:
    """Return in how many parts an earlier attempt was, whose steps wait for some of them; 0 for none."""
    from inshrink_core.archive import ArchiveReader, is_archive

    pending = ArchiveReader.open(archive).catalog.pending if is_archive(archive) else ()
    return pending[0].n_parts if pending else 0


def write_part(request: Any, share: Share) -> PartDone:
    """Write one part of the steps that an archive does not hold yet, and commit nothing.

    Raises
    ------
    ConflictError
        Other parts were given other steps, settings or tensors.
    StepConflictError
        A step is in the archive with other values.
    UnreadableError
        A checkpoint cannot be read: in parts none is passed over, for the others would not know.
    """
    from inshrink_core.archive import PartWriter
    from inshrink_core.formats import unreadable_error
    from inshrink_core.search.search import choose_steps

    run = request.opened_run(request.run)
    if error := unreadable_error(run.unreadable, run.address):
        raise error
    steps = choose_steps(run, steps_of(run, request.steps))
    config = request.chain_config(request.archive, device=request.device, threads=request.threads)
    with PartWriter(request.archive, share.part, share.n_parts) as writer:
        require_same_settings(writer, config)
        session = _Session(request, run, steps, writer, config, share)
        session.run_all()
    return PartDone(
        appended=tuple(session.appended),
        skipped=tuple(session.skipped),
        raw_bytes=session.raw_bytes,
        squared_error=session.squared_error,
        squared_norm=session.squared_norm,
        large_errors=tuple(session.large_errors),
        left_out=tuple(row for row in run.skipped if not row.unreadable),
        unseen=Unseen.of(layout for step in steps for layout in run[step].files),
        device=config.device,
    )


def _report(request: Any, done: Sequence[PartDone], begun: float) -> dict[str, Any]:
    """Return the fields of a `CompressReport` on some parts."""
    from inshrink_core.chain import Archive, archive_size, original_checks
    from inshrink_core.chain.report import predicted_cost

    finished = Archive.open(request.archive)
    config = request.chain_config(request.archive, device="cpu")
    appended = {step for one in done for step in one.appended}
    norm = math.fsum(one.squared_norm for one in done)
    error = (math.fsum(one.squared_error for one in done) / norm) ** 0.5 if norm else None
    return dict(
        path=Path(request.archive),
        size=archive_size(finished),
        appended=tuple(sorted(appended)),
        skipped=tuple(step for step in done[0].skipped if step not in appended),
        seconds=time.perf_counter() - begun,
        raw_bytes_read=sum(one.raw_bytes for one in done),
        relative_error=error if appended else None,
        large_errors=tuple(sorted(row for one in done for row in one.large_errors)),
        codec=config.codec,
        config=config.config.settings(),
        optimizer=config.optimizer,
        predicted=predicted_cost(finished),
        left_out=done[0].left_out,
        originals=original_checks(finished, finished.frames),
        unseen=done[0].unseen,
        device=done[0].device,
        waiting=tuple(frame.step for frame in finished.reader.catalog.pending),
    )


def commit_if_last(archive: PathLike) -> None:
    """Commit; where another part is still at work, it will."""
    from inshrink_core.archive import commit_parts

    with suppress(LockedError):
        commit_parts(archive)


def require_same_settings(writer: PartWriter, config: ChainConfig) -> None:
    """Refuse settings that are not those of the part that began the next frame.

    Raises
    ------
    ConflictError
        They differ; the message says in what.
    """
    other, own = writer.meta_of_others(), config.record()
    for key in own if other else ():
        if other.get(key) != own[key]:
            raise ConflictError(
                f"another part was written with another {key}",
                where=writer.reader.path,
                expected=_differing(other.get(key), own[key]),
                found=_differing(own[key], other.get(key)),
                remedy="give every part the same settings, or give up what is there: "
                f"inshrink commit {writer.reader.path} --discard",
            )


def _differing(value: Any, other: Any) -> str:
    """Return a value as text, of a map only what another has otherwise."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return str(value)
    return ", ".join(f"{name}={value[name]!r}" for name in value if value[name] != other.get(name))


def _refuse_what_needs_all(request: Any) -> None:
    for name in _ONE_PROCESS:
        if getattr(request, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')} needs all tensors in one process, and a part has some",
                remedy="leave it out, or --part and --engine",
            )


class _Session:
    """The steps of one part: which are there already, which are written, and how far it is."""

    def __init__(
        self,
        request: Any,
        run: Run,
        steps: tuple[int, ...],
        writer: PartWriter,
        config: ChainConfig,
        share: Share,
    ) -> None:
        from inshrink_core.chain import ChainWriter, FrameEncoder
        from inshrink_core.chain.parts import Split

        self._run, self._steps, self._writer, self._share = run, steps, writer, share
        self._optimizer = config.optimizer
        self._split: Split = Split(self._stored(steps[0]).specs if steps else (), share.n_parts)
        self._chain: ChainWriter = ChainWriter(writer, config, split=self._split)
        self._progress, self._bytes_done = request.progress, 0
        self._bytes_total = sum(map(self._own_bytes, steps))
        self._held: dict[int, FrameInfo] = {frame.step: frame for frame in writer.reader.history()}
        self.appended: list[int] = []
        self.skipped: list[int] = []
        self.raw_bytes = 0
        self.squared_error = self.squared_norm = 0.0
        self.large_errors: list[LargeError] = []
        if request.look_ahead and not self._has_begun(steps):
            self._chain.initial_memory = FrameEncoder(config).look_ahead(steps, run.__getitem__)

    def _has_begun(self, steps: tuple[int, ...]) -> bool:
        """Whether the archive has frames of this part, so that nothing is left to be planned ahead."""
        return self._chain.parent is not None or not steps

    def _stored(self, step: int) -> Checkpoint:
        """Return what is stored of a step, by all parts together."""
        from inshrink_core.chain import stored_view

        return stored_view(self._run[step], self._optimizer)

    def _own(self, step: int) -> Iterator[TensorSpec]:
        return (s for s in self._stored(step).specs if self._split.part_of(s) == self._share.part)

    def _own_bytes(self, step: int) -> int:
        return sum(spec.nbytes for spec in self._own(step))

    def run_all(self) -> None:
        """Skip what is archived, and append the rest in step order."""
        for step in self._steps:
            info = self._held.get(step)
            if info is not None:
                self._pass(step, info)
            elif self._held and step < max(self._held):
                self._pass_removed(step)
            else:
                self._append(step)

    def _pass(self, step: int, info: FrameInfo) -> None:
        """Count a step that is there already, and see that it is the same."""
        if not self._is_equal(step, info):
            raise StepConflictError(
                f"step {step} is in the archive already, with other values",
                where=self._writer.reader.path,
                remedy="write it to another archive, or without --part",
            )
        self.skipped.append(step)
        self._bytes_done += self._own_bytes(step)

    def _pass_removed(self, step: int) -> None:
        """Count a step that was removed; one that was never there cannot come behind later ones."""
        if not self._writer.reader.catalog.manifest.tombstones:
            raise StepConflictError(
                f"step {step} lies before step {max(self._held)}, the last one in the archive",
                where=self._writer.reader.path,
                remedy="write it to another archive, or leave it out with --steps",
            )
        self.skipped.append(step)
        self._bytes_done += self._own_bytes(step)

    def _is_equal(self, step: int, info: FrameInfo) -> bool:
        """Whether what is there of a step, whole or this part of it, was made from the checkpoint."""
        from inshrink_core.chain import holds_content
        from inshrink_core.chain.attachments import parts_of

        frame = self._writer.reader.frame(info.frame_id)
        return parts_of(frame).keys() >= {spec.key for spec in self._own(step)} and holds_content(
            frame, self._stored(step)
        )

    def _append(self, step: int) -> None:
        """Write this part of one step."""
        begun_at, parent = self._bytes_done, self._chain.parent

        def done(spec: TensorSpec) -> None:
            self._bytes_done += spec.nbytes
            if self._progress is not None:
                self._progress(Progress("compress", self._bytes_done, self._bytes_total, step, spec.key))

        known = parent is not None and parent.step in self._run.steps
        self._chain.before = self._stored(parent.step) if parent is not None and known else None
        # A keyframe where a delta would not be worth it is a choice of all parts together: none makes it.
        appended = self._chain.append(self._run[step], done=done, keyframe=self._chain.keyframe_is_due)
        own = self._own_bytes(step)
        self._bytes_done = begun_at + own
        self._held[step] = appended.info
        self.appended.append(step)
        self.raw_bytes += own
        self.squared_error += appended.squared_error
        self.squared_norm += appended.squared_norm
        self.large_errors += appended.large_errors
