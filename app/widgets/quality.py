"""What a restore costs, in words: the figure, of what it is a share, and how it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_app import services
from inshrink_app.widgets.formatting import counted, percent_text

if TYPE_CHECKING:
    from inshrink_app.services import Compared

    from inshrink_core.chain import ChainReport

__all__ = ["NOT_KNOWN", "TIP", "archive_fact", "bound_text", "compared_fact", "is_over"]

NOT_KNOWN = "not known without an evaluator"
TIP = (
    "How much the training loss is expected to rise right after a restore, relative to the loss. Archives "
    "promise at most 0.3 % where an evaluator is given and no other bound."
)

Fact = tuple[str, str, str, str]


def is_over(cost: float | None) -> bool:
    """Return whether a restore costs more than archives promise by default."""
    from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

    return cost is not None and cost > DEFAULT_MAX_RESTORE_COST


def bound_text() -> str:
    """Return what a restore may cost by default, as a share of the loss."""
    from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

    return percent_text(DEFAULT_MAX_RESTORE_COST)


def compared_fact(one: Compared) -> Fact:
    """Return the figure of a comparison, by the worst of its steps."""
    cost = one.max_restore_cost
    if cost is None:
        return ("Restore cost", "–", "the evaluator returns no loss", TIP)
    said = f"of the loss, measured on {counted(len(one.steps), 'step')}"
    return ("Restore cost", percent_text(cost), f"{said}, above 0.3 %" if is_over(cost) else said, TIP)


def archive_fact(archive: ChainReport) -> Fact:
    """Return the figure of an archive: exact, or as its newest comparison has measured it."""
    from inshrink_core.chain import is_exact
    from inshrink_core.errors import InshrinkError

    try:
        exact = is_exact(archive.codec, archive.config) and archive.optimizer in ("exact", "drop")
    except InshrinkError:  # written by a codec that is not installed
        exact = False
    if exact and not archive.overrides:
        return ("Restore cost", "none", "exact: every bit of the weights", TIP)
    found = services.newest_comparison(archive.path, archive.nbytes)
    if found is None or not found.steps:
        return ("Restore cost", "–", "not measured; compare it", TIP)
    return compared_fact(found)
