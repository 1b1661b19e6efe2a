"""What the reports of several verbs have in common, as lines and tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inshrink_core.text import count, error_size, nats, percent, printable, ratio, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from inshrink_core.chain import Exactness
    from inshrink_core.chain.config import LargeError
    from inshrink_core.formats import Run, Skipped


_MOST_ROWS = 20
_WORDS = {"exact": "bit-exact", "drop": "left out; a resumed training warms its optimizer up again"}
_COMPRESSED = "{}, not bit for bit: training resumes from it; --optimizer exact keeps every bit"


def make_table(*columns: str, left: Sequence[int] = (0,), title: str | None = None) -> Table:
    """Return an empty table with thin rules.

    Parameters
    ----------
    columns
        Headings.
    left
        Positions of the columns of text; the others are numbers, to the right.
    title
        A line above it.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
    )
    for position, heading in enumerate(columns):
        if position in left:
            table.add_column(Text(heading), overflow="fold")
        else:
            table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def known_fact(measured_at: float | None) -> tuple[str, str]:
    """Return the line that says of what was known already when it was measured; empty of what was not."""
    if measured_at is None:
        return "measured", ""
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured_at))
    return "measured", f"{day}; --again measures anew"


def show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Print pairs of a name and a value, the values in one column; none of those without a value."""
    from rich.text import Text

    shown = [fact for fact in facts if fact[1]]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        line = Text.assemble((name.ljust(width), "dim"), f"  {printable(value)}")
        console.print(line, soft_wrap=True)


def show_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what should be known."""
    for note in notes:
        console.print(printable(f"note: {note}"), soft_wrap=True)


def show_unreadable(console: Console, rows: Sequence[Skipped]) -> None:
    """Print which checkpoints of a run cannot be read, or are left out."""
    for row in rows[:_MOST_ROWS]:
        step = "" if row.step is None else f" (step {row.step})"
        what = "left out" if row.fate == "left out" else "cannot be read"
        console.print(printable(f"{what}: {row.path}{step}: {row.reason}"), soft_wrap=True)
    if len(rows) > _MOST_ROWS:
        console.print(f"… and {count(len(rows) - _MOST_ROWS)} more")


def counted_fates(
    run: Run, steps: Collection[int] | None = None, *, skip_damaged: bool = False
) -> dict[str, int]:
    """Count the tensor files of a run by fate; files of other `steps`, if some are given, are excluded."""
    from inshrink_core.formats import Fate

    counts = Counter[str]()
    for one in run.fates:
        asked = one.fate not in (Fate.STEP, Fate.AUXILIARY) or steps is None or one.step in steps
        lost = one.fate in (Fate.UNREADABLE, Fate.LEFT_OUT)
        counts[one.fate if asked and not (lost and skip_damaged) else Fate.EXCLUDED] += 1
    return {fate.value: counts[fate] for fate in Fate if counts[fate]}


def fates_text(fates: Mapping[str, int]) -> str:
    """Return the numbers of files by fate, such as ``3 step, 1 duplicate``."""
    return ", ".join(f"{count(n)} {fate}" for fate, n in fates.items())


def rows_in_short(rows: Sequence[str]) -> Sequence[str]:
    """Return the first of many rows, and how many there are besides."""
    return rows if len(rows) <= _MOST_ROWS else [*rows[:_MOST_ROWS], f"… {len(rows) - _MOST_ROWS:,} more"]


def large_errors_text(rows: Sequence[LargeError]) -> str:
    """Return each tensor of some large errors, with the largest; empty without any."""
    worst: dict[str, float] = {}
    for row in rows:
        worst[row.name] = max(worst.get(row.name, 0.0), row.relative_error)
    texts = [f"{name} {error_size(error)}" for name, error in sorted(worst.items(), key=lambda one: -one[1])]
    return ", ".join(rows_in_short(texts))


