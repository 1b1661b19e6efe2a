"""A run: the checkpoints of one training on disk, in step order."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, Unseen
from inshrink_core.errors import (
    InputError,
    InshrinkError,
    NotCheckpointError,
    NotFoundError,
    RefusedLinkError,
    UnreadableError,
    UnreadableStepError,
    clipped,
    spoken,
)
from inshrink_core.execution.mirror import mirror_of, mirrored
from inshrink_core.execution.threads import without_collection
from inshrink_core.formats.assembly import ParsedCheckpoint
from inshrink_core.formats.discovery import (
    METADATA,
    TRAINER_STATE,
    Discovery,
    Found,
    fixed_part,
    has_weight_suffix,
    is_weight_file,
    reason_of,
    stamps_of,
)
from inshrink_core.formats.disk import (
    CHANGED,
    Access,
    ByteCounter,
    Fate,
    FileStamp,
    ReadableFile,
    Skipped,
    is_blob,
    is_dir,
    is_file,
    is_within,
    natural_key,
)
from inshrink_core.formats.logs.log import RunSettings, TrainingLog, read_log, read_settings
from inshrink_core.formats.matching.laws import Matching
from inshrink_core.formats.matching.registered import registered_order
from inshrink_core.formats.matching.values import N_PAIRS, match_slots, same_places
from inshrink_core.formats.names import (
    compile_step_pattern,
    is_numbered,
    name_shape,
    split_step_pattern,
    step_by_pattern,
    step_in_name,
)
from inshrink_core.formats.readers import reader_of
from inshrink_core.formats.selection import Named, Selection, by_evidence, by_pattern, group_files, main_model
from inshrink_core.text import url_of

_FIRST_NBYTES: Final = 64 << 10
"""Bytes requested at both ends of each remote file before its layout is known."""

_PIECE_NBYTES: Final = 8 << 20

_UNKNOWN: Final = "neither a torch file nor safetensors: extract it, or save its tensors with torch.save"
_MAX_UNKNOWN: Final = 20


Reading = Callable[[list[Path]], Iterable[Path]]
"""Function that selects the checkpoints of a run to read (`open_run`)."""

_matchings: dict[object, Matching] = {}
"""The matching of the run that was opened last, reused when the same run is opened again."""


class NoCheckpointError(NotFoundError):
    """Raised when a run has no readable checkpoint.

    Parameters
    ----------
    skipped
        The files found, each with the reason why it is no checkpoint.
    """

    def __init__(self, what: str, *, where: str, skipped: tuple[Skipped, ...], remedy: str = "") -> None:
        self.skipped = skipped
        super().__init__(what, where=where, remedy=remedy)


def unreadable_error(
    rows: Sequence[Skipped], where: str, asked: Collection[int] | None = None
) -> UnreadableError | None:
    """Return the error that ends a verb after it read everything readable; None if all could be read.

    Parameters
    ----------
    rows
        The checkpoints that cannot be read.
    where
        The run.
    asked
        The requested steps; unreadable checkpoints of other steps are ignored. None means all steps.
    """
    concerned = [row for row in rows if asked is None or row.step in asked]
    if not concerned:
        return None
    first = concerned[0]
    step = "" if first.step is None else f" (step {first.step})"
    lost = "cannot be read" if any(row.fate is Fate.UNREADABLE for row in concerned) else "are left out"
    name = os.path.relpath(first.path, where) if is_within(first.path, where) else first.path
    more = "" if len(concerned) == 1 else f"; and {len(concerned) - 1} more"
    shown = f"{clipped(name, 200)}{step}: {clipped(first.reason, 600)}{more}"
    error = UnreadableError if asked is None else UnreadableStepError
    what, remedy = f"{len(concerned)} of the checkpoints {lost}: {shown}", "--skip-damaged goes without"
    return error(what, where=where, remedy=remedy)


def _identity(stamps: Iterable[tuple[str, FileStamp]]) -> str:
    text = "\0".join(f"{name}\0{spoken(s.real_path)}\0{s.nbytes}\0{s.mtime_ns}" for name, s in stamps)
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


class Run(Mapping[int, Checkpoint]):
    """The checkpoints of one training: a mapping from step to `Checkpoint` that loads only headers.

    `open_run` creates it. Iteration yields the steps in ascending order.

    Parameters
    ----------
    path
        The path that was opened.
    steps
        The steps, ascending.
    skipped
        The files that were passed over, with reasons.
    format
        Format of the first checkpoint: ``torch``, ``safetensors``, ``huggingface``,
        ``sharded-safetensors`` or ``dcp``.
    notes
        Remarks for the reader: where steps come from, which names were guessed.
    n_unread
        Number of possible checkpoints whose headers were not read (`open_run`, `reading`).

    Examples
    --------
    >>> import tempfile, torch
    >>> folder = tempfile.TemporaryDirectory()
    >>> for step in (10, 20):
    ...     state = {"model": {"w": torch.full((2,), float(step))}, "step": step}
    ...     torch.save(state, f"{folder.name}/{step}.pt")
    >>> run = open_run(folder.name)
    >>> run.steps, run[20]["w"].tolist()
    ((10, 20), [20.0, 20.0])
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: Path,
        selection: Selection,
        *,
        skipped: Iterable[Skipped],
        access: Access,
        reopen: Callable[..., Run],
        n_unread: int = 0,
    ) -> None:
        self._parsed = dict(sorted(selection.by_step.items()))
        self._named = selection.named
        self._access, self._reopen, self._mirror = access, reopen, mirror_of(path)
        self._accepted: dict[int, Checkpoint] = {}
        self._is_matched = False
        self.path, self.n_unread = path, n_unread
        self.steps = tuple(self._parsed)
        self.skipped = tuple(row._replace(path=spoken(row.path)) for row in skipped)
        self.notes = _notes(selection.origin, selection.by_step.values(), is_matched=False)
        self.format = next(iter(self._parsed.values())).format

    @property
    def name(self) -> str:
        """The last part of the path, without the suffix of a single file."""
        root = Path(os.path.realpath(self.path))
        return root.stem if root.is_file() else root.name

    @property
    def address(self) -> str:
        """The path or the URL of the run, for messages and reports."""
        return spoken(str(self.path))

    @property
    def is_elsewhere(self) -> bool:
        """Whether the run is behind a URL, so that its files are fetched when read."""
        return self._mirror is not None

    @property
    def requests(self) -> int:
        """Number of requests that this process sent to the run's storage; 0 for a local run."""
        return 0 if self._mirror is None else self._mirror.storage.requests

    def fetch(self, steps: Iterable[int]) -> None:
        """Prefetch whole checkpoints in the background and release all others.

        Does nothing for a local run. Data that is not prefetched is fetched when it is read.
        """
        if self._mirror is not None:
            files = (Path(s.real_path) for step in steps for s in self._at(step).stamps.values())
            self._mirror.stream(files)

    @property
    def directory(self) -> Path:
        """The directory of the run, which contains `inshrink.toml` and the log."""
        return self.path.parent if self.path.is_file() else self.path

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk so far, headers included; for a remote run, bytes fetched."""
        return self._access.counter.total if self._mirror is None else self._mirror.storage.bytes_read

    @functools.cached_property
    def settings(self) -> RunSettings:
        """The settings in ``inshrink.toml``.

        Raises
        ------
        ConfigError
            It has an unknown key or a wrong value.
        RefusedLinkError
            It is a link that leads out of the run.
        """
        return read_settings(self.directory, self._access)

    @functools.cached_property
    def log(self) -> TrainingLog:
        """The metrics that the training logged, read on first access."""
        return read_log(self.directory, [p.path for p in self._parsed.values()], self._access)

    def _at(self, step: int) -> ParsedCheckpoint:
        try:
            return self._parsed[step]
        except (KeyError, TypeError):
            below = max((s for s in self.steps if s < step), default=None)
            above = min((s for s in self.steps if s > step), default=None)
            near = " and ".join(str(s) for s in (below, above) if s is not None)
            remedy = f"the nearest {'steps are' if ' ' in near else 'step is'} {near}"
            what = f"no checkpoint of step {step}"
            raise NotFoundError(what, where=str(self.path), remedy=remedy) from None

    def matched(self, archived: Checkpoint | None = None) -> Run:
        """Return the run with its optimizer state matched to parameters by values.

        Parameters
        ----------
        archived
            The last checkpoint in an archive of the run. Its matching is used unless values clearly
            contradict it.

        Notes
        -----
        Reads a sample of the weights and moments of the first checkpoints (`N_PAIRS`), once per process.
        Returns the run unchanged where the optimizer's file names its parameters.
        """
        last = next((p for p in reversed(self._parsed.values()) if p.slots), None)
        if self._is_matched or last is None:
            return self
        known = None if archived is None else same_places(last, archived)
        alike = {step: p for step, p in self._parsed.items() if (p.slots, p.free) == (last.slots, last.free)}
        first = list(alike)[: N_PAIRS + 1]
        key = (*map(self.identity, first), repr(known))
        if key not in _matchings:
            order = () if known is None else known.order
            if not order and not last.ordered:
                order = registered_order(last, self.directory, self._access)
            neutral = {step: alike[step].matched(Matching({}, order)) for step in first}

            def read(step: int) -> Checkpoint:
                return neutral[step].checkpoint(step, self._access.counter)

            owners = None if known is None else known.owners
            found = match_slots(last, first, read, known=owners, order=order)
            _matchings.clear()
            _matchings[key] = found
        fitting = functools.partial(_fitting, last, _matchings[key])
        parsed = {step: p.matched(fitting(p)) for step, p in self._parsed.items()}
        named = tuple(item._replace(parsed=item.parsed.matched(fitting(item.parsed))) for item in self._named)
        run = self._copied(_parsed=parsed, _named=named, _accepted={}, _is_matched=True)
        run.notes = _notes(self.notes[0], parsed.values(), is_matched=True)
        return run

    @property
    def is_ordered(self) -> bool:
        """Whether the files list the tensors in the model's order; otherwise they are sorted by name.

        `matched` finds the order of sorted tensors where the model's code gives it.
        """
        last = next(reversed(self._parsed.values()), None)
        return last is None or last.ordered

    @property
    def matching_digest(self) -> str:
        """A digest of the optimizer-state matching, used as a cache key."""
        owners = [sorted(parsed.owners.items()) for parsed in self._parsed.values()]
        return hashlib.blake2b(repr(owners).encode(errors="surrogateescape"), digest_size=8).hexdigest()

    def as_archived(self, step: int, archived: Checkpoint) -> Checkpoint:
        """Return a checkpoint with the matching and the tensor order of an archived one."""
        parsed = self._at(step)
        if not parsed.slots and parsed.order == same_places(parsed, archived).order:
            return self[step]
        return self._checkpoint(parsed.matched(same_places(parsed, archived)), step)

    def _checkpoint(self, parsed: ParsedCheckpoint, step: int) -> Checkpoint:
        access = self._access
        return parsed.checkpoint(step, access.counter, allow_damaged=access.allow_damaged)

    def __getitem__(self, step: int) -> Checkpoint:
        if not self._access.allow_damaged:
            return self._checkpoint(self._at(step), step)
        if step not in self._accepted:
            self._accepted[step] = self._checkpoint(self._at(step), step)
        return self._accepted[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    # Compare runs as objects: comparing them as mappings would read every checkpoint.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, step: object) -> bool:
        return step in self._parsed

    def __repr__(self) -> str:
        return f"Run({self.address!r}, {self.format}, {len(self)} checkpoints)"

    def path_of(self, step: int) -> Path:
        """Return the file or directory of a step."""
        return self._at(step).path

    def nbytes_of(self, step: int) -> int:
        """Return the size on disk of a step's files, in bytes."""
        return self._at(step).nbytes

    def identity(self, step: int) -> str:
        """Return a digest of a checkpoint's paths, sizes and modification times, used as a cache key.

        Returns
        -------
        str
            32 hexadecimal digits; they change when a file of the checkpoint is rewritten.
        """
        return _identity(sorted(self._at(step).stamps.items()))

    def refresh(self, reading: Reading | None = None) -> Run:
        """Return the run in its current state; headers of unchanged files are not read again.

        Parameters
        ----------
        reading
            Selects the checkpoints, as in `open_run`; all by default, also those that were not read so far.
        """
        if self._mirror is not None:
            self._mirror.refresh()
        return self._reopen(reading=reading)

    def allowing_damage(self) -> Run:
        """Return the run with files accepted as they are, even if they do not match their own checksums.

        Notes
        -----
        The first access to a checkpoint reads each of its files once.
        """
        if self._access.allow_damaged:
            return self
        return self._reopen(allow_damaged=True)

    @property
    def unreadable(self) -> tuple[Skipped, ...]:
        """Checkpoints of the run that cannot be read or are left out."""
        return tuple(row for row in self.skipped if row.unreadable)

    @functools.cached_property
    def branches(self) -> Mapping[str, Checkpoint]:
        """Named checkpoints beside the steps, such as ``best``, by name.

        Notes
        -----
        Files of equal size are compared by content. For a run behind a URL, the listing is compared instead.
        """
        branches = [named for named, fate, _ in self._beside if fate is Fate.BRANCH]
        return {b.name: replace(self._checkpoint(b.parsed, b.step), branch=b.name) for b in branches}

    @functools.cached_property
    def _beside(self) -> tuple[tuple[Named, Fate, int], ...]:
        """The named checkpoints beside the steps, with their fates and steps."""
        by_size: dict[int, list[tuple[int, FileStamp]]] = {}
        for step, parsed in self._parsed.items():
            for stamp in parsed.stamps.values():
                by_size.setdefault(stamp.nbytes, []).append((step, stamp))
        rows = []
        for named in self._named:
            steps: set[int] = set(self._parsed)
            for name in (layout.path for layout in named.parsed.layouts if layout.kind != "opaque"):
                stamp = named.parsed.stamps[name]
                alike = by_size.get(stamp.nbytes, ())
                steps &= {step for step, other in alike if _content(stamp) == _content(other)}
            step = max(steps) if steps and named.step not in steps else named.step
            rows.append((named, Fate.DUPLICATE if steps else Fate.BRANCH, step))
        return tuple(rows)

    @functools.cached_property
    def fates(self) -> tuple[Skipped, ...]:
        """The fate of each tensor file under the run when it is archived, by path relative to the run.

        The step is the one that the file is archived with or equals; the name is that of its branch.
        """
        steps = [Skipped("", "", Fate.STEP, step) for step in self._parsed]
        rows = list(zip(steps, self._parsed.values(), strict=True))
        for named, fate, step in self._beside:
            row = Skipped("", "", fate, step, name=named.name if fate is Fate.BRANCH else "")
            rows.append((row, named.parsed))
        found = {row.path: row for about, parsed in rows for row in self._fates_of(parsed, about)}
        for row in self.skipped:
            if row.fate is None:
                continue
            path = Path(row.path)
            inner = path.rglob("*") if is_dir(path) else ()
            for file in sorted(file for file in inner if has_weight_suffix(file.name)) or [path]:
                name = self._relative(file)
                found.setdefault(name, row._replace(path=name, identity=""))
        return tuple(found[path] for path in sorted(found))

    def _fates_of(self, parsed: ParsedCheckpoint, about: Skipped) -> Iterator[Skipped]:
        model = {spec.key for spec in parsed.specs if spec.role in MODEL_ROLES}
        for layout in parsed.layouts:
            path = parsed.paths[layout.path]
            if layout.kind != "opaque" or has_weight_suffix(path.name) or reader_of(path, self._access):
                keys = (member.key for region in layout.regions for member in region.members)
                is_beside = about.fate is Fate.STEP and not any(key in model for key in keys)
                fate = Fate.AUXILIARY if is_beside else about.fate
                yield about._replace(path=self._relative(path), fate=fate)

    def _relative(self, path: str | os.PathLike[str]) -> str:
        root = spoken(str(self.directory))
        return os.path.relpath(spoken(os.fspath(path)), root).replace(os.sep, "/")

    def without_branch(self, name: str, error: InshrinkError) -> Run:
        """Return the run without a named checkpoint that cannot be read, and record the error."""
        (lost,) = (item for item in self._named if item.name == name)
        path = lost.parsed.path
        row = Skipped(spoken(str(path)), reason_of(path, error), Fate.UNREADABLE)
        rest = tuple(item for item in self._named if item is not lost)
        return self._copied(_named=rest, skipped=(*self.skipped, row))

    def _copied(self, **changes: Any) -> Run:
        """Return a copy with other attributes, without the cached properties that depend on them."""
        run = copy.copy(self)
        for cached in ("branches", "fates", "_beside"):
            run.__dict__.pop(cached, None)
        run.__dict__.update(changes, steps=tuple(changes.get("_parsed", self._parsed)))
        return run

    def readable(self, steps: Iterable[int]) -> Run:
        """Return the run without the given steps that cannot be read completely.

        Those steps become part of its `unreadable`.

        Notes
        -----
        Reads every byte of these steps and verifies its checksums.
        """
        rows: dict[int, Skipped] = {}
        for step in steps:
            parsed = self._at(step)
            try:
                checkpoint = self[step]
                for spec in checkpoint.specs:
                    checkpoint.source.read(spec)
                for file in checkpoint.files:
                    checkpoint.source.skeleton(file)
            except InshrinkError as error:
                path, reason = spoken(str(parsed.path)), reason_of(parsed.path, error)
                fate = Fate.PENDING if error.what == CHANGED else Fate.UNREADABLE
                rows[step] = Skipped(path, reason, fate, step, self.identity(step))
        if not rows:
            return self
        rest = {step: parsed for step, parsed in self._parsed.items() if step not in rows}
        return self._copied(_parsed=rest, skipped=(*self.skipped, *rows.values()))


