"""``inshrink inspect``: what is in a run or an archive, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.formatting import count, counted, plain, printable, ratio, shape, size, steps_in_short
from inshrink_core.cli.gain import measure_gain, show_gain
from inshrink_core.cli.inventory import empty_document, make_document
from inshrink_core.cli.opening import open_run_or_archive
from inshrink_core.cli.optimizer import optimizer_text
from inshrink_core.cli.options import FollowLinks, Json, Quiet, StepPattern
from inshrink_core.cli.output import make_table, present, show_facts
from inshrink_core.errors import CheckFailedError, InputError, InshrinkError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.session import RestoreGain

__all__ = ["EXAMPLE", "inspect"]

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
