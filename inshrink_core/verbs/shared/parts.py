"""Compress one part of each step, while other processes compress the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from inshrink_core.archive import ArchiveReader, PartWriter, commit_parts, is_archive
from inshrink_core.chain import Archive, ChainConfig, ChainWriter, holds_content, look_ahead, stored_view
from inshrink_core.chain.append import Appended
from inshrink_core.chain.attachments import parts_of
from inshrink_core.chain.parts import Share, Split, share_of
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.errors import ConflictError, InputError, LockedError, StepConflictError
from inshrink_core.execution.progress import Counter
from inshrink_core.execution.together import leave_group, meet
from inshrink_core.formats import Run, unreadable_error
from inshrink_core.search.search import choose_steps
from inshrink_core.verbs.shared.compressing import CompressReport, Written, report_on, write_branches
from inshrink_core.verbs.shared.groups import Compressing, PathLike, steps_of
from inshrink_core.verbs.shared.sharing import shared_out

_SINGLE = ("max_drop", "max_divergence", "max_restore_cost", "evaluator", "resumed_from", "base")
"""Options that need all tensors of a step in one process."""


def compress_in_parts(request: Compressing) -> CompressReport:
    """Write the steps that an archive lacks: one part, or all parts by an engine's workers.

    The last part to finish commits.

    Raises
    ------
    InputError
        An option needs all tensors in one process.
    ConflictError, StepConflictError, UnreadableError
        As `write_part`.
    EngineError, MissingExtraError
        As `inshrink_core.verbs.shared.sharing.shared_out`. Complete frames are kept.
    """
    begun = time.perf_counter()
    for name in _SINGLE:
        if getattr(request, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')} needs all tensors in one process, but a part has only some",
                remedy="leave it out, or --part and --engine",
            )
    if request.is_shared_out:
        done = shared_out(request, lambda about: _begun_in(request.archive) or about)
        commit_parts(request.archive)
        return _report(request, done, begun, branches=_branches(request))
    written = write_part(request)
    branches: tuple[str, ...] = ()
    if meet():
        commit_if_last(request.archive)
        branches = _branches(request)
    leave_group()
    return _report(request, [written], begun, part=str(share_of(request.part)), branches=branches)


def _report(request: Compressing, written: Sequence[Written], begun: float, **more: Any) -> CompressReport:
    finished = Archive.open(request.archive)
    return report_on(
        request,
        request.chain_config(request.archive, device="cpu"),
        finished,
        written,
        begun,
        waiting=tuple(frame.step for frame in finished.reader.catalog.pending),
        **more,
    )


def _branches(request: Compressing) -> tuple[str, ...]:
    """Write the named branches, unless steps were selected or other parts are not finished."""
    reader = ArchiveReader.open(request.archive)
    return () if request.steps or reader.catalog.pending or not reader.frames else write_branches(request)


def _begun_in(archive: PathLike) -> int:
    """Return the number of parts of an earlier, unfinished attempt; 0 without one."""
    pending = ArchiveReader.open(archive).catalog.pending if is_archive(archive) else ()
    return pending[0].n_parts if pending else 0


def write_part(request: Compressing) -> Written:
    """Write one part of the steps that an archive lacks, and commit nothing.

    Raises
    ------
    ConflictError
        Other parts have other steps, settings or tensors.
    StepConflictError
        The archive holds a step with other values.
    UnreadableError
        A checkpoint cannot be read. It is not skipped, because the other parts would not skip it.
    """
    share = share_of(request.part)
    if share is None:
        raise InputError("no part is named", expected="I/N")
    run = request.opened_run(request.run)
    if error := unreadable_error(run.unreadable, run.address):
        raise error
    steps = choose_steps(run, steps_of(run, request.steps))
    config = request.chain_config(request.archive, device=request.device, threads=request.threads)
    with PartWriter(request.archive, share.part, share.n_parts) as writer:
        require_same_settings(writer, config)
        part = _Part(run, steps, writer, config, share)
        if request.look_ahead and steps and part.chain.parent is None:
            part.chain.initial_memory = look_ahead(config, steps, run.__getitem__)
        count = Counter(request.progress, "compress", sum(part.nbytes(step) for step in steps))
        written = Written()
        written.note(run, steps, config.device, run.skipped)
        for step in steps:
            nbytes = part.nbytes(step)
            end = count.done + nbytes
            if part.is_there(step):
                written.skipped.append(step)
            else:
                written.add(step, nbytes, part.append(step, count))
            count.done = end
    return written


def commit_if_last(archive: PathLike) -> None:
    """Commit, unless another part is still being written and will commit later."""
    with suppress(LockedError):
        commit_parts(archive)


def require_same_settings(writer: PartWriter, config: ChainConfig) -> None:
    """Refuse settings that differ from those of the part that began the next frame.

    Raises
    ------
    ConflictError
        A setting differs; the message names it.
    """
    other, record = writer.meta_of_others(), config.record()
    for key in record if other else ():
        if other.get(key) != record[key]:
            raise ConflictError(
                f"another part was written with another {key}",
                where=writer.reader.path,
                expected=_differing(other.get(key), record[key]),
                found=_differing(record[key], other.get(key)),
                remedy="give every part the same settings, or discard the parts: "
                f"inshrink commit {writer.reader.path} --discard",
            )


def _differing(value: Any, other: Any) -> str:
    """Return a value as text; for a mapping only the entries that differ from `other`."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return str(value)
    return ", ".join(f"{name}={value[name]!r}" for name in value if value[name] != other.get(name))


