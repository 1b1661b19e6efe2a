"""What the reports of several verbs have in common, as lines and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inshrink_core.cli import output
from inshrink_core.text import count, nats, percent, printable, steps_in_short

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.chain import Exactness

__all__ = [
    "base_text",
    "named_ratio",
    "optimizer_text",
    "promised_facts",
    "show_facts",
    "show_notes",
    "show_originals",
    "show_table",
    "stored_text",
]

_STATE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "master"})
_WORDS = {"exact": "bit-exact", "drop": "left out; a resumed training warms its optimizer up again"}
_COMPRESSED = "{}, not bit for bit: training resumes from it; --optimizer exact keeps every bit"


def show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Print pairs of a name and a value, but for those without a value."""
    output.show_facts(console, [fact for fact in facts if fact[1]])


def show_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what should be known."""
    for note in notes:
        console.print(printable(f"note: {note}"), soft_wrap=True)


def show_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    title: str | None = None,
) -> None:
    """Print a table; `left` are the columns of text, the others are numbers."""
    table = output.make_table(*headings, left=left, title=title)
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
        ("evaluations", count(document["evaluations"])),
        ("stored exactly", f"{exact}, where nothing smaller keeps the bounds" if exact else ""),
        ("says nothing", f"{stale}, where the previous checkpoint keeps them too" if stale else ""),
        ("within noise", f"{unclear}, whose metric's noise reaches the bound" if unclear else ""),
    ]


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
    if optimizer is None or (optimizer != "drop" and not set(roles) & _STATE):
        return ""
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
