"""Pruning: plan which frames to keep, re-key or remove, and rewrite the archive."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inshrink_core.archive import FrameWriter
from inshrink_core.archive.maintenance import Rewrite
from inshrink_core.chain.archive import Archive
from inshrink_core.chain.attachments import (
    DROPPED,
    attachments_of,
    dropped_of,
    encode_attachments,
    stored_view,
    tensor_digest,
)
from inshrink_core.chain.base import BASE, BaseRecord
from inshrink_core.chain.meta import METRICS, spec_of
from inshrink_core.chain.sizes import frame_size
from inshrink_core.checkpoint import Checkpoint, TensorSpec
from inshrink_core.codec import TensorReference, codec_for_block
from inshrink_core.errors import (
    IncompatibleError,
    InputError,
    NotFoundError,
    clipped,
    named,
)
from inshrink_core.execution.progress import Counter, OnProgress
from inshrink_core.formats import open_run, read_metrics
from inshrink_core.formats.logs.log import log_of_trainer
from inshrink_core.frame import Block, BlockEntry, FrameInfo, FrameKind
from inshrink_core.retention import Retention

if TYPE_CHECKING:
    from inshrink_core.archive import ArchiveReader, ArchiveWriter
    from inshrink_core.chain.base import BaseFinder

_TRAINER_STATE: Final = "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class PruneRules(Retention):
    """A retention policy with the user's additional choices.

    Parameters
    ----------
    log
        Source of metrics (`measured`).
    keep
        Steps to keep.
    drop_branches
        Keep only the history of the newest branch.
    stand_alone
        Re-key the frames that are encoded relative to a base model.
    """

    log: Any = None
    keep: Sequence[int] = ()
    drop_branches: bool = False
    stand_alone: bool = False

    @property
    def thins(self) -> bool:
        """Whether a rule selects the steps to keep."""
        return super().thins or bool(self.keep)


def carry_out(
    writer: ArchiveWriter,
    rules: PruneRules,
    device: str = "cpu",
    bases: BaseFinder | None = None,
    needed: Collection[bytes | None] = (),
    progress: OnProgress | None = None,
) -> PrunePlan:
    """Plan under the writer's lock, write new frames, switch, delete; frames with `needed` ids are kept.

    Raises
    ------
    InputError, NotFoundError, MissingFrameError, DamagedError, BaseModelError, StorageError
        The rules do not apply, a frame or the base model is not usable, or storage failed. The archive is
        unchanged.
    """
    archive = Archive(writer.reader, device=device, bases=bases)
    plan = make_plan(archive, rules, needed)
    if not plan.changes:
        return plan
    gone = (*plan.removed, *writer.reader.catalog.superseded)
    again = (*plan.copied, *plan.rekeyed)
    nbytes = {info.frame_id: frame_size(archive, info).raw_total for info in again} if progress else {}
    count = Counter(progress, "prune", sum(nbytes.values()))
    deltas = [info for info in plan.copied if info.kind is FrameKind.DELTA]

    def report(step: int, spec: TensorSpec) -> None:
        count.add(spec.nbytes, step, spec.key)

    with Rewrite(writer, again) as rewrite:
        # Copies first: they inherit no state, so each decodes beside either version of its parent.
        for frames, alone in ((plan.copied, False), (plan.rekeyed, True)):
            view = archive.sequential()
            for info in frames:
                parent_id, rest = plan.parents[info.frame_id], plan.reduced.get(info.frame_id)
                meta = archive.frame(info).meta if rest is None else rest.meta
                with rewrite.begin(
                    info.frame_id,
                    kind=FrameKind.KEYFRAME if alone else info.kind,
                    parent_id=parent_id,
                    external=not alone and archive.base_of(info) is not None,
                ) as frame:
                    rewrite_tensors(
                        *(view, info, frame, partial(report, info.step)),
                        view=None if rest is None else rest.view,
                        rekeyed=None if alone else plan.rekeyed_tensors.get(info.frame_id, ()),
                        children=[delta for delta in deltas if delta.parent_id == info.frame_id],
                    )
                    for key, codec, payload in _attachments(archive, info, plan, alone=alone):
                        frame.add(key, codec, payload, attachment=True)
                    frame.commit({**meta, REKEYED: info.frame_id} if alone else meta)
        rewrite.switch(gone)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """The fate of every frame under the rules.

    Parameters
    ----------
    kept
        Frames that the rules keep.
    references
        Further frames that stay because training was restored from them.
    removed
        Frames to remove.
    rekeyed
        Remaining frames that become keyframes with the same bits.
    copied
        Remaining frames that are rewritten with the same tensors.
    parents
        New parent of each rewritten frame, by id.
    lost_origins
        Remaining frames that record a restore from a removed frame.
    why
        The rules that keep each frame, by id.
    reduced
        Remaining content of frames that lose their optimizer state, by id.
    rekeyed_tensors
        By frame id, keys of the optimizer tensors that are re-keyed within a delta frame, since its reference
        loses them.
    """

    kept: tuple[FrameInfo, ...]
    references: tuple[FrameInfo, ...]
    removed: tuple[FrameInfo, ...]
    rekeyed: tuple[FrameInfo, ...]
    copied: tuple[FrameInfo, ...]
    parents: Mapping[bytes, bytes | None]
    lost_origins: tuple[FrameInfo, ...]
    why: Mapping[bytes, tuple[str, ...]]
    reduced: Mapping[bytes, Rest]
    rekeyed_tensors: Mapping[bytes, frozenset[str]]

    @property
    def changes(self) -> bool:
        """Whether a frame is removed or rewritten."""
        return bool(self.removed or self.rekeyed or self.reduced)

    @property
    def remaining(self) -> tuple[FrameInfo, ...]:
        """The remaining frames, in the order of writing."""
        return tuple(sorted((*self.kept, *self.references), key=lambda frame: frame.generation))

    @property
    def stripped(self) -> tuple[FrameInfo, ...]:
        """The remaining frames that lose their optimizer state."""
        return tuple(frame for frame in self.remaining if frame.frame_id in self.reduced)


_ORIGIN: Final = "training was restored from it"


def make_plan(archive: Archive, rules: PruneRules, needed: Collection[bytes | None] = ()) -> PrunePlan:
    """Plan the pruning of an archive; reads only indexes.

    Frames with needed ids stay like those from which training was restored.

    Raises
    ------
    NotFoundError
        A step to keep does not exist, or the archive is empty.
    MissingFrameError
        The file of a frame is missing, so its dependants are unknown.
    """
    reader = archive.reader
    reader.require_complete("fetch its file from where the archive came from, or use --forget-missing")
    if not reader.frames:
        raise NotFoundError("the archive holds no steps yet", where=reader.path)
    why, tips = _reasons(archive, rules), _tips(reader, rules)
    frames = {frame.frame_id: frame for frame in sorted(reader.frames, key=lambda frame: frame.generation)}
    origins = {frame_id: archive.frame(frame).meta.get("restored") for frame_id, frame in frames.items()}
    # The next frame of a branch is coded against the step from which its training was last restored.
    needed = frames.keys() & {*needed, *(origins[tip.frame_id] for tip in tips)}
    reasons = {frame_id: (_ORIGIN,) for frame_id in needed} | why
    remaining = [frame for frame_id, frame in frames.items() if frame_id in reasons]
    deltas = [frame for frame in remaining if frame.kind is FrameKind.DELTA]
    gone = frames.keys() - reasons.keys()
    parents: dict[bytes, bytes | None] = {}
    for frame in remaining:
        if frame.parent_id in gone:
            line = (earlier.frame_id for earlier in reversed(reader.history(frame.frame_id)[:-1]))
            parents[frame.frame_id] = next((frame_id for frame_id in line if frame_id not in gone), None)
    rekeyed = {frame.frame_id for frame in deltas if frame.frame_id in parents}
    if rules.stand_alone:
        rekeyed |= {frame.frame_id for frame in remaining if archive.base_of(frame) is not None}
    reduced = _reduced(archive, rules, reasons.keys())
    rekeyed_tensors = {
        f.frame_id: reduced[f.parent_id].dropped.intersection(entry.key for entry in archive.frame(f).entries)
        for f in deltas
        if f.parent_id in reduced and f.frame_id not in rekeyed | reduced.keys()
    }
    # A delta frame's index omits what it shares with its parent's, so a new parent needs a new index.
    other = rekeyed | reduced.keys() | rekeyed_tensors.keys()
    again = other | parents.keys() | {frame.frame_id for frame in deltas if frame.parent_id in other}
    last = {frame.branch: frame.frame_id for frame in remaining}
    again |= {last[frame.branch] for frame in remaining if frame.frame_id in again}
    return PrunePlan(
        kept=tuple(frame for frame in remaining if frame.frame_id in why),
        references=tuple(frame for frame in remaining if frame.frame_id not in why),
        removed=tuple(frame for frame_id, frame in frames.items() if frame_id in gone),
        rekeyed=tuple(frame for frame in remaining if frame.frame_id in rekeyed),
        copied=tuple(frame for frame in remaining if frame.frame_id in again - rekeyed),
        parents={frame_id: frames[frame_id].parent_id for frame_id in again} | parents,
        lost_origins=tuple(frame for frame in remaining if origins[frame.frame_id] in gone),
        why=reasons,
        reduced=reduced,
        rekeyed_tensors=rekeyed_tensors,
    )


def _reduced(archive: Archive, rules: PruneRules, remaining: Collection[bytes]) -> dict[bytes, Rest]:
    """Return the remaining content of the frames that lose their optimizer state, by id."""
    if rules.optimizer_last is None:
        return {}
    reader = archive.reader
    complete: set[bytes] = set()
    for tip in _tips(reader, rules):
        line = [f.frame_id for f in reader.history(tip.frame_id) if f.frame_id in remaining]
        complete |= set(line[-rules.optimizer_last :])
    shrinking = [f for f in reader.frames if f.frame_id in remaining and f.frame_id not in complete]
    found = {f.frame_id: without_state(archive, f) for f in shrinking}
    return {frame_id: rest for frame_id, rest in found.items() if rest is not None}


def _tips(reader: ArchiveReader, rules: PruneRules) -> list[FrameInfo]:
    """Return the last frame of each branch to keep."""
    last = {frame.branch: frame for frame in reader.frames}  # by ascending generation
    head = reader.head
    return [head] if rules.drop_branches and head is not None else list(last.values())


def _reasons(archive: Archive, rules: PruneRules) -> dict[bytes, tuple[str, ...]]:
    """Return the rules that keep each frame, by id."""
    reader = archive.reader
    reasons_of: dict[bytes, dict[str, None]] = {}
    found: set[int] = set()
    for tip in _tips(reader, rules):
        line = (tip,) if tip.is_named else reader.history(tip.frame_id)
        for reason, frames in _chosen(archive, rules, line):
            for frame in frames:
                reasons_of.setdefault(frame.frame_id, {})[reason] = None
        found |= {frame.step for frame in line}
    for step in rules.keep:
        if step not in found:
            raise NotFoundError(
                f"there is no frame of step {step} to keep",
                where=reader.path,
                remedy="`inshrink inspect` lists the steps",
            )
    return {frame_id: tuple(reasons) for frame_id, reasons in reasons_of.items()}


def _chosen(
    archive: Archive, rules: PruneRules, line: tuple[FrameInfo, ...]
) -> Iterator[tuple[str, Iterable[FrameInfo]]]:
    """Yield the name of each rule and the frames of a line of training that it keeps."""
    if not rules.thins:
        yield "no rule removes it", line
    if rules.keep_last is not None:
        yield f"the last {rules.keep_last}", sorted(line, key=lambda f: f.step)[-rules.keep_last :]
    if rules.keep_every is not None:
        yield f"every {rules.keep_every}", [f for f in line if f.step % rules.keep_every == 0]
    yield "named", [f for f in line if f.step in rules.keep]
    values = measured(archive, line, [rule.metric for rule in rules.best], rules.log) if rules.best else {}
    for rule in rules.best:
        there = [frame for frame in line if frame.frame_id in values[rule.metric]]
        # Of equal values prefer the later step, which has trained longer.
        there.sort(key=lambda f: (rule.direction.cost(values[rule.metric][f.frame_id]), -f.step))
        yield f"the best {rule.n} of {rule.metric}", there[: rule.n]
    yield "training continues there", line[-1:]


def measured(
    archive: Archive, line: Sequence[FrameInfo], metrics: Sequence[str], log: Any = None
) -> dict[str, dict[bytes, float]]:
    """Return the metric values at each frame of a line of training, by metric and frame id.

    Parameters
    ----------
    archive
        The archive.
    line
        Its frames, in order.
    metrics
        Names of the metrics.
    log
        The training log, its file, or the run. By default the metrics in the frames are used: those given to
        the saver, and the log in the trainer's state.

    Raises
    ------
    InputError
        A metric has no value at any step.

    Notes
    -----
        The value of a step is the last one logged at or before it and after the previous step.
    """
    known: set[str] = set()
    found: dict[str, dict[bytes, float]] = {name: {} for name in metrics}
    logged: Mapping[str, list[tuple[int, float]]] = {}
    if log is not None:
        path = None if isinstance(log, Mapping) else Path(log)
        logged = log if path is None else open_run(path).log if path.is_dir() else read_metrics(path)
    else:
        for frame in line:
            recorded = archive.frame(frame).meta.get(METRICS, {})
            known |= recorded.keys()
            for name in found.keys() & recorded.keys():
                if not math.isnan(recorded[name]):
                    found[name][frame.frame_id] = recorded[name]
        logged = {} if all(found.values()) else _logged(archive, line)
    known |= logged.keys()
    for name in metrics:
        pairs = [pair for pair in logged.get(name, ()) if not math.isnan(pair[1])]
        steps = [step for step, _ in pairs]
        before = -1
        for frame in line:
            at = bisect.bisect_right(steps, frame.step) - 1
            if at >= 0 and steps[at] > before:
                found[name].setdefault(frame.frame_id, pairs[at][1])
            before = frame.step
        if not found[name]:
            raise InputError(
                f"no step has a value of '{clipped(name)}'",
                where=archive.reader.path,
                found=named(sorted(known)) if known else "no metrics",
                remedy="give what the training logged, or its run: --log FILE",
            )
    return found


def _logged(archive: Archive, line: Sequence[FrameInfo]) -> Mapping[str, list[tuple[int, float]]]:
    """Return the log from the newest trainer state, which has the complete history."""
    for frame in reversed(line):
        for entry in archive.frame(frame).attached:
            if entry.key.rpartition("/")[2] == _TRAINER_STATE:
                return log_of_trainer(archive.attachment(frame, entry.key), archive.where(frame))
    return {}


REKEYED: Final = "rekeyed"
"""Meta key: the id of a frame that was re-encoded from decoded values. Later frames inherit the key; the id
shows that it does not refer to them."""


class Rest(NamedTuple):
    """A frame without its optimizer state.

    Parameters
    ----------
    view
        The remaining checkpoint.
    meta
        The new meta, with a record of the dropped tensors.
    """

    view: Checkpoint
    meta: Mapping[str, Any]

    @property
    def dropped(self) -> frozenset[str]:
        """Keys of the tensors that are dropped now or were dropped before."""
        return frozenset(key for keys in self.meta[DROPPED][1] for key in keys)


def without_state(archive: Archive, info: FrameInfo) -> Rest | None:
    """Return a frame without its optimizer state; None if it has none.

    Files that contain optimizer state are dropped too, as in archiving without it (`stored_view`).
    """
    frame, checkpoint = archive.frame(info), archive.checkpoint(info)
    view = stored_view(checkpoint, "drop")
    remaining = _blocks_of(archive, info, view)
    dropped = [list(keys) for keys in dropped_of(frame)] or [[] for _ in range(info.n_parts)]
    for entry in frame.tensors:
        if entry.key not in remaining and entry.key not in dropped[entry.part]:
            dropped[entry.part].append(entry.key)
    meta = {**frame.meta, DROPPED: [info.frame_id, dropped]}
    if BASE in meta:
        meta[BASE] = BaseRecord.without(meta[BASE], [spec.key in remaining for spec in checkpoint.specs])
    return None if len(view) == len(checkpoint) else Rest(view, meta)


def _blocks_of(archive: Archive, info: FrameInfo, view: Checkpoint) -> set[str]:
    """Return the keys of the blocks of a view's tensors; cells have separate keys."""
    return {entry.key for spec in view.specs for entry in archive.blocks(info, spec.key)}