@functools.lru_cache(maxsize=1 << 12)
def _content(stamp: FileStamp) -> str:
    """Return a digest of a file's bytes; for a remote file, of its size and entity tag in the listing."""
    if mirror_of(stamp.real_path) is not None:
        return f"{stamp.nbytes} {stamp.mtime_ns % 10**9}"  # the nanoseconds encode the entity tag
    digest = hashlib.blake2b(digest_size=16)
    try:
        with ReadableFile(Path(stamp.real_path), ByteCounter(), stamp) as file:
            for at in range(0, file.nbytes, _PIECE_NBYTES):
                digest.update(file.read(at, min(_PIECE_NBYTES, file.nbytes - at)))
    except InshrinkError:  # treated as unique; archiving the file raises the error
        return stamp.real_path
    return digest.hexdigest()


def _fitting(last: ParsedCheckpoint, matching: Matching, parsed: ParsedCheckpoint) -> Matching:
    """Return the matching of `last` for another checkpoint, or its own if its optimizer numbers others."""
    if (parsed.slots, parsed.free) == (last.slots, last.free):
        return matching
    numbered = [[slot._replace(shape=None) for slot in item.slots] for item in (last, parsed)]
    owned = ((slot.shape, parsed.free.get(matching.owners.get(slot.key, ""))) for slot in parsed.slots)
    fits = numbered[0] == numbered[1] and all(None in pair or pair[0] == pair[1] for pair in owned)
    return matching if fits else Matching(parsed.owners, matching.order)


