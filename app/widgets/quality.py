"""What a restore costs, in words: the figure, of what it is a share, and how it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_app import services
from inshrink_app.widgets import fmt
from inshrink_app.widgets.layout import Fact

if TYPE_CHECKING:
    from inshrink_app.services import Compared

    from inshrink_core.chain import ChainReport


NOT_KNOWN = "not known without an evaluator"


def is_over(cost: float | None) -> bool:
    """Return whether a restore costs more than archives promise by default."""
    from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds, Figures

    bounds = Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    return cost is not None and not bounds.judge(Figures(restore_cost=cost)).kept


def bound_text() -> str:
    """Return what a restore may cost by default, as a share of the loss."""
    from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST

    return fmt.percent(DEFAULT_MAX_RESTORE_COST)


def tip() -> str:
    """Return what stands behind every restore cost."""
    return (
        "How much the training loss is expected to rise right after a restore, relative to the loss. An "
        f"archive promises at most {bound_text()} where an evaluator is given and no other bound."
    )


def compared_fact(one: Compared) -> Fact:
    """Return the figure of a comparison, by the worst of its steps."""
    cost = one.max_restore_cost
    if cost is None:
        return ("Restore cost", "–", "the evaluator returns no loss", tip())
    said = f"of the loss, measured on {fmt.counted(len(one.steps), 'step')}"
    said += f", above {bound_text()}" if is_over(cost) else ""
    return ("Restore cost", fmt.percent(cost), said, tip())


def archive_fact(archive: ChainReport) -> Fact:
    """Return the figure of an archive: exact, or as its newest comparison has measured it."""
    from inshrink_core.chain import is_exact
    from inshrink_core.errors import InshrinkError

    try:
        exact = is_exact(archive.codec, archive.config) and archive.optimizer in ("exact", "drop")
    except InshrinkError:  # written by a codec that is not installed
        exact = False
    if exact and not archive.overrides:
        return ("Restore cost", "none", "exact: every bit of the weights", tip())
    found = services.newest_comparison(archive.path, archive.nbytes)
    if found is None or not found.steps:
        return ("Restore cost", "–", "not measured; compare it", tip())
    return compared_fact(found)
