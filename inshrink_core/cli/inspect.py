"""``inshrink inspect``: what is in a run or an archive, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.cli.formatting import count, counted, plain, printable, ratio, shape, size, steps_in_short
from inshrink_core.cli.gain import measure_gain, show_gain
from inshrink_core.cli.options import FollowLinks, Json, Quiet, StepPattern, open_run_or_archive
from inshrink_core.cli.output import make_table, present, show_facts
from inshrink_core.cli.promised import optimizer_text
from inshrink_core.errors import CheckFailedError, InputError, InshrinkError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.gain import RestoreGain
    from inshrink_core.chain import Archive
    from inshrink_core.formats import Run
    from inshrink_core.frame import FrameInfo

__all__ = ["EXAMPLE", "empty_document", "inspect", "make_document"]

EXAMPLE = (
    "$ inshrink inspect runs/digits --tensors\n"
    "$ inshrink inspect digits.inshrink --json\n"
    "$ inshrink inspect digits.inshrink --gain --against runs/digits"
)

_MOST_FRAMES = 40


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="RUN|ARCHIVE", help="A run, a checkpoint file or an archive.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    gain: Annotated[
        bool,
        typer.Option(
            "--gain",
            help="Measure how much of each step's movement a restore would keep; reads and encodes all.",
        ),
    ] = False,
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="With --gain, the original run of an archive.")
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,…]",
            help="With --gain, what a run is encoded with. (default: as for compress)",
        ),
    ] = None,
    step_pattern: StepPattern = None,
    follow_links: FollowLinks = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show steps, tensors, roles and sizes; without --gain reads headers only."""
    if not gain and (against is not None or codec is not None):
        raise InputError("--against and --codec go with --gain", remedy="add --gain, or leave them out")
    failure: InshrinkError | None = None
    measured = None
    try:
        opened = open_run_or_archive(path, step_pattern, follow_links=follow_links)
        document = make_document(opened)
        if gain:
            measured = measure_gain(
                opened, against, codec, step_pattern, follow_links=follow_links, hidden=as_json or quiet
            )
            document["restore_gain"] = measured.to_json()
    except NotFoundError as error:
        skipped = getattr(error, "skipped", ())
        if not skipped:
            raise
        document, failure = empty_document(skipped), error
    else:
        failure = _judge(document, path)
    present(
        document,
        as_json=as_json,
        quiet=quiet,
        text=lambda console: _show(console, path, document, tensors, measured),
        failure=failure,
    )


def _judge(document: Mapping[str, Any], path: str) -> CheckFailedError | None:
    """Return what is wrong with an archive that can be shown all the same."""
    n_missing = len(document.get("missing_frames", ()))
    if document.get("manifest_problem"):
        return CheckFailedError(
            f"{document['manifest_problem']}, which alone tells whether frames are gone",
            where=path,
            remedy="`inshrink verify` lists what else is wrong; the next append writes it anew",
        )
    if not n_missing:
        return None
    return CheckFailedError(
        "a frame is missing" if n_missing == 1 else f"{n_missing} frames are missing",
        where=path,
        remedy="fetch the files from where the archive came from, or give the frames up with "
        "`inshrink prune --forget-missing`",
    )


def _show(
    console: Console,
    path: str,
    document: Mapping[str, Any],
    with_tensors: bool,
    measured: RestoreGain | None,
) -> None:
    """Print the facts, the sizes by role, the frames, and what was left out and why."""
    archived = document["kind"] == "archive"
    if document["steps"] or archived:
        show_facts(console, _facts(path, document, archived))
        console.print()
        _show_roles(console, document["roles"], archived)
    if archived and document["frames"]:
        _show_frames(console, document["frames"])
    if with_tensors:
        _show_tensors(console, document["tensors"], archived)
    if measured is not None:
        show_gain(console, measured, with_tensors=with_tensors)
    for note in document["notes"]:
        console.print(printable(f"note: {note}"), soft_wrap=True)
    if document["skipped"]:
        console.print(f"\nskipped {counted(len(document['skipped']), 'file')}:")
        for row in document["skipped"]:
            console.print(printable(f"  {row['path']}: {row['reason']}"), soft_wrap=True)


def _facts(path: str, document: Mapping[str, Any], archived: bool) -> list[tuple[str, str]]:
    """Return what stands at the top."""
    facts = [
        (str(document["kind"]), path),
        ("format", str(document["format"])),
        ("steps", steps_in_short(document["steps"])),
        ("parameters", count(document["n_parameters"])),
        ("tensors", count(len(document["tensors"]))),
    ]
    if archived:
        facts += [
            ("codec", str(document["codec"] or "–")),
            ("optimizer state", optimizer_text(document["optimizer"], document["roles"])),
            ("raw", size(document["raw_bytes"])),
            ("archive", size(document["archive_bytes"])),
            ("ratio of everything", ratio(document["ratio_total"])),
            ("ratio of the weights", ratio(document["ratio_weights"])),
            ("bits per weight", plain(document["bits_per_weight"])),
            ("checksums of the originals", printable(document["originals"]["text"])),
        ]
        if needs := document["needs"]:
            facts += [
                (
                    "memory needed",
                    f"about {size(needs['memory_restore'])} to restore a step, "
                    f"{size(needs['memory_verify'])} to verify",
                ),
                ("disk needed", f"{size(needs['disk_step'])} for a step, {size(needs['disk_all'])} for all"),
            ]
    else:
        facts.append(("raw", size(document["raw_bytes"])))
    facts = [fact for fact in facts if fact[1]]
    return [*facts, ("read", f"{size(document['bytes_read'])} of headers")]