def _attachments(
    archive: Archive, info: FrameInfo, plan: PrunePlan, *, alone: bool
) -> Iterator[tuple[str, str, bytes]]:
    """Yield the attachments of a rewritten frame, encoded anew if the frame or another one loses state."""
    if alone or plan.reduced:
        parent = None if alone or info.kind is FrameKind.KEYFRAME else plan.parents[info.frame_id]
        previous = None if parent is None else _stored(archive, archive.reader.info(parent), plan)
        yield from encode_attachments(_stored(archive, info, plan), previous)
        return
    frame = archive.frame(info)
    yield from ((e.key, e.codec, frame.read(e)) for e in frame.attached)


def _stored(archive: Archive, info: FrameInfo, plan: PrunePlan) -> dict[str, bytes]:
    """Return the attachments of a frame, or of the frame without its optimizer state."""
    rest = plan.reduced.get(info.frame_id)
    if rest is not None:
        return dict(attachments_of(rest.view))
    return {entry.key: archive.attachment(info, entry.key) for entry in archive.frame(info).attached}


def rewrite_tensors(
    archive: Archive,
    info: FrameInfo,
    target: FrameWriter,
    done: Callable[[TensorSpec], object],
    *,
    view: Checkpoint | None = None,
    rekeyed: Collection[str] | None = None,
    children: Sequence[FrameInfo] = (),
) -> None:
    """Write the tensors of a frame anew; each decodes to the same bits as before.

    Parameters
    ----------
    archive
        The archive; pass a sequential view to rewrite several frames of one chain in order.
    info, target
        The frame, and the frame to write.
    done
        Called after each tensor.
    view
        The part of the frame's checkpoint to write; None for all of it.
    rekeyed
        Keys of tensors to re-key: they are decoded, encoded, and compared. None for all.
    children
        Delta frames whose reference becomes the new frame.

    Raises
    ------
    IncompatibleError
        A codec broke its contract: the new block, or a child's block upon it, does not decode to the old
        bits.
    DamagedError, MissingFrameError
        The frame cannot be decoded.
    StorageError
        Writing failed.

    Notes
    -----
        Memory is bounded by a few copies of the largest tensor, plus the archive's cached states.
    """
    frame, where = archive.frame(info), archive.where(info)
    remaining = None if view is None else _blocks_of(archive, info, view)
    for entry in frame.tensors:
        if remaining is None or entry.key in remaining:
            spec = spec_of(entry, where)
            if rekeyed is None or entry.key in rekeyed:
                block = _rekeyed(archive, info, spec, entry, children)
            else:
                block = Block(entry.codec, frame.read(entry))
            target.add(entry.key, block.codec, block.payload, attributes=entry.attributes)
            done(spec)


