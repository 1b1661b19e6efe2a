"""Show the contents of a run or an archive, from headers only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inshrink_core import text
from inshrink_core.checkpoint import Checkpoint, TensorsInMemory, TensorSpec, Unseen
from inshrink_core.errors import CheckFailedError, InshrinkError, MissingFrameError
from inshrink_core.metrics import ratio
from inshrink_core.report import Part, Report, parts_of, plain_value
from inshrink_core.request import Request, python_call
from inshrink_core.verbs.shared import showing
from inshrink_core.verbs.shared.groups import Reading, RunOrArchive

if TYPE_CHECKING:
    from inshrink_core.chain import Archive
    from inshrink_core.chain.sizes import StepNeeds
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo


ARCHIVE_FORMAT = "inshrink"

_FRAME: Final = ("step", "kind", "bytes", "ratio_total", "ratio_weights")
_SIZES: Final = ("raw_bytes", "archive_bytes", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Report):
    """Contents of a run, or of the newest branch of an archive.

    Parameters
    ----------
    path
        The run or the archive, as the request names it.
    facts
        The document of ``inshrink inspect --json``; `to_json` explains its keys.
    failure
        An error that does not prevent showing the rest.
    with_tensors
        Whether to list every tensor.
    """

    path: str
    facts: Mapping[str, Any]
    failure: InshrinkError | None = None
    with_tensors: bool = False

    SHOWS: ClassVar = (
        "format steps n_parameters codec optimizer_state=optimizer_state base ratio_total "
        "ratio_weights bits_per_weight raw_bytes archive_bytes originals needs "
        "bounds=bounds branches fates bytes_read roles frames=frames skipped"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink inspect --json``.

        Returns
        -------
        kind : str
            ``run`` or ``archive``.
        format : str?
            File format of the run, or ``inshrink``; None if nothing is readable.
        steps : [int]
            Training steps, ascending.
        n_parameters : int
            Number of weights at the last step; tied weights count once.
        tensors : [object]
            Tensors of all steps.
        tensors[].key : str
            Name, with ``@role`` for optimizer state.
        tensors[].role : str
            ``weight``, ``buffer``, ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``, ``momentum``, ``master``,
            ``gradient``, ``step`` or ``state``.
        tensors[].unattributed : bool
            Whether the weight of this optimizer state is unknown (docs/runs.md#whose-state-it-is).
        tensors[].dtype : str
            Torch dtype.
        tensors[].shape : [int]
            Shape at its last step.
        tensors[].layer : str?
            ``embedding``, ``attention``, ``convolution``, ``linear`` or ``vector``; None for other buffers.
        tensors[].n_steps : int
            Number of steps with this tensor.
        tensors[].raw_bytes : int
            Uncompressed bytes of the tensors.
        tensors[].codec : str
            Bitstream of the newest block; archives only.
        tensors[].archive_bytes : int
            Bytes of the blocks; archives only.
        tensors[].ratio : float
            Raw bytes over block bytes; archives only.
        roles : {object}
            Sizes by role.
        roles{}.tensors : int
            Number of tensors.
        roles{}.raw_bytes : int
            Uncompressed bytes of the tensors.
        roles{}.archive_bytes : int
            Bytes of the blocks; archives only.
        roles{}.ratio : float
            Raw bytes over block bytes; archives only.
        raw_bytes : int
            Uncompressed bytes of the tensors.
        bytes_read : int
            Bytes read from disk.
        skipped : [object]
            Files that are no step of the run.
        skipped[].path : str
            File or folder.
        skipped[].fate : str?
            Its fate (docs/runs.md#what-becomes-of-each-file); None without tensors of the run.
        skipped[].reason : str
            Why it cannot be read or was left out.
        skipped[].unreadable : bool
            Whether it is an unreadable checkpoint (docs/runs.md#unreadable-checkpoints).
        notes : [str]
            Remarks.
        fates : {int}
            Number of tensor files of the run by fate (docs/runs.md#what-becomes-of-each-file).
        unseen : Unseen
            Bytes outside parsed tensors, stored unchanged (docs/runs.md#opaque-files).
        codec : str?
            Codec of the weights.
        config : object?
            All settings of the codec.
        optimizer : str?
            How optimizer state is stored: ``exact``, ``compressed``, ``compact`` or ``drop``.
        base : BaseRecord
            Base model that the archive needs; absent if none.
        ratio_total : float
            Raw bytes over stored bytes of everything; None for an empty archive.
        ratio_weights : float
            Raw bytes over stored bytes of weights and buffers, including headers and indexes.
        bits_per_weight : float
            Mean stored bits of one weight at one step.
        archive_bytes : int
            Bytes of the frames and the manifest.
        originals : OriginalChecks
            Result of checking the original files when they were archived (docs/runs.md#checksums).
        needs : object?
            Cost of a restore, estimated from headers; None without readable frames.
        needs.memory_restore : int
            Memory for restoring the largest step.
        needs.memory_verify : int
            Memory for decoding all steps in turn, as ``verify --deep`` does.
        needs.disk_step : int
            Bytes of files of the largest step.
        needs.disk_all : int
            Bytes of files of all steps.
        n_branches : int
            Number of branches.
        branches : [object]
            Named checkpoints.
        branches[].name : str
            Name, such as ``best``.
        branches[].step : int
            Training step.
        branches[].bytes : int
            Size of the frame.
        frames : [FrameSize]
            Frames, oldest first.
        frames[].quality : object?
            Cost of a restore (docs/format.md#meta), if bounds or a prediction were asked for.
        frames[].older : {int}
            Step of each tensor that a save under a budget (docs/rehearsal.md#saves-under-a-budget) left
            unchanged; absent if none.
        missing_frames : [object]
            Committed frames without a file.
        missing_frames[].step : int
            Training step.
        missing_frames[].branch : int
            Number of the branch, from 0.
        missing_frames[].path : str
            File within the archive.
        missing_frames[].last : bool
            Whether it is the last frame of the newest branch.
        manifest_problem : str?
            Fault of the manifest; ``steps`` and ``frames`` then cover all branches.
        unreadable_frames : [str]
            Unreadable files of frames, if the manifest is unusable.
        undecodable_steps : [int]
            Steps that need a missing frame.
        """
        return dict(self.facts)

    @property
    def optimizer_state(self) -> str:
        """How an archive stores optimizer state."""
        return showing.optimizer_text(self.facts.get("optimizer"), self.facts["roles"])

    @property
    def bounds(self) -> dict[str, float]:
        """The quality bounds of the last frame that has any."""
        bounds = [quality["bounds"] for row in self.facts.get("frames", ()) if (quality := row["quality"])]
        return dict(bounds[-1]) if bounds else {}

    @property
    def frames(self) -> list[dict[str, Any]]:
        """One row per frame, with the number of tensors that a save under a budget did not update."""
        rows = []
        for row in self.facts.get("frames", ()):
            older, quality = row.get("older") or {}, row["quality"] or {}
            since = f"{len(older):,} since step {min(older.values())}" if older else ""
            cost = {"restore_cost": quality.get("restore_cost"), "how": quality.get("how", "")}
            rows.append({name: row[name] for name in _FRAME} | {"older_tensors": since} | cost)
        return rows

    @property
    def listed(self) -> list[dict[str, Any]]:
        """One row per tensor."""
        return [
            {"tensor": row["key"], "dtype": row["dtype"], "shape": text.shape(row["shape"])}
            | {"layer": "unattributed" if row["unattributed"] else row["layer"], "n_steps": row["n_steps"]}
            | {name: row[name] for name in _SIZES if name in row}
            for row in self.facts["tensors"]
        ]

    def shown(self) -> Iterator[Part]:
        """Yield the facts, the sizes by role, the frames, and the files left out with reasons."""
        yield self.facts["kind"], self.path
        yield from Report.shown(self)
        yield from parts_of("tensors", self.listed if self.with_tensors else [], most=None)
        yield from (f"note: {note}" for note in self.facts["notes"])