def _show_roles(console: Console, roles: Mapping[str, Any], archived: bool) -> None:
    """Print where the bytes are, over all steps."""
    table = make_table("role", "tensors", "raw", *(("archived", "ratio") if archived else ()))
    for role, row in roles.items():
        extra = (size(row["archive_bytes"]), ratio(row["ratio"])) if archived else ()
        table.add_row(role, count(row["tensors"]), size(row["raw_bytes"]), *extra)
    console.print(table)


def _show_frames(console: Console, frames: list[Mapping[str, Any]]) -> None:
    """Print a row a frame; of a long history its two ends."""
    table = make_table("step", "kind", "bytes", "ratio of all", "ratio of weights", left=(1,))
    half = _MOST_FRAMES // 2
    short = len(frames) <= _MOST_FRAMES
    for position, frame in enumerate(frames):
        if not short and half <= position < len(frames) - half:
            if position == half:
                table.add_row("…", f"{count(len(frames) - _MOST_FRAMES)} more", "", "", "")
            continue
        table.add_row(
            str(frame["step"]),
            frame["kind"],
            size(frame["bytes"]),
            ratio(frame["ratio_total"]),
            ratio(frame["ratio_weights"]),
        )
    console.print()
    console.print(table)


def _show_tensors(console: Console, tensors: list[Mapping[str, Any]], archived: bool) -> None:
    """Print a row a tensor; the key tells its role."""
    table = make_table(
        "tensor",
        "dtype",
        "shape",
        "layer",
        "steps",
        "raw",
        *(("ratio",) if archived else ()),
        left=(0, 1, 2, 3),
    )
    for row in tensors:
        extra = (ratio(row["ratio"]),) if archived else ()
        table.add_row(
            printable(row["key"]),
            row["dtype"],
            shape(row["shape"]),
            row["layer"],
            count(row["n_steps"]),
            size(row["raw_bytes"]),
            *extra,
        )
    console.print()
    console.print(table)


ARCHIVE_FORMAT = "inshrink"


@dataclass(slots=True)
class _Sum:
    """One tensor over all steps: its newest spec, and its bytes added up."""

    spec: TensorSpec
    n_steps: int = 0
    raw_bytes: int = 0
    archive_bytes: int = 0
    codec: str | None = None


class _Inventory:
    """Tensors by key, in order of first appearance."""

    def __init__(self) -> None:
        self.sums: dict[str, _Sum] = {}
        self.last_keys: frozenset[str] = frozenset()

    def add_step(self, rows: Iterable[tuple[TensorSpec, int, str | None]]) -> None:
        """Count the tensors of one step: spec, archived bytes, bitstream."""
        keys = set()
        for spec, archive_bytes, codec in rows:
            entry = self.sums.setdefault(spec.key, _Sum(spec))
            entry.spec, entry.codec = spec, codec
            entry.n_steps += 1
            entry.raw_bytes += spec.nbytes
            entry.archive_bytes += archive_bytes
            keys.add(spec.key)
        self.last_keys = frozenset(keys)

    @property
    def n_parameters(self) -> int:
        """Elements of the weights of the last step, tied ones once."""
        return sum(
            entry.spec.numel
            for key, entry in self.sums.items()
            if key in self.last_keys and entry.spec.role is TensorRole.WEIGHT
        )

    def tensors(self, *, archived: bool) -> list[dict[str, Any]]:
        """Return a row a tensor."""
        rows = []
        for key, entry in self.sums.items():
            row: dict[str, Any] = {
                "key": key,
                "role": entry.spec.role.value,
                "dtype": entry.spec.dtype,
                "shape": list(entry.spec.shape),
                "layer": entry.spec.layer.value if entry.spec.layer else None,
                "n_steps": entry.n_steps,
                "raw_bytes": entry.raw_bytes,
            }
            if archived:
                row |= {
                    "codec": entry.codec,
                    "archive_bytes": entry.archive_bytes,
                    "ratio": _ratio(entry.raw_bytes, entry.archive_bytes),
                }
            rows.append(row)
        return rows

    def roles(self, *, archived: bool) -> dict[str, dict[str, Any]]:
        """Return a row a role, the largest first."""
        sums: dict[str, dict[str, Any]] = {}
        for entry in self.sums.values():
            row = sums.setdefault(
                entry.spec.role.value,
                {"tensors": 0, "raw_bytes": 0} | ({"archive_bytes": 0} if archived else {}),
            )
            row["tensors"] += 1
            row["raw_bytes"] += entry.raw_bytes
            if archived:
                row["archive_bytes"] += entry.archive_bytes
                row["ratio"] = _ratio(row["raw_bytes"], row["archive_bytes"])
        return dict(sorted(sums.items(), key=lambda item: -item[1]["raw_bytes"]))