def _notes(origin: str, parsed: Iterable[ParsedCheckpoint], *, is_matched: bool) -> tuple[str, ...]:
    """Return the run's notes: origin of steps, opaque files, number of parameters with unmatched state."""
    checkpoints = list(parsed)
    most, of = max([(len(p.slots) - len(p.owners), len(p.slots)) for p in checkpoints], default=(0, 0))
    unseen = Unseen.of(layout for checkpoint in checkpoints for layout in checkpoint.layouts).text
    why = "its owner is not certain" if is_matched else "compress compares values to find its owner"
    lost = f"optimizer state of {most} of {of} parameters is unattributed: {why}"
    return (origin, *([unseen] if unseen else []), *([lost] if most else []))


def _failed(
    discovery: Discovery,
    found: Sequence[Found],
    by_step: Mapping[int, ParsedCheckpoint],
    pattern: str | None,
    access: Access,
) -> Iterator[Skipped]:
    """Yield the files that are no step because they cannot be read as checkpoints.

    A file counts as an unreadable checkpoint if a reader detects it and its content does not rule that out,
    or if its name has the pattern of the readable checkpoints. A step pattern decides by name alone.
    """
    root = str(discovery.root)

    def shape(path: Path) -> str:
        return name_shape(str(path).removeprefix(root))

    def number(path: Path) -> int | None:
        return step_in_name(path.name) if pattern is None else step_by_pattern(path.name, pattern)

    shapes = {name for item in by_step.values() if "*" in (name := shape(item.path))}
    are_steps = all(number(item.path) in (None, step) for step, item in by_step.items())

    def unreadable(path: Path, reason: str, stamps: Iterable[FileStamp]) -> Skipped:
        step = number(path) if are_steps else None
        seen = _identity((stamp.real_path, stamp) for stamp in stamps)
        return Skipped(str(path), reason, Fate.UNREADABLE, step, seen)

    for candidate in found:
        path, error = candidate.path, candidate.error
        if error is None:
            continue
        reason = reason_of(path, error)
        yield from (Skipped(str(m), reason, Fate.UNREADABLE) for m in candidate.members if m != path)
        never = isinstance(error, NotCheckpointError) and shape(path) not in shapes
        if never or (pattern is not None and number(path) is None):
            yield Skipped(str(path), reason)
        else:
            yield unreadable(path, reason, candidate.stamps)
    read = {candidate.path for candidate in found}
    for path in discovery.others:
        if path not in read and shape(path) in shapes and (pattern is None or number(path) is not None):
            yield unreadable(path, *_undetected(path, access))


