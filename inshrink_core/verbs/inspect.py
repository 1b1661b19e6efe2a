"""What is in a run or an archive, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inshrink_core import text
from inshrink_core.checkpoint import Checkpoint, TensorsInMemory, Unseen
from inshrink_core.errors import CheckFailedError, InshrinkError, MissingFrameError
from inshrink_core.metrics import ratio
from inshrink_core.report import Columns, Part, Report, Table, plain_value
from inshrink_core.request import Request, python_call
from inshrink_core.verbs.shared import showing
from inshrink_core.verbs.shared.groups import Reading, RunOrArchive

if TYPE_CHECKING:
    from inshrink_core.chain import Archive, ArchiveSize
    from inshrink_core.checkpoint import TensorSpec
    from inshrink_core.formats import Run, Skipped
    from inshrink_core.frame import FrameInfo


ARCHIVE_FORMAT = "inshrink"

_MOST_FRAMES: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Report):
    """What a run or an archive holds.

    Parameters
    ----------
    path
        The run or the archive, as it was named.
    facts
        The document of ``inshrink inspect --json``, whose keys docs/json.md explains.
    failure
        What is wrong with it although it can be shown.
    with_tensors
        Whether every tensor is shown.
    size
        Sizes of an archive.
    """

    path: str
    facts: Mapping[str, Any]
    failure: InshrinkError | None = None
    with_tensors: bool = False
    size: ArchiveSize | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink inspect --json``."""
        return dict(self.facts)

    def shown(self) -> Iterator[Part]:
        """Yield the facts, the sizes by role, the frames, and what was left out and why."""
        facts, archived = self.facts, self.facts["kind"] == "archive"
        sizes = {"raw": text.size} | ({"archived": text.size, "ratio": text.ratio} if archived else {})
        keys = ("raw_bytes", "archive_bytes", "ratio")[: len(sizes)]
        if facts["steps"] or archived:
            yield from _facts(self)
            rows = [
                (role, row["tensors"], *(row[key] for key in keys)) for role, row in facts["roles"].items()
            ]
            yield Table({"role": None, "tensors": text.count, **sizes}, rows)
        if archived and facts["frames"]:
            names = ("step", "kind", "bytes", "ratio_total", "ratio_weights", "older", "quality")
            rows = [tuple(one.get(name) for name in names) for one in facts["frames"]]
            yield Table(_FRAME_COLUMNS, rows, most=_MOST_FRAMES)
        if self.with_tensors:
            columns: Columns = {"tensor": None, "dtype": None, "shape": None, "layer": None}
            rows = [
                (
                    row["key"],
                    row["dtype"],
                    text.shape(row["shape"]),
                    "unattributed" if row["unattributed"] else row["layer"],
                    row["n_steps"],
                    *(row[key] for key in keys),
                )
                for row in facts["tensors"]
            ]
            yield Table({**columns, "steps": text.count, **sizes}, rows)
        yield from (f"note: {note}" for note in facts["notes"])
        if facts["skipped"]:
            yield f"beside the steps, {text.counted(len(facts['skipped']), 'file')}:"
        for row in facts["skipped"]:
            fate = f"{row['fate']}, " if row["fate"] else ""
            yield f"  {row['path']}: {fate}{row['reason']}"


@dataclass(frozen=True)
class Inspect(Reading, Request[Inventory]):
    """Show steps, tensors, roles and sizes; reads headers only.

    Parameters
    ----------
    source
        A run, a checkpoint file or an archive.
    tensors
        List every tensor.

    Raises
    ------
    NotFoundError
        There is neither a run nor an archive.

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
    """Return a row a tensor of some steps: its newest spec, and its bytes added up.

    Tensors are in order of first appearance. Of each tensor of a step, its spec, archived bytes and bitstream
    are given.
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
    """Return a row a role, the largest first."""
    sums: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        row = sums.setdefault(tensor["role"], {"tensors": 0, "raw_bytes": 0, "archive_bytes": 0})
        row["tensors"] += 1
        row["raw_bytes"] += tensor["raw_bytes"]
        row["archive_bytes"] += tensor.get("archive_bytes", 0)
    in_order = sorted(sums.items(), key=lambda item: -item[1]["raw_bytes"])
    return {role: _with_ratio(row, archived) for role, row in in_order}