@dataclass(frozen=True)
class Inspect(Reading, Request[Inventory]):
    """Show steps, tensors, roles and sizes; reads headers only.

    Parameters
    ----------
    source
        A run, a checkpoint file or an archive.
    tensors
        List all tensors.

    Raises
    ------
    NotFoundError
        The path is neither a run nor an archive.

    Examples
    --------
    >>> import inshrink_core
    >>> inspect(inshrink_core.sample("digits-cnn")).facts["n_parameters"]
    44762
    """

    source: RunOrArchive
    _: KW_ONLY
    tensors: bool = False

    EXAMPLES: ClassVar = ("inshrink inspect runs/digits --tensors", "inshrink inspect digits.inshrink --json")

    def perform(self) -> Inventory:
        """Read headers."""
        from inshrink_core.chain.archive import Archive, open_any
        from inshrink_core.formats.run import NoCheckpointError

        try:
            source = self.source
            opened = open_any(source, **self.reading) if isinstance(source, str | os.PathLike) else source
        except NoCheckpointError as error:
            if not error.skipped:
                raise
            facts = _run_facts(None, error.skipped)
            return Inventory(path=str(self.source), facts=facts, failure=error)
        named = str(getattr(self.source, "path", self.source))
        if isinstance(opened, Archive):
            return replace(_inspect_archive(opened), path=named, with_tensors=self.tensors)
        return Inventory(path=named, facts=_run_facts(opened, opened.skipped), with_tensors=self.tensors)