def _undetected(path: Path, access: Access) -> tuple[str, tuple[FileStamp, ...]]:
    """Return the reason why no reader detects a path that is named like a checkpoint, and its stamps."""
    try:
        stamps = stamps_of(path, access)
    except InshrinkError as error:
        return "a link that leads nowhere" if path.is_symlink() else reason_of(path, error), ()
    if is_dir(path):
        return "no checkpoint in it, unlike in others of such a name", stamps
    return "no checkpoint, unlike others of such a name" if stamps[0].nbytes else "the file is empty", stamps


@without_collection()
def _open(
    path: str,
    pattern: str | None,
    *,
    known: Mapping[tuple[Path, ...], Found],
    reading: Reading | None,
    **options: Any,
) -> Run:
    if pattern is not None:
        compile_step_pattern(pattern)
    access = _access(path, **options)
    discovery = Discovery(path, access)
    root = discovery.root
    _expect(discovery, known, access)
    of_file = replace(access, root=os.path.realpath(root)) if discovery.single else access
    by_path = {candidate.path: candidate for candidate in discovery.found}
    chosen = [*by_path] if reading is None else reading([*by_path])
    read = {path: by_path[path].read(known, of_file) for path in chosen}
    found = [candidate for candidate in discovery.found if candidate.path in read]
    n_unread = len(by_path) - len(found)
    if discovery.single and found and (error := found[0].error) is not None:
        raise error
    seen = {candidate.key: candidate for candidate in found}
    for group in group_files(found, root) if not discovery.single else ():
        seen[group.key] = group.read(known, access)
        inside = {*group.members, *(member.parent for member in group.members)}
        found = [*(candidate for candidate in found if candidate.path not in inside), group]
    parsed = [candidate.parsed for candidate in found if candidate.parsed is not None]
    passed: list[Skipped] = []
    main, partial = main_model(sorted(parsed, key=lambda candidate: natural_key(str(candidate.path))), passed)
    if pattern is not None:
        choice = by_pattern([*main, *partial], pattern, passed)
    else:
        choice = by_evidence(main, partial, root)
    failed = list(_failed(discovery, found, choice.by_step, pattern, access))
    named = {row.path for row in failed}
    skipped = [*failed, *(row for row in discovery.skipped if row.path not in named), *passed]
    if not choice.by_step:
        unknown = (other for other in discovery.others if is_file(other) and is_numbered(other.name))
        first = islice(unknown, _MAX_UNKNOWN)
        skipped += [Skipped(str(path), _UNKNOWN, Fate.UNREADABLE) for path in first]
        more = f": {len(skipped)} passed over, the first because {skipped[0].reason}" if skipped else ""
        rows = tuple(row._replace(path=spoken(row.path)) for row in skipped)
        remedy = "give a directory, a glob or a file of torch (.pt .pth .bin .ckpt) or safetensors files"
        raise NoCheckpointError(f"no readable checkpoint{more}", where=path, skipped=rows, remedy=remedy)
    skipped += [row for candidate in choice.by_step.values() for row in candidate.skipped]
    reopen = functools.partial(_open, path, pattern, known=seen, reading=None, **options)
    return Run(root, choice, skipped=skipped, access=access, reopen=reopen, n_unread=n_unread)