class _Part:
    """One part of each step: its tensors, and the steps that the archive holds."""

    def __init__(
        self, run: Run, steps: Sequence[int], writer: PartWriter, config: ChainConfig, share: Share
    ) -> None:
        self._run, self._writer, self._part, self._optimizer = run, writer, share.part, config.optimizer
        self._split = Split(self._stored(steps[0]).specs if steps else (), share.n_parts)
        self._archived = {frame.step: frame for frame in writer.reader.history()}
        self.chain = ChainWriter(writer, config, split=self._split)

    def _stored(self, step: int) -> Checkpoint:
        """Return the view of a step that all parts together store."""
        return stored_view(self._run[step], self._optimizer)

    def _specs(self, step: int) -> list[TensorSpec]:
        """Return the tensors of a step that this part writes."""
        return [s for s in self._stored(step).specs if self._split.part_of(s) == self._part]

    def nbytes(self, step: int) -> int:
        """Return the raw bytes of a step that this part writes."""
        return sum(spec.nbytes for spec in self._specs(step))

    def is_there(self, step: int) -> bool:
        """Return whether the archive holds a step, or held it before a prune.

        Raises
        ------
        StepConflictError
            The archive holds the step with other values, or it precedes the archive's last step.
        """
        where = self._writer.reader.path
        if (info := self._archived.get(step)) is not None:
            frame = self._writer.reader.frame(info.frame_id)
            keys = {spec.key for spec in self._specs(step)}
            if not (parts_of(frame).keys() >= keys and holds_content(frame, self._stored(step))):
                raise StepConflictError(
                    f"step {step} is in the archive already, with other values",
                    where=where,
                    remedy="write it to another archive, or without --part",
                )
            return True
        if not self._archived or step > max(self._archived):
            return False
        if not self._writer.reader.catalog.manifest.tombstones:
            raise StepConflictError(
                f"step {step} precedes step {max(self._archived)}, the last one in the archive",
                where=where,
                remedy="write it to another archive, or leave it out with --steps",
            )
        return True

    def append(self, step: int, count: Counter) -> Appended:
        """Write this part of one step."""

        def done(spec: TensorSpec) -> None:
            count.add(spec.nbytes, step, spec.key)

        parent = self.chain.parent
        known = parent is not None and parent.step in self._run.steps
        self.chain.before = self._stored(parent.step) if parent is not None and known else None
        # All parts must write the same kind of frame, so no part replaces a costly delta by a keyframe.
        appended = self.chain.append(self._run[step], done=done, keyframe=self.chain.keyframe_is_due)
        self._archived[step] = appended.info
        return appended