def show_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    title: str | None = None,
) -> None:
    """Print a table; `left` are the columns of text, the others are numbers."""
    table = make_table(*headings, left=left, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_originals(console: Console, text: str) -> None:
    """Print what is known of the originals' checksums, unless all of them matched."""
    if text != "checked":
        console.print(printable(f"checksums of the originals: {text}"), soft_wrap=True)


def promised_facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was promised of restored steps and how they keep it; nothing where nothing was promised.

    Parameters
    ----------
    document
        With ``bounds``, ``max_drop``, ``max_divergence``, ``evaluations`` and ``frames``.
    """
    if "bounds" not in document:
        return []
    drop, divergence = document["bounds"]["drop"], document["bounds"]["divergence"]
    frames = document["frames"]
    cost = document["bounds"].get("restore_cost")
    limits = (
        f"(bound {drop * 100:g} %)" if drop is not None else "",
        f"(bound {divergence:g})" if divergence is not None else "",
        f"(bound {cost * 100:g} %)" if cost is not None else "",
    )
    exact = _which([frame for frame in frames if frame["exact"]])
    stale = _which([frame for frame in frames if frame["informative"] is False])
    unclear = _which([frame for frame in frames if "noise" in str(frame["side"])])
    return [
        ("largest drop", f"{percent(document['max_drop'])}  {limits[0]}".strip()),
        ("largest divergence", f"{nats(document['max_divergence'])} nats  {limits[1]}".strip()),
        ("largest restore cost", f"{percent(document['max_restore_cost'])} of the loss  {limits[2]}".strip()),
        ("decided by", _decided(document.get("decided"))),
        ("evaluations", count(document["evaluations"])),
        ("stored exactly", f"{exact}, where nothing smaller keeps the bounds" if exact else ""),
        ("says nothing", f"{stale}, where the previous checkpoint keeps them too" if stale else ""),
        ("within noise", f"{unclear}, whose metric's noise reaches the bound" if unclear else ""),
    ]


def _decided(found: Mapping[str, Any] | None) -> str:
    """Say which step decides the ratio."""
    if found is None:
        return ""
    how = ", stored exactly" if found["exact"] else ""
    return f"step {count(found['step'])}, whose weights shrink least: {ratio(found['ratio_weights'])}{how}"


def _which(frames: list[Mapping[str, Any]]) -> str:
    """Return the steps; of several trainings, how many saves."""
    if any("seed" in frame for frame in frames):
        return f"{count(len(frames))} saves"
    return steps_in_short([frame["step"] for frame in frames]) if frames else ""


def optimizer_text(optimizer: str | None, roles: Iterable[str]) -> str:
    """Return how optimizer state of some roles was stored; nothing where there is none.

    Examples
    --------
    >>> optimizer_text("exact", ["weight", "exp_avg"]), optimizer_text("exact", ["weight"])
    ('bit-exact', '')
    """
    from inshrink_core.checkpoint import EXACT_ROLES, OPTIMIZER_ROLES

    if optimizer is None or optimizer == "drop":
        return _WORDS.get(optimizer or "", "")
    state = OPTIMIZER_ROLES.intersection(roles)
    if not state:
        return ""
    if state <= EXACT_ROLES:
        return _WORDS["exact"]
    return _WORDS.get(optimizer, _COMPRESSED.format(optimizer))


def base_text(base: Mapping[str, Any] | None) -> str:
    """Return the base model of a document, and how many tensors do without; nothing without one.

    Examples
    --------
    >>> base_text({"name": "gpt.bin", "digest": "ab" * 32, "tensors": 40, "tensors_without": 2})
    'gpt.bin  (SHA-256 abababababab…, 40 tensors; 2 stored without it)'
    """
    if base is None:
        return ""
    without = base["tensors_without"]
    rest = f"; {count(without)} stored without it" if without else ""
    digest = str(base["digest"])[:12]
    return f"{printable(str(base['name']))}  (SHA-256 {digest}…, {count(base['tensors'])} tensors{rest})"


def named_ratio(name: str, base: object | None) -> str:
    """Return the name of a ratio, which says whether it holds with a base model alone."""
    return name if base is None else f"{name}, with the base model"


def stored_text(stored: Exactness) -> str:
    """Return which roles are exact, and which are not, in a line each."""
    lines = [
        f"{what}: {', '.join(sorted(roles))}"
        for what, roles in (("bit-exact", stored.exact), ("compressed with an error", stored.lossy))
        if roles
    ]
    return "\n".join(lines)