def _expect(discovery: Discovery, known: Mapping[tuple[Path, ...], Found], access: Access) -> None:
    """Prefetch the headers of all checkpoints of a remote run in one batch."""
    mirror = mirror_of(discovery.root)
    if mirror is None:
        return
    asked: list[tuple[Path, int, int]] = []
    for candidate in discovery.found:
        before = known.get(candidate.key)
        if before is not None and before.stamps == stamps_of(candidate.path, access):
            continue
        places = [candidate.path] if is_file(candidate.path) else sorted(candidate.path.rglob("*"))
        for place in filter(is_file, places):
            if is_weight_file(place.name):
                asked.append((place, _FIRST_NBYTES, 0 if place.suffix == ".safetensors" else _FIRST_NBYTES))
            elif place.name in (METADATA, TRAINER_STATE) or place.name.endswith(".index.json"):
                asked.append((place, place.stat().st_size, 0))
    mirror.expect(asked)


def _access(path: str, *, within: Sequence[str] | None, **options: Any) -> Access:
    """Return the access rights for a run; the run itself may be a link because the user chose it.

    Raises
    ------
    RefusedLinkError
        The run is outside the allowed directories.
    """
    access = Access.of(fixed_part(path), within=within or (), **options)
    if within is not None:
        # Accept a blob of the Hugging Face cache anywhere if the snapshot that links to it is inside.
        named = Path(path) if os.path.lexists(path) else fixed_part(path)
        folder, real = os.path.realpath(named.parent), os.path.realpath(named)
        inside = [any(is_within(item, root) for root in access.within) for item in (real, folder)]
        if not (inside[0] or (inside[1] and is_blob(real, folder))):
            raise RefusedLinkError("outside of the directories that may be opened", where=path)
    return access


