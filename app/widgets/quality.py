"""What a restore costs, in words: the figure, of what it is a share, and how it is known."""

from __future__ import annotations

from typing import Final

from inshrink_app.model import known_of, when
from inshrink_app.widgets import fmt
from inshrink_app.widgets.layout import Fact

from inshrink_core.chain import ChainReport, is_exact
from inshrink_core.errors import InshrinkError
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds, Figures
from inshrink_core.verbs.shared.measured import Known

NATS: Final = (
    "Divergence: how far the restored model's predictions are from the original's, the mean "
    "Kullback–Leibler divergence. A nat is its unit with the natural logarithm, 1.44 bits; 0 is the same."
)
GAIN: Final = (
    "Restore gain: how much of the movement since the previous checkpoint survives a restore. 1 is all of "
    "it, 0 rolls training back."
)
NOISE: Final = (
    "Restore noise: what a restore adds to the movement, its squared error as a share of the movement's."
)
DAMAGE: Final = "What rounding is expected to cost, by the proxy: the weighted squared error, of all layers."
RATIO: Final = "Raw bytes of everything that is stored, optimizer state included, over bytes of the archive."

BOUND: Final = fmt.percent(DEFAULT_MAX_RESTORE_COST)
"""What a restore may cost by default, as a share of the loss."""

TIP: Final = (
    "How much the training loss is expected to rise right after a restore, relative to the loss. An "
    f"archive promises at most {BOUND} where an evaluator is given and no other bound."
)
HELPS: Final = {
    **dict.fromkeys(("divergence", "largest divergence"), NATS),
    **dict.fromkeys(("restore cost", "restore_cost"), TIP),
    "restore gain": GAIN,
    "restore noise": NOISE,
}
"""What stands behind the headings of tables."""


def is_over(cost: float | None) -> bool:
    """Return whether a restore costs more than archives promise by default."""
    bounds = Bounds(max_restore_cost=DEFAULT_MAX_RESTORE_COST)
    return cost is not None and not bounds.judge(Figures(restore_cost=cost)).within


def known_facts(one: Known, n_steps: int | None = None) -> list[Fact]:
    """Return restore cost and drop as they were measured, each by the worst of the steps.

    Parameters
    ----------
    one
        What is known.
    n_steps
        Steps of the archive, where that is said.
    """
    found, dearest, worst = one.comparison, one.costliest, one.worst
    n = len(found.steps)
    on = fmt.all_steps(n) if n == n_steps else fmt.counted(n, "step")
    about = f"Measured on {on}, {when(one.at)}, on {fmt.device(found.device)}."
    if not one.is_current:
        about = f"Measured before the last change, {when(one.at)}: measure it again."
    old = "" if one.is_current else "before the last change"
    if dearest is None:
        cost: Fact = ("Restore cost", "–", "the evaluator returns no loss", TIP)
    else:
        said = f"above {BOUND}, " if is_over(dearest.restore_cost) else ""
        said += old or f"of the loss, measured on {on}"
        cost = ("Restore cost", fmt.percent(dearest.restore_cost), said, f"{about} {TIP}")
    if worst is None:
        return [cost]
    share = one.granularity
    grain = "" if share is None else f" One sample of {fmt.count(one.n_samples)} is {fmt.percent(share)}."
    said = old or f"{found.metric}, step {fmt.count(worst.step)}"
    tip_of_drop = f"Relative, of {fmt.markdown(found.metric)} at the worst step. {about}{grain}"
    return [cost, ("Largest drop", fmt.percent(worst.drop), fmt.elided(said, 40), tip_of_drop)]


def size_facts(chain: ChainReport, device: str = "") -> list[Fact]:
    """Return size, ratios and bits of an archive; `device` is where it was written, where that is known."""
    bits, where = (
        chain.bits_per_weight,
        f"written on {fmt.device(device)}" if device else "of one step, in mean",
    )
    is_partial = any(frame.damage for frame in chain.frames)
    return [
        (
            "Size",
            fmt.size(chain.nbytes),
            "with unreadable frames" if is_partial else f"of {fmt.size(chain.raw_bytes)} raw",
            "One packed file." if chain.is_packed else "A folder of frames and a manifest.",
        ),
        (
            "Ratio with base" if chain.base else "Compression ratio",
            fmt.ratio(chain.ratio_total),
            "of the readable frames" if is_partial else f"weights {fmt.ratio(chain.ratio_weights)}",
            f"{RATIO} Headers, tables and the manifest count wholly to the weights.",
        ),
        (
            "Bits per weight",
            "–" if bits is None else fmt.value(bits),
            where,
        ),
    ]


def is_exact_archive(archive: ChainReport) -> bool:
    """Return whether an archive restores every bit."""
    try:
        exact = is_exact(archive.codec, archive.config) and archive.optimizer in ("exact", "drop")
    except InshrinkError:  # written by a codec that is not installed
        return False
    return exact and not archive.overrides


def archive_facts(archive: ChainReport) -> list[Fact]:
    """Return the figures of an archive: exact, or as they were measured last."""
    if is_exact_archive(archive):
        return [("Restore cost", "none", "exact: every bit of the weights", TIP)]
    found = known_of(archive)
    if found is not None:
        return known_facts(found, len(archive.steps))
    if archive.predicted is not None:
        cost = fmt.percent(archive.predicted.restore_cost)
        return [("Restore cost", f"≤ {cost}", "predicted, not measured; compare it", TIP)]
    return [("Restore cost", "–", "not measured; compare it", TIP)]