inspect = python_call(Inspect)


def _tensor_rows(
    steps: Iterable[Iterable[tuple[TensorSpec, int, str | None]]], *, archived: bool
) -> list[dict[str, Any]]:
    """Return one row per tensor over some steps: its newest spec, and its total bytes.

    `steps` yields spec, archived bytes and bitstream of each tensor of each step. Rows are in order of first
    appearance.
    """
    rows: dict[str, dict[str, Any]] = {}
    for tensors in steps:
        for spec, archive_bytes, codec in tensors:
            row = rows.setdefault(spec.key, {"n_steps": 0, "raw_bytes": 0, "archive_bytes": 0})
            rows[spec.key] = row = {
                "key": spec.key,
                "role": spec.role.value,
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "layer": spec.layer.value if spec.layer else None,
                "unattributed": spec.is_unattributed,
                "n_steps": row["n_steps"] + 1,
                "raw_bytes": row["raw_bytes"] + spec.nbytes,
                "codec": codec,
                "archive_bytes": row["archive_bytes"] + archive_bytes,
            }
    return [_with_ratio(row, archived) for row in rows.values()]


def _roles(tensors: Iterable[Mapping[str, Any]], *, archived: bool) -> dict[str, dict[str, Any]]:
    """Return one row per role, by raw bytes, the largest first."""
    sums: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        row = sums.setdefault(tensor["role"], {"tensors": 0, "raw_bytes": 0, "archive_bytes": 0})
        row["tensors"] += 1
        row["raw_bytes"] += tensor["raw_bytes"]
        row["archive_bytes"] += tensor.get("archive_bytes", 0)
    in_order = sorted(sums.items(), key=lambda item: -item[1]["raw_bytes"])
    return {role: _with_ratio(row, archived) for role, row in in_order}


def _with_ratio(row: dict[str, Any], archived: bool) -> dict[str, Any]:
    """Return a row with its ratio; for a run, drop the keys that only an archive has."""
    if archived:
        return row | {"ratio": ratio(row["raw_bytes"], row["archive_bytes"]) or None}
    return {key: value for key, value in row.items() if key not in ("codec", "archive_bytes")}


def _run_facts(run: Run | None, skipped: Iterable[Skipped]) -> dict[str, Any]:
    """Return the document of a run, or of a directory without a checkpoint; read every header."""
    from inshrink_core.formats import Fate, Skipped

    steps, at = ((), {}) if run is None else (run.steps, run)
    directory = None if run is None else run.directory
    tensors = _tensor_rows((((spec, 0, None) for spec in at[step].specs) for step in steps), archived=False)
    beside = [
        Skipped(f"{directory}/{item.path}", f"of step {item.step}", item.fate, item.step)
        for item in (() if run is None else run.fates)
        if item.fate in (Fate.BRANCH, Fate.DUPLICATE) and not item.reason
    ]
    unseen = Unseen.of(layout for step in steps for layout in at[step].files)
    return {
        "kind": "run",
        "format": None if run is None else run.format,
        "steps": list(steps),
        "n_parameters": at[steps[-1]].n_parameters if steps else 0,
        "tensors": tensors,
        "roles": _roles(tensors, archived=False),
        "raw_bytes": sum(row["raw_bytes"] for row in tensors),
        "unseen": plain_value(unseen),
        "bytes_read": 0 if run is None else run.bytes_read,
        "fates": {} if run is None else showing.counted_fates(run),
        "skipped": [
            {"path": row.path, "fate": row.fate, "reason": row.reason, "unreadable": row.unreadable}
            for row in (*beside, *skipped)
        ],
        "notes": [] if run is None else list(run.notes),
    }