def open_run(
    path: str | os.PathLike[str],
    *,
    step_pattern: str | None = None,
    follow_links: bool = False,
    allow_damaged: bool = False,
    within: Iterable[str | os.PathLike[str]] | None = None,
    reading: Reading | None = None,
) -> Run:
    """Open the checkpoints of a training; reads only headers and does not import torch.

    Parameters
    ----------
    path
        A directory, a glob, a checkpoint file, or a directory that is one checkpoint; or a directory and a
        step pattern with ``{step}`` as its last part. A URL such as ``s3://BUCKET/RUN`` works as well.
    step_pattern
        How names contain the step number: ``model_ep{step}_*.pt``. Overrides the steps in the files.
    follow_links
        Also follow links out of the run. Links inside the run, and links of the Hugging Face cache to its
        blobs, are always followed; the path itself may be a link.
    allow_damaged
        Accept files that do not match their own checksums; an archive of them records the damage.
    within
        Directories that must contain the run after links are resolved; links may lead anywhere inside
        them. By default the run may be anywhere.
    reading
        Selects the checkpoints to read: a function that takes the paths of all possible checkpoints, in
        natural order, and yields those to read, each just before it is read. By default all are read. Steps
        and unreadable checkpoints are those of the selection; `Run.n_unread` counts the rest, and
        `Run.refresh` reads it.

    Returns
    -------
    Run
        The steps, the skipped files with reasons, and the checkpoints themselves.

    Raises
    ------
    NoCheckpointError
        Nothing there is readable; its `skipped` lists the files found. A subclass of NotFoundError.
    RefusedLinkError
        Tensors are behind a link out of the run, or the run is outside `within`.
    DamagedError, UnsafePickleError, InputError
        The only checkpoint cannot be read; in a run of several it is added to `unreadable` instead.
    InputError
        The files belong to two different models, or two step patterns are given.
    ConfigError
        The step pattern is invalid.

    Notes
    -----
    Takes a few milliseconds per checkpoint. Reads only the zip directory and ``data.pkl``, or the
    safetensors header, of each file.
    """
    url = url_of(path)
    if url is not None:
        if within is not None:
            raise RefusedLinkError("outside of the directories that may be opened", where=url)
        _, path = mirrored(url)
    place, in_path = split_step_pattern(path)
    if in_path is not None and step_pattern is not None:
        raise InputError("two step patterns", where=os.fspath(path), found=clipped(step_pattern))
    return _open(
        os.fspath(path if in_path is None else place),
        step_pattern if in_path is None else in_path,
        known={},
        counter=ByteCounter(),
        follow_links=follow_links,
        allow_damaged=allow_damaged,
        within=None if within is None else tuple(map(os.fspath, within)),
        reading=reading,
    )