def _rekeyed(
    archive: Archive, info: FrameInfo, spec: TensorSpec, entry: BlockEntry, children: Sequence[FrameInfo]
) -> Block:
    """Return a standalone block, after a check that it and the children's blocks decode as before."""
    where = f"{archive.where(info)}, tensor '{entry.key}'"
    tensor, reference = archive.decode(info, entry.key)
    block = codec_for_block(entry.codec, where).rekey(spec, reference)
    decoded = codec_for_block(block.codec, where).decode(spec, block, None, archive.device)
    digests = [
        [tensor_digest(state), *(_child_digest(archive, child, entry.key, upon) for child in children)]
        for state, upon in ((tensor, reference), (decoded.decoded(), decoded))
    ]
    if digests[0] != digests[1]:
        raise IncompatibleError(
            f"the codec of '{block.codec}' does not re-key this tensor to the same bits",
            where=where,
            remedy="keep the frames before it, and report this",
        )
    return block


def _child_digest(archive: Archive, child: FrameInfo, key: str, reference: TensorReference) -> bytes:
    """Return the digest of a child's tensor decoded upon a reference; empty if the child has none."""
    frame = archive.frame(child)
    if (entry := frame.find(key)) is None:
        return b""
    where = archive.where(child)
    codec = codec_for_block(entry.codec, where)
    block = Block(entry.codec, frame.read(entry))
    return tensor_digest(codec.decode(spec_of(entry, where), block, reference, archive.device).decoded())