def _ratio(raw: int, archived: int) -> float | None:
    """Return raw over archived bytes; None for what takes no bytes."""
    return raw / archived if raw and archived else None


def empty_document(skipped: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """Return the document of a directory without a readable checkpoint."""
    return {
        "kind": "run",
        "format": None,
        "steps": [],
        "n_parameters": 0,
        "tensors": [],
        "roles": {},
        "raw_bytes": 0,
        "bytes_read": 0,
        "skipped": _skipped(skipped),
        "notes": [],
    }


def make_document(opened: Run | Archive) -> dict[str, Any]:
    """Return the document of whatever was opened; reads headers only."""
    from inshrink_core.chain import Archive

    return _archive_document(opened) if isinstance(opened, Archive) else _run_document(opened)


def _run_document(run: Run) -> dict[str, Any]:
    """Return the document of a run; reads the header of every checkpoint."""
    inventory = _Inventory()
    for step in run.steps:
        inventory.add_step((spec, 0, None) for spec in run[step].specs)
    return {
        "kind": "run",
        "format": run.format,
        "steps": list(run.steps),
        "n_parameters": inventory.n_parameters,
        "tensors": inventory.tensors(archived=False),
        "roles": inventory.roles(archived=False),
        "raw_bytes": sum(entry.raw_bytes for entry in inventory.sums.values()),
        "bytes_read": run.bytes_read,
        "skipped": _skipped(run.skipped),
        "notes": list(run.notes),
    }


def _archive_document(archive: Archive) -> dict[str, Any]:
    """Return the document of an archive; reads the index of every frame."""
    from inshrink_core.chain import archive_size, original_checks

    inventory = _Inventory()
    whole, broken = _readable(archive)
    sizes = archive_size(archive, whole)
    for frame in sizes.frames:
        inventory.add_step((tensor.spec, tensor.nbytes, tensor.codec) for tensor in frame.tensors)
    meta = archive.frame(whole[-1]).meta if whole else {}
    head = archive.reader.listed_head
    originals = original_checks(archive, whole)
    notes = _archive_notes(archive, broken)
    return {
        "kind": "archive",
        "format": ARCHIVE_FORMAT,
        "steps": list(archive.steps),
        "n_parameters": inventory.n_parameters,
        "codec": meta.get("codec"),
        "config": meta.get("config"),
        "optimizer": meta.get("optimizer"),
        "ratio_weights": sizes.ratio_weights,
        "ratio_total": sizes.ratio_total,
        "bits_per_weight": sizes.bits_per_weight,
        "raw_bytes": sizes.raw_total,
        "archive_bytes": sizes.nbytes,
        "needs": _needs(archive, whole, notes),
        "n_branches": len({frame.branch for frame in archive.reader.frames}),
        "frames": [
            {
                "step": frame.info.step,
                "kind": frame.info.kind.value,
                "branch": frame.info.branch,
                "bytes": frame.info.nbytes,
                "ratio_weights": frame.ratio_weights,
                "ratio_total": frame.ratio_total,
            }
            for frame in sizes.frames
        ],
        "missing_frames": [
            {"step": lost.step, "branch": lost.branch, "path": lost.path, "last": lost == head}
            for lost in archive.reader.missing
        ],
        "manifest_problem": problem.what if (problem := archive.reader.catalog.manifest_problem) else None,
        "unreadable_frames": list(archive.reader.catalog.unknown),
        "undecodable_steps": [info.step for info in broken],
        "tensors": inventory.tensors(archived=True),
        "roles": inventory.roles(archived=True),
        "bytes_read": archive.bytes_read,
        "skipped": [],
        "originals": originals.to_json(),
        "notes": notes,
    }


def _needs(archive: Archive, frames: Iterable[FrameInfo], notes: list[str]) -> dict[str, int] | None:
    """Return what restoring takes: the most of any step, and the disk of all; None where nothing tells."""
    from inshrink_core.chain import step_needs
    from inshrink_core.errors import InshrinkError

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


def _readable(archive: Archive) -> tuple[list[FrameInfo], list[FrameInfo]]:
    """Return the frames of the head's history that can be read, and those that need a missing one."""
    from inshrink_core.errors import MissingFrameError

    whole: list[FrameInfo] = []
    broken: list[FrameInfo] = []
    for info in archive.frames:
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
    head = archive.reader.listed_head
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


def _skipped(rows: Iterable[Any]) -> list[dict[str, str]]:
    """Return what was left out, and why."""
    return [{"path": str(row[0]), "reason": str(row[1])} for row in rows]