def _with_ratio(row: dict[str, Any], archived: bool) -> dict[str, Any]:
    """Return a row with its ratio; of a run, without what only an archive has."""
    if archived:
        return row | {"ratio": ratio(row["raw_bytes"], row["archive_bytes"]) or None}
    return {key: value for key, value in row.items() if key not in ("codec", "archive_bytes")}


def _run_facts(run: Run | None, skipped: Iterable[Skipped]) -> dict[str, Any]:
    """Return the document of a run, of which every header is read, or of a directory without a checkpoint."""
    from inshrink_core.formats import Fate, Skipped

    steps, at = ((), {}) if run is None else (run.steps, run)
    directory = None if run is None else run.directory
    tensors = _tensor_rows((((spec, 0, None) for spec in at[step].specs) for step in steps), archived=False)
    beside = [
        Skipped(f"{directory}/{one.path}", f"of step {one.step}", one.fate, one.step)
        for one in (() if run is None else run.fates)
        if one.fate in (Fate.BRANCH, Fate.DUPLICATE) and not one.reason
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
    """Return the inventory of an archive; reads the index of every frame."""
    from inshrink_core.chain import QUALITY, WRITTEN, archive_size, optimizer_of, original_checks
    from inshrink_core.chain.meta import MODELS

    whole, broken = _readable(archive)
    sizes = archive_size(archive, whole)
    tensors = _tensor_rows(
        (((one.spec, one.nbytes, one.codec) for one in frame.tensors) for frame in sizes.frames),
        archived=True,
    )
    meta = archive.frame(whole[-1]).meta if whole else {}
    specs = tuple(tensor.spec for tensor in sizes.frames[-1].tensors) if sizes.frames else ()
    last = Checkpoint(step=0, specs=specs, source=TensorsInMemory({}), models=tuple(meta.get(MODELS, ())))
    reader, catalog = archive.reader, archive.reader.catalog
    head, problem = (reader.listed_head if catalog.is_complete else None), catalog.manifest_problem
    needs, notes = _needs(archive, whole)
    frames, branches = [], []
    for frame in sizes.frames:
        said = archive.frame(frame.info).meta
        older = {"older": said[WRITTEN]} if WRITTEN in said else {}
        frames.append({**frame.to_json(), "quality": said.get(QUALITY), **older})
    with suppress(InshrinkError):  # a checkpoint with a name that cannot be read is a problem elsewhere
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
        "needs": needs,
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
        "originals": original_checks(archive, whole).to_json(),
    }
    facts["notes"] = [*_notes(facts), *notes]
    return Inventory(path=reader.path, facts=facts, failure=_failure(reader.path, facts), size=sizes)


