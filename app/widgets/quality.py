"""The cost of a restore in words: the figure, its reference, and its basis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from inshrink_app.model import known_of, when
from inshrink_app.services import Bound
from inshrink_app.widgets import fmt
from inshrink_app.widgets.layout import Fact

from inshrink_core.chain.config import is_exact
from inshrink_core.chain.report import ChainReport
from inshrink_core.errors import InshrinkError
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST
from inshrink_core.verbs.shared.measured import Known


class Cost(NamedTuple):
    """A cost of restores in figures: its name, and the factor and unit of its values on an axis."""

    label: str
    scale: float
    unit: str

    @property
    def axis(self) -> str:
        """The title of an axis."""
        return f"{self.label}, {self.unit}"

    @property
    def word(self) -> str:
        """Its name within a sentence."""
        return self.label.lower()

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        return fmt.percent(value) if self.unit == "%" else fmt.joined(f"{fmt.value(value)} {self.unit}")


COSTS: Final[Mapping[str, Cost]] = {
    "restore_cost": Cost("Restore cost", 100.0, "%"),
    "drop": Cost("Drop", 100.0, "%"),
    "divergence": Cost("Divergence", 1.0, "nats"),
}
"""The costs that may be bounded, by their names in a request."""


def bound_text(bound: Bound) -> str:
    """Return a bound in a few words."""
    if bound.kind == "none":
        return "none"
    return f"{bound.kind.replace('_', ' ')} {fmt.limit(bound.kind, bound.value)}"


NATS: Final = (
    "Divergence: how far the restored model's predictions are from the original's, the mean "
    "Kullback–Leibler divergence. A nat is its unit with the natural logarithm, 1.44 bits; 0 is the same."
)
DAMAGE: Final = "Share of the expected cost of rounding: squared error times sensitivity, of all layers."
RATIO: Final = "Raw bytes of everything that is stored, optimizer state included, over bytes of the archive."
DROP: Final = "How much worse the evaluator's metric is after a restore, relative to the original, at worst."
TIP: Final = (
    "How much the training loss is expected to rise right after a restore, relative to the loss. An archive "
    f"promises at most {fmt.percent(DEFAULT_MAX_RESTORE_COST)} with an evaluator and no other bound."
)
HELPS: Final = {
    **dict.fromkeys(("divergence", "largest divergence"), NATS),
    **dict.fromkeys(("restore cost", "restore_cost"), TIP),
    **dict.fromkeys(("drop", "largest drop"), DROP),
}
"""Help texts of costs, by heading and by name in a request."""


def known_facts(known: Known, n_steps: int | None = None) -> list[Fact]:
    """Return the measured restore cost and drop, each of the worst step.

    Parameters
    ----------
    known
        The measurement.
    n_steps
        Number of steps of the archive, if displayed.
    """
    found, dearest, worst = known.comparison, known.costliest, known.worst
    n = len(found.steps)
    on = fmt.all_steps(n) if n == n_steps else fmt.counted(n, "step")
    about = f"Measured on {on}, {when(known.at)}, on {fmt.markdown(found.device.upper())}."
    if not known.is_current:
        about = f"Measured before the last change, {when(known.at)}: measure it again."
    old = "" if known.is_current else "before the last change"
    if dearest is None:
        cost: Fact = ("Restore cost", "–", "the evaluator returns no loss", TIP)
    else:
        basis = old or f"of the loss, measured on {on}"
        cost = ("Restore cost", fmt.percent(dearest.restore_cost), basis, f"{about} {TIP}")
    if worst is None:
        return [cost]
    about_drop = old or f"{found.metric}, step {fmt.count(worst.step)}"
    tip_of_drop = f"Relative, of {fmt.markdown(found.metric)} at the worst step. {about}"
    return [cost, ("Largest drop", fmt.percent(worst.drop), fmt.clipped(about_drop, 40), tip_of_drop)]


def size_facts(chain: ChainReport, device: str = "") -> list[Fact]:
    """Return size, ratios and bits of an archive; `device` is the device that wrote it, if known."""
    bits, is_partial = chain.bits_per_weight, any(frame.damage for frame in chain.frames)
    where = f"written on {fmt.markdown(device.upper())}" if device else "the mean of all steps"
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
            f"{RATIO} Headers, tables and the manifest count as weights.",
        ),
        ("Bits per weight", "–" if bits is None else fmt.value(bits), where),
    ]


def is_exact_archive(archive: ChainReport) -> bool:
    """Return whether an archive restores every bit."""
    try:
        exact = is_exact(archive.codec, archive.config) and archive.optimizer in ("exact", "drop")
    except InshrinkError:  # written by a codec that is not installed
        return False
    return exact and not archive.overrides


def archive_facts(archive: ChainReport) -> list[Fact]:
    """Return the figures of an archive: exact, or as last measured."""
    if is_exact_archive(archive):
        return [("Restore cost", "none", "exact: every bit of the weights", TIP)]
    found = known_of(archive)
    if found is not None:
        return known_facts(found, len(archive.steps))
    return [("Restore cost", "–", "not measured yet", TIP)]
