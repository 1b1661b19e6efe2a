"""What is in a run or an archive, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inshrink_core.checkpoint import Checkpoint, TensorsInMemory, Unseen
from inshrink_core.errors import CheckFailedError, InshrinkError, MissingFrameError
from inshrink_core.report import Report, plain_value
from inshrink_core.request import Request, python_call
from inshrink_core.text import (
    UNKNOWN,
    count,
    counted,
    percent,
    plain,
    printable,
    ratio,
    shape,
    size,
    steps_in_short,
)
from inshrink_core.verbs.shared.groups import Opening, RunOrArchive
from inshrink_core.verbs.shared.showing import (
    base_text,
    counted_fates,
    fates_text,
    named_ratio,
    optimizer_text,
    show_facts,
    show_notes,
    show_table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import Archive
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
    """

    path: str
    facts: Mapping[str, Any]
    failure: InshrinkError | None = None
    with_tensors: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink inspect --json``."""
        return dict(self.facts)

    def show(self, console: Console) -> None:
        """Print the facts, the sizes by role, the frames, and what was left out and why."""
        facts = self.facts
        archived = facts["kind"] == "archive"
        if facts["steps"] or archived:
            show_facts(console, _facts(self.path, facts, archived))
            console.print()
            headings = ("role", "tensors", "raw", *(("archived", "ratio") if archived else ()))
            rows = facts["roles"].items()
            show_table(console, headings, (_role_cells(role, row, archived) for role, row in rows))
        if archived and facts["frames"]:
            console.print()
            show_table(console, *_frame_table(facts["frames"]), left=(1,))
        if self.with_tensors:
            console.print()
            headings = (
                "tensor",
                "dtype",
                "shape",
                "layer",
                "steps",
                "raw",
                *(("ratio",) if archived else ()),
            )
            show_table(
                console,
                headings,
                (_tensor_cells(row, archived) for row in facts["tensors"]),
                left=(0, 1, 2, 3),
            )
        show_notes(console, facts["notes"])
        if facts["skipped"]:
            console.print(f"\nbeside the steps, {counted(len(facts['skipped']), 'file')}:")
            for row in facts["skipped"]:
                fate = f"{row['fate']}, " if row["fate"] else ""
                console.print(printable(f"  {row['path']}: {fate}{row['reason']}"), soft_wrap=True)


@dataclass(frozen=True)
class Inspect(Opening, Request[Inventory]):
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

    EXAMPLES: ClassVar = (
        "inshrink inspect runs/digits --tensors",
        "inshrink inspect digits.inshrink --json",
    )

    def perform(self) -> Inventory:
        """Read headers."""
        from inshrink_core.chain import Archive
        from inshrink_core.formats.run import NoCheckpointError

        try:
            opened = self.opened(self.source)
        except NoCheckpointError as error:
            if not error.skipped:
                raise
            facts = _run_facts(_Tensors(archived=False), error.skipped)
            return Inventory(path=str(self.source), facts=facts, failure=error)
        found = _inspect_archive(opened) if isinstance(opened, Archive) else _inspect_run(opened)
        named = str(getattr(self.source, "path", self.source))
        return replace(found, path=named, with_tensors=self.tensors)


inspect = python_call(Inspect)


@dataclass(slots=True)
class _Sum:
    """One tensor over all steps: its newest spec, and its bytes added up."""

    spec: TensorSpec
    n_steps: int = 0
    raw_bytes: int = 0
    archive_bytes: int = 0
    codec: str | None = None


class _Tensors:
    """Tensors by key, in order of first appearance."""

    def __init__(self, *, archived: bool) -> None:
        self._archived = archived
        self._sums: dict[str, _Sum] = {}
        self.n_parameters = 0

    def add_step(self, rows: Iterable[tuple[TensorSpec, int, str | None]]) -> None:
        """Count the tensors of one step: spec, archived bytes, bitstream."""
        for spec, archive_bytes, codec in rows:
            entry = self._sums.setdefault(spec.key, _Sum(spec))
            entry.spec, entry.codec = spec, codec
            entry.n_steps += 1
            entry.raw_bytes += spec.nbytes
            entry.archive_bytes += archive_bytes

    @property
    def raw_bytes(self) -> int:
        return sum(entry.raw_bytes for entry in self._sums.values())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a tensor."""
        rows = []
        for key, entry in self._sums.items():
            row: dict[str, Any] = {
                "key": key,
                "role": entry.spec.role.value,
                "dtype": entry.spec.dtype,
                "shape": list(entry.spec.shape),
                "layer": entry.spec.layer.value if entry.spec.layer else None,
                "unattributed": entry.spec.is_unattributed,
                "n_steps": entry.n_steps,
                "raw_bytes": entry.raw_bytes,
            }
            if self._archived:
                row |= {
                    "codec": entry.codec,
                    "archive_bytes": entry.archive_bytes,
                    "ratio": _ratio(entry.raw_bytes, entry.archive_bytes),
                }
            rows.append(row)
        return rows

    def roles(self) -> dict[str, dict[str, Any]]:
        """Return a row a role, the largest first."""
        sums: dict[str, dict[str, Any]] = {}
        for entry in self._sums.values():
            row = sums.setdefault(
                entry.spec.role.value,
                {"tensors": 0, "raw_bytes": 0} | ({"archive_bytes": 0} if self._archived else {}),
            )
            row["tensors"] += 1
            row["raw_bytes"] += entry.raw_bytes
            if self._archived:
                row["archive_bytes"] += entry.archive_bytes
                row["ratio"] = _ratio(row["raw_bytes"], row["archive_bytes"])
        return dict(sorted(sums.items(), key=lambda item: -item[1]["raw_bytes"]))