def _failure(path: str, facts: Mapping[str, Any]) -> CheckFailedError | None:
    """Return what is wrong with an archive that can be shown all the same."""
    from inshrink_core.archive.layout import REBUILD_REMEDY

    if facts["manifest_problem"]:
        return CheckFailedError(
            f"{facts['manifest_problem']}, which alone tells whether frames are gone",
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


def _needs(archive: Archive, frames: Iterable[FrameInfo]) -> tuple[dict[str, int] | None, list[str]]:
    """Return what restoring takes, the most of any step and the disk of all, and why some steps cannot be."""
    from inshrink_core.chain import step_needs

    rows, notes = [], []
    for info in frames:
        try:
            rows.append(step_needs(archive, info))
        except InshrinkError as error:
            notes.append(f"step {info.step} cannot be restored: {error}")
    needs = {
        "memory_restore": max((row.memory() for row in rows), default=0),
        "memory_verify": max((row.memory_in_turn for row in rows), default=0),
        "disk_step": max((row.disk for row in rows), default=0),
        "disk_all": sum(row.disk for row in rows),
    }
    return (needs if rows else None), notes


def _shown(archive: Archive) -> tuple[FrameInfo, ...]:
    """Return the frames of the head's history; every frame where nothing tells which is the head."""
    return archive.frames if archive.reader.catalog.is_complete else archive.reader.frames


def _readable(archive: Archive) -> tuple[list[FrameInfo], list[FrameInfo]]:
    """Return the frames shown that can be read, and those that need a missing one."""
    whole: list[FrameInfo] = []
    broken: list[FrameInfo] = []
    for info in _shown(archive):
        try:
            archive.frame(info)
        except MissingFrameError:
            broken.append(info)
        else:
            whole.append(info)
    return whole, broken


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of an archive is not as it was committed."""
    for lost in facts["missing_frames"]:
        last = ": the last one, from which training would go on" if lost["last"] else ""
        branch = f" on branch {lost['branch']}" if lost["branch"] else ""
        yield f"the frame of step {lost['step']}{branch} is missing ({lost['path']}){last}"
    if facts["undecodable_steps"]:
        steps = ", ".join(map(str, facts["undecodable_steps"]))
        yield f"without a missing frame these steps cannot be decoded: {steps}"
    if facts["manifest_problem"]:
        yield f"{facts['manifest_problem']}: frames that are gone cannot be told"
        yield from (f"this frame cannot be read: {path}" for path in facts["unreadable_frames"])


def _facts(inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Yield the facts at the top."""
    facts = inventory.facts
    yield facts["kind"], inventory.path
    yield "format", str(facts["format"])
    yield "steps", text.steps_in_short(facts["steps"])
    yield "parameters", text.count(facts["n_parameters"])
    yield "tensors", text.count(len(facts["tensors"]))
    if inventory.size is None:
        yield "raw", text.size(facts["raw_bytes"])
    else:
        yield "codec", str(facts["codec"] or text.UNKNOWN)
        yield from showing.size_facts(inventory.size, facts["optimizer"])
        yield "checksums of the originals", facts["originals"]["text"]
        if needs := {name: text.size(nbytes) for name, nbytes in (facts["needs"] or {}).items()}:
            restoring, verifying = needs["memory_restore"], needs["memory_verify"]
            yield "memory needed", f"about {restoring} to restore a step, {verifying} to verify"
            yield "disk needed", f"{needs['disk_step']} for a step, {needs['disk_all']} for all"
        yield "branches", ", ".join(f"{row['name']} (step {row['step']})" for row in facts["branches"])
    yield "files of tensors", showing.fates_text(facts.get("fates", {}))
    yield "read", f"{text.size(facts['bytes_read'])} of headers"


def _older(older: Mapping[str, int] | None) -> str:
    """Return how many tensors a save under a budget left as they were, and how old the oldest is."""
    return f"{text.count(len(older))} since step {min(older.values())}" if older else ""


def _cost(quality: Mapping[str, Any] | None) -> str:
    """Return what a restore of a frame costs, how that is known, and what was promised."""
    if not quality:
        return ""
    how = text.printable(str(quality.get("how", "")))
    if how == "exact":
        return "none, exact"
    limit = quality.get("bounds", {}).get("restore_cost")
    promised = "" if limit is None else f", at most {text.percent(limit)}"
    return f"{text.percent(quality.get('restore_cost'))} {how}{promised}"


_FRAME_COLUMNS: Final = {
    "step": str,
    "kind": None,
    "bytes": text.size,
    "ratio of all": text.ratio,
    "ratio of weights": text.ratio,
    "older tensors": _older,
    "restore cost": _cost,
}
