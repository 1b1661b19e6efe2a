"""Texts that the reports of several verbs share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from inshrink_core.checkpoint import EXACT_ROLES, OPTIMIZER_ROLES

if TYPE_CHECKING:
    from inshrink_core.formats import Run

_WORDS = {"exact": "bit-exact", "drop": "left out; a resumed training warms its optimizer up again"}
_COMPRESSED = "{}, not bit for bit: training resumes from it; --optimizer exact keeps every bit"


def counted_fates(
    run: Run, steps: Collection[int] | None = None, *, skip_damaged: bool = False
) -> dict[str, int]:
    """Count the tensor files of a run by fate; files of other `steps`, if `steps` are given, are excluded."""
    from inshrink_core.formats import Fate

    counts = Counter[Fate | None]()
    for file in run.fates:
        asked = file.fate not in (Fate.STEP, Fate.AUXILIARY) or steps is None or file.step in steps
        lost = file.fate in (Fate.UNREADABLE, Fate.LEFT_OUT)
        counts[file.fate if asked and not (lost and skip_damaged) else Fate.EXCLUDED] += 1
    return {fate.value: counts[fate] for fate in Fate if counts[fate]}


def optimizer_text(optimizer: str | None, roles: Iterable[str]) -> str:
    """Return how optimizer state of some roles was stored; empty without optimizer state.

    Examples
    --------
    >>> optimizer_text("exact", ["weight", "exp_avg"]), optimizer_text("exact", ["weight"])
    ('bit-exact', '')
    """
    if optimizer is None or optimizer == "drop":
        return _WORDS.get(optimizer or "", "")
    state = OPTIMIZER_ROLES.intersection(roles)
    if not state:
        return ""
    if state <= EXACT_ROLES:
        return _WORDS["exact"]
    return _WORDS.get(optimizer, _COMPRESSED.format(optimizer))