def _inspect_archive(archive: Archive) -> Inventory:
    """Return the inventory of an archive; read the index of every frame."""
    from inshrink_core.chain import WRITTEN, original_checks
    from inshrink_core.chain.config import optimizer_of
    from inshrink_core.chain.meta import MODELS, QUALITY
    from inshrink_core.chain.sizes import archive_size

    readable, broken, takes, notes = _readable(archive)
    needs = {
        "memory_restore": max((row.memory() for row in takes), default=0),
        "memory_verify": max((row.memory_in_turn for row in takes), default=0),
        "disk_step": max((row.disk for row in takes), default=0),
        "disk_all": sum(row.disk for row in takes),
    }
    sizes = archive_size(archive, readable)
    tensors = _tensor_rows(
        (((row.spec, row.nbytes, row.codec) for row in frame.tensors) for frame in sizes.frames),
        archived=True,
    )
    meta = archive.frame(readable[-1]).meta if readable else {}
    specs = tuple(tensor.spec for tensor in sizes.frames[-1].tensors) if sizes.frames else ()
    last = Checkpoint(step=0, specs=specs, source=TensorsInMemory({}), models=tuple(meta.get(MODELS, ())))
    reader, catalog = archive.reader, archive.reader.catalog
    head, problem = (reader.listed_head if catalog.is_complete else None), catalog.manifest_problem
    frames, branches = [], []
    for frame in sizes.frames:
        meta_of = archive.frame(frame.info).meta
        older = {"older": meta_of[WRITTEN]} if WRITTEN in meta_of else {}
        frames.append({**frame.to_json(), "quality": meta_of.get(QUALITY), **older})
    with suppress(InshrinkError):  # `verify` reports a damaged frame of a named checkpoint
        named = archive.branches.items()
        branches = [{"name": name, "step": info.step, "bytes": info.nbytes} for name, info in named]
    facts: dict[str, Any] = {
        "kind": "archive",
        "format": ARCHIVE_FORMAT,
        "steps": sorted({frame.step for frame in _shown(archive)}),
        "n_parameters": last.n_parameters,
        "codec": meta.get("codec"),
        "config": meta.get("config"),
        "optimizer": optimizer_of(meta) if "optimizer" in meta else None,
        **({} if sizes.base is None else {"base": plain_value(sizes.base)}),
        "ratio_weights": sizes.ratio_weights,
        "ratio_total": sizes.ratio_total,
        "bits_per_weight": sizes.bits_per_weight,
        "raw_bytes": sizes.raw_total,
        "archive_bytes": sizes.nbytes,
        "needs": needs if takes else None,
        "n_branches": len({frame.branch for frame in reader.frames if not frame.is_named}),
        "branches": branches,
        "frames": frames,
        "missing_frames": [{**lost.place, "last": lost == head} for lost in reader.missing],
        "manifest_problem": problem.what if problem else None,
        "unreadable_frames": list(catalog.unknown),
        "undecodable_steps": [info.step for info in broken],
        "tensors": tensors,
        "roles": _roles(tensors, archived=True),
        "bytes_read": archive.bytes_read,
        "skipped": [],
        "originals": original_checks(archive, readable).to_json(),
    }
    facts["notes"] = [*_notes(facts), *notes]
    return Inventory(path=reader.path, facts=facts, failure=_failure(reader.path, facts))


def _failure(path: str, facts: Mapping[str, Any]) -> CheckFailedError | None:
    """Return the error for an archive that can be shown in part."""
    from inshrink_core.archive.layout import REBUILD_REMEDY

    if facts["manifest_problem"]:
        return CheckFailedError(
            f"{facts['manifest_problem']}, and only the manifest shows whether frames are missing",
            where=path,
            remedy=REBUILD_REMEDY,
        )
    n_missing = len(facts["missing_frames"])
    if not n_missing:
        return None
    return CheckFailedError(
        "a frame is missing" if n_missing == 1 else f"{n_missing} frames are missing",
        where=path,
        remedy="fetch the files from where the archive came from, or give the frames up with "
        "`inshrink prune --forget-missing`",
    )


def _shown(archive: Archive) -> tuple[FrameInfo, ...]:
    """Return the frames of the head's history; without a manifest, which records the head, all frames."""
    return archive.frames if archive.reader.catalog.is_complete else archive.reader.frames


def _readable(archive: Archive) -> tuple[list[FrameInfo], list[FrameInfo], list[StepNeeds], list[str]]:
    """Return the readable frames, those that need a missing one, the needs of a restore, and notes."""
    from inshrink_core.chain.sizes import step_needs

    readable: list[FrameInfo] = []
    broken: list[FrameInfo] = []
    takes: list[StepNeeds] = []
    notes: list[str] = []
    shown = _shown(archive)
    archive.reader.fetch(shown)
    for info in shown:
        try:
            archive.frame(info)
        except MissingFrameError:
            broken.append(info)
            continue
        readable.append(info)
        try:
            takes.append(step_needs(archive, info))
        except InshrinkError as error:
            notes.append(f"step {info.step} cannot be restored: {error}")
    return readable, broken, takes, notes


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on frames or a manifest that are missing."""
    for lost in facts["missing_frames"]:
        last = ", the last one, from which training would continue" if lost["last"] else ""
        branch = f" on branch {lost['branch']}" if lost["branch"] else ""
        yield f"the frame of step {lost['step']}{branch} is missing ({lost['path']}){last}"
    if facts["undecodable_steps"]:
        steps = ", ".join(map(str, facts["undecodable_steps"]))
        yield f"these steps need a missing frame and cannot be decoded: {steps}"
    if facts["manifest_problem"]:
        yield f"{facts['manifest_problem']}: missing frames cannot be listed"
        yield from (f"this frame cannot be read: {path}" for path in facts["unreadable_frames"])
