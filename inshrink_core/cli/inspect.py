"""``inshrink inspect``: what is in a run or an archive, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import Based, OnDevice, Output, Reading, verb
from inshrink_core.cli.showing import (
    base_text,
    named_ratio,
    optimizer_text,
    show_facts,
    show_notes,
    show_table,
)
from inshrink_core.errors import InputError
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

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.gain import RestoreGain
    from inshrink_core.verbs.inspect import Inventory

__all__ = ["EXAMPLE", "inspect"]

EXAMPLE = (
    "$ inshrink inspect runs/digits --tensors\n"
    "$ inshrink inspect digits.inshrink --json\n"
    "$ inshrink inspect digits.inshrink --gain --against runs/digits"
)

_MOST_FRAMES = 40
_FEW_TENSORS = 10
"""Without ``--tensors``, gains of this many are listed: those that would lose most of their movement."""


@verb
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="RUN|ARCHIVE", help="A run, a checkpoint file or an archive.")
    ],
    *,
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
    based: Based,
    reading: Reading,
    placed: OnDevice,
    out: Output,
) -> None:
    """Show steps, tensors, roles and sizes; without --gain reads headers only."""
    from inshrink_core.verbs.inspect import inspect as inspect_path

    if not gain and (against is not None or codec is not None):
        raise InputError("--against and --codec go with --gain", remedy="add --gain, or leave them out")
    with out.progress("gain", in_bytes=False, stage="gain") as progress:
        found = inspect_path(
            path,
            gain=gain,
            against=reading.open(against) if against is not None else None,
            **_variant(codec),
            **vars(placed),
            progress=progress,
            base=based.base,
            **vars(reading),
        )
    out.present(found, lambda console, inventory: _show(console, path, inventory, tensors))


def _variant(codec: str | None) -> dict[str, Any]:
    """Return codec and settings of ``NAME:KEY=VALUE,…``."""
    if codec is None:
        return {}
    from inshrink_core.bench import Variant

    variant = Variant.parse(codec)
    return {"codec": variant.codec, "config": variant.config(None)}


def _show(console: Console, path: str, inventory: Inventory, with_tensors: bool) -> None:
    """Print the facts, the sizes by role, the frames, and what was left out and why."""
    facts = inventory.facts
    archived = facts["kind"] == "archive"
    if facts["steps"] or archived:
        show_facts(console, _facts(path, facts, archived))
        console.print()
        headings = ("role", "tensors", "raw", *(("archived", "ratio") if archived else ()))
        rows = facts["roles"].items()
        show_table(console, headings, (_role_cells(role, row, archived) for role, row in rows))
    if archived and facts["frames"]:
        console.print()
        show_table(console, *_frame_table(facts["frames"]), left=(1,))
    if with_tensors:
        console.print()
        headings = ("tensor", "dtype", "shape", "layer", "steps", "raw", *(("ratio",) if archived else ()))
        show_table(
            console, headings, (_tensor_cells(row, archived) for row in facts["tensors"]), left=(0, 1, 2, 3)
        )
    if inventory.restore_gain is not None:
        _show_gain(console, inventory.restore_gain, with_tensors=with_tensors)
    show_notes(console, facts["notes"])
    if facts["skipped"]:
        console.print(f"\nskipped {counted(len(facts['skipped']), 'file')}:")
        for row in facts["skipped"]:
            console.print(printable(f"  {row['path']}: {row['reason']}"), soft_wrap=True)


def _facts(path: str, facts: Mapping[str, Any], archived: bool) -> list[tuple[str, str]]:
    """Return what stands at the top."""
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
        row["layer"],
        count(row["n_steps"]),
        size(row["raw_bytes"]),
        *((ratio(row["ratio"]),) if archived else ()),
    ]


def _show_gain(console: Console, measured: RestoreGain, *, with_tensors: bool) -> None:
    """Print gain and noise by step, and by tensor over all steps, the lowest gain first."""
    steps = [(str(step.step), step.gain, step.noise) for step in measured.steps]
    steps.append(("all", measured.pooled.gain, measured.pooled.noise))
    console.print(f"\nrestored at the step before, with the codec {measured.codec}:")
    cells = ((name, plain(gain, 3), plain(noise, 3)) for name, gain, noise in steps)
    show_table(console, ("step", "gain", "noise"), cells, left=())
    rows = sorted(measured.by_tensor.items(), key=lambda pair: (pair[1].gain is None, pair[1].gain or 0.0))
    shown = rows if with_tensors else rows[:_FEW_TENSORS]
    console.print()
    cells = ((printable(key), plain(row.gain, 3), plain(row.noise, 3)) for key, row in shown)
    show_table(console, ("tensor", "gain", "noise"), cells)
    if len(rows) > len(shown):
        console.print(f"and {counted(len(rows) - len(shown), 'tensor')} of higher gain (--tensors lists all)")
    if any(row.gain is None for _, row in rows):
        console.print(f"{UNKNOWN} a tensor that did not move")