def _ratio(raw: int, archived: int) -> float | None:
    """Return raw over archived bytes; None for what takes no bytes."""
    return raw / archived if raw and archived else None


def _inspect_run(run: Run) -> Inventory:
    """Return the inventory of a run; reads the header of every checkpoint."""
    from inshrink_core.formats import Fate, Skipped

    tensors = _Tensors(archived=False)
    for step in run.steps:
        tensors.add_step((spec, 0, None) for spec in run[step].specs)
    tensors.n_parameters = run[run.steps[-1]].n_parameters
    facts = _run_facts(tensors, run.skipped, run.format, run.steps)
    unseen = Unseen.of(layout for step in run.steps for layout in run[step].files)
    beside = [
        Skipped(f"{run.directory}/{one.path}", f"of step {one.step}", one.fate, one.step)
        for one in run.fates
        if one.fate in (Fate.BRANCH, Fate.DUPLICATE) and not one.reason
    ]
    facts["skipped"] = _rows_beside(beside) + facts["skipped"]
    found = {"unseen": plain_value(unseen), "bytes_read": run.bytes_read, "notes": list(run.notes)}
    found["fates"] = counted_fates(run)
    return Inventory(path=run.address, facts={**facts, **found})


def _run_facts(
    tensors: _Tensors, skipped: Iterable[Skipped], layout: str | None = None, steps: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the document of a run, or of a directory without a readable checkpoint."""
    return {
        "kind": "run",
        "format": layout,
        "steps": list(steps),
        "n_parameters": tensors.n_parameters,
        "tensors": tensors.rows(),
        "roles": tensors.roles(),
        "raw_bytes": tensors.raw_bytes,
        "unseen": plain_value(Unseen()),
        "bytes_read": 0,
        "fates": {},
        "skipped": _rows_beside(skipped),
        "notes": [],
    }


def _rows_beside(rows: Iterable[Skipped]) -> list[dict[str, Any]]:
    return [
        {"path": row.path, "fate": row.fate, "reason": row.reason, "unreadable": row.unreadable}
        for row in rows
    ]


def _inspect_archive(archive: Archive) -> Inventory:
    """Return the inventory of an archive; reads the index of every frame."""
    from inshrink_core.chain import archive_size, optimizer_of, original_checks
    from inshrink_core.chain.meta import MODELS

    tensors = _Tensors(archived=True)
    whole, broken = _readable(archive)
    sizes = archive_size(archive, whole)
    for frame in sizes.frames:
        tensors.add_step((tensor.spec, tensor.nbytes, tensor.codec) for tensor in frame.tensors)
    meta = archive.frame(whole[-1]).meta if whole else {}
    if sizes.frames:
        last = Checkpoint(
            step=sizes.frames[-1].info.step,
            specs=tuple(tensor.spec for tensor in sizes.frames[-1].tensors),
            source=TensorsInMemory({}),
            models=tuple(meta.get(MODELS, ())),
        )
        tensors.n_parameters = last.n_parameters
    reader, catalog = archive.reader, archive.reader.catalog
    head, problem = (reader.listed_head if catalog.is_complete else None), catalog.manifest_problem
    notes = _archive_notes(archive, broken)
    facts: dict[str, Any] = {
        "kind": "archive",
        "format": ARCHIVE_FORMAT,
        "steps": sorted({frame.step for frame in _shown(archive)}),
        "n_parameters": tensors.n_parameters,
        "codec": meta.get("codec"),
        "config": meta.get("config"),
        "optimizer": optimizer_of(meta) if "optimizer" in meta else None,
        **({} if sizes.base is None else {"base": plain_value(sizes.base)}),
        "ratio_weights": sizes.ratio_weights,
        "ratio_total": sizes.ratio_total,
        "bits_per_weight": sizes.bits_per_weight,
        "raw_bytes": sizes.raw_total,
        "archive_bytes": sizes.nbytes,
        "needs": _needs(archive, whole, notes),
        "n_branches": len({frame.branch for frame in reader.frames if not frame.is_named}),
        "branches": [
            {"name": name, "step": info.step, "bytes": info.nbytes} for name, info in _branches(archive)
        ],
        "frames": [frame.to_json() | _said(archive.frame(frame.info).meta) for frame in sizes.frames],
        "missing_frames": [{**lost.place, "last": lost == head} for lost in reader.missing],
        "manifest_problem": problem.what if problem else None,
        "unreadable_frames": list(catalog.unknown),
        "undecodable_steps": [info.step for info in broken],
        "tensors": tensors.rows(),
        "roles": tensors.roles(),
        "bytes_read": archive.bytes_read,
        "skipped": [],
        "originals": original_checks(archive, whole).to_json(),
        "notes": notes,
    }
    return Inventory(path=reader.path, facts=facts, failure=_failure(reader.path, facts))


def _branches(archive: Archive) -> list[tuple[str, FrameInfo]]:
    """Return the checkpoints with a name of their own; one that cannot be read is a problem elsewhere."""
    try:
        return list(archive.branches.items())
    except InshrinkError:
        return []


def _said(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a frame says of what a restore of it costs, and of tensors that it left as they were."""
    from inshrink_core.chain import QUALITY, WRITTEN

    return {"quality": meta.get(QUALITY)} | ({"older": meta[WRITTEN]} if WRITTEN in meta else {})


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


def _needs(archive: Archive, frames: Iterable[FrameInfo], notes: list[str]) -> dict[str, int] | None:
    """Return what restoring takes: the most of any step, and the disk of all; None where nothing tells."""
    from inshrink_core.chain import step_needs

    rows = []
    for info in frames:
        try:
            rows.append(step_needs(archive, info))
        except InshrinkError as error:
            notes.append(f"step {info.step} cannot be restored: {error}")
    if not rows:
        return None
    return {
        "memory_restore": max(row.memory() for row in rows),
        "memory_verify": max(row.memory_in_turn for row in rows),
        "disk_step": max(row.disk for row in rows),
        "disk_all": sum(row.disk for row in rows),
    }


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


def _archive_notes(archive: Archive, broken: Iterable[FrameInfo]) -> list[str]:
    """Say what of an archive is not as it was committed."""
    catalog = archive.reader.catalog
    head = archive.reader.listed_head if catalog.is_complete else None
    notes = []
    for lost in catalog.missing:
        last = ": the last one, from which training would go on" if lost == head else ""
        branch = f" on branch {lost.branch}" if lost.branch else ""
        notes.append(f"the frame of step {lost.step}{branch} is missing ({lost.path}){last}")
    steps = ", ".join(str(info.step) for info in broken)
    if steps:
        notes.append(f"without a missing frame these steps cannot be decoded: {steps}")
    if catalog.manifest_problem is not None:
        notes.append(f"{catalog.manifest_problem.what}: frames that are gone cannot be told")
        notes += [f"this frame cannot be read: {path}" for path in catalog.unknown]
    return notes


def _facts(path: str, facts: Mapping[str, Any], archived: bool) -> list[tuple[str, str]]:
    """Return the facts at the top."""
    rows = [
        (str(facts["kind"]), path),
        ("format", str(facts["format"])),
        ("steps", steps_in_short(facts["steps"])),
        ("parameters", count(facts["n_parameters"])),
        ("tensors", count(len(facts["tensors"]))),
    ]
    if not archived:
        rows.append(("raw", size(facts["raw_bytes"])))
    else:
        rows += [
            ("codec", str(facts["codec"] or UNKNOWN)),
            ("optimizer state", optimizer_text(facts["optimizer"], facts["roles"])),
            ("raw", size(facts["raw_bytes"])),
            ("archive", size(facts["archive_bytes"])),
            ("base model", base_text(facts.get("base"))),
            (named_ratio("ratio of everything", facts.get("base")), ratio(facts["ratio_total"])),
            (named_ratio("ratio of the weights", facts.get("base")), ratio(facts["ratio_weights"])),
            ("bits per weight", plain(facts["bits_per_weight"])),
            ("checksums of the originals", printable(facts["originals"]["text"])),
        ]
        if needs := facts["needs"]:
            memory = (size(needs[name]) for name in ("memory_restore", "memory_verify"))
            disk = (size(needs[name]) for name in ("disk_step", "disk_all"))
            rows += [
                ("memory needed", "about {} to restore a step, {} to verify".format(*memory)),
                ("disk needed", "{} for a step, {} for all".format(*disk)),
            ]
    rows += [
        ("branches", ", ".join(f"{row['name']} (step {row['step']})" for row in facts.get("branches", ())))
    ]
    rows += [("files of tensors", fates_text(facts.get("fates", {})))]
    return [*rows, ("read", f"{size(facts['bytes_read'])} of headers")]


def _role_cells(role: str, row: Mapping[str, Any], archived: bool) -> list[str]:
    extra = (size(row["archive_bytes"]), ratio(row["ratio"])) if archived else ()
    return [role, count(row["tensors"]), size(row["raw_bytes"]), *extra]


def _frame_table(frames: list[Mapping[str, Any]]) -> tuple[list[str], list[Sequence[str]]]:
    """Return headings, and a row a frame; of a long history its two ends, and no column of blanks."""
    columns = {
        "step": [str(frame["step"]) for frame in frames],
        "kind": [frame["kind"] for frame in frames],
        "bytes": [size(frame["bytes"]) for frame in frames],
        "ratio of all": [ratio(frame["ratio_total"]) for frame in frames],
        "ratio of weights": [ratio(frame["ratio_weights"]) for frame in frames],
        "older tensors": [_older(frame.get("older", {})) for frame in frames],
        "restore cost": [_cost(frame["quality"]) for frame in frames],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    rows: list[Sequence[str]] = list(zip(*shown.values(), strict=True))
    if len(rows) > _MOST_FRAMES:
        half, blanks = _MOST_FRAMES // 2, [""] * (len(shown) - 2)
        rows[half:-half] = [("…", f"{count(len(rows) - _MOST_FRAMES)} more", *blanks)]
    return list(shown), rows


def _older(older: Mapping[str, int]) -> str:
    """Return how many tensors a save under a budget left as they were, and how old the oldest is."""
    return f"{count(len(older))} since step {min(older.values())}" if older else ""


def _cost(quality: Mapping[str, Any] | None) -> str:
    """Return what a frame says that a restore of it costs, how that is known, and what was promised."""
    if not quality:
        return ""
    how = printable(str(quality.get("how", "")))
    if how == "exact":
        return "none, exact"
    limit = quality.get("bounds", {}).get("restore_cost")
    promised = "" if limit is None else f", at most {percent(limit)}"
    return f"{percent(quality.get('restore_cost'))} {how}{promised}"


def _tensor_cells(row: Mapping[str, Any], archived: bool) -> list[str]:
    """Return the cells of a tensor; the key tells its role."""
    return [
        printable(row["key"]),
        row["dtype"],
        shape(row["shape"]),
        "unattributed" if row["unattributed"] else row["layer"],
        count(row["n_steps"]),
        size(row["raw_bytes"]),
        *((ratio(row["ratio"]),) if archived else ()),
    ]
