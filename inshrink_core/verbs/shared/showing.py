"""What the reports of several verbs have in common, as lines and tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inshrink_core import text

if TYPE_CHECKING:
    from inshrink_core.chain import ArchiveSize, Exactness
    from inshrink_core.chain.config import LargeError
    from inshrink_core.formats import Run, Skipped


_MOST_ROWS = 20
_WORDS = {"exact": "bit-exact", "drop": "left out; a resumed training warms its optimizer up again"}
_COMPRESSED = "{}, not bit for bit: training resumes from it; --optimizer exact keeps every bit"


def known_fact(measured_at: float | None) -> tuple[str, str]:
    """Return the line that says of what was known already when it was measured; empty of what was not."""
    if measured_at is None:
        return "measured", ""
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured_at))
    return "measured", f"{day}; --again measures anew"


def unreadable_lines(rows: Sequence[Skipped]) -> Sequence[str]:
    """Return which checkpoints of a run cannot be read, or are left out."""
    lines = []
    for row in rows:
        step = "" if row.step is None else f" (step {row.step})"
        what = "left out" if row.fate == "left out" else "cannot be read"
        lines.append(f"{what}: {row.path}{step}: {row.reason}")
    return rows_in_short(lines)


def counted_fates(
    run: Run, steps: Collection[int] | None = None, *, skip_damaged: bool = False
) -> dict[str, int]:
    """Count the tensor files of a run by fate; files of other `steps`, if some are given, are excluded."""
    from inshrink_core.formats import Fate

    counts = Counter[Fate | None]()
    for one in run.fates:
        asked = one.fate not in (Fate.STEP, Fate.AUXILIARY) or steps is None or one.step in steps
        lost = one.fate in (Fate.UNREADABLE, Fate.LEFT_OUT)
        counts[one.fate if asked and not (lost and skip_damaged) else Fate.EXCLUDED] += 1
    return {fate.value: counts[fate] for fate in Fate if counts[fate]}


def fates_text(fates: Mapping[str, int]) -> str:
    """Return the numbers of files by fate, such as ``3 step, 1 duplicate``."""
    return ", ".join(f"{text.count(n)} {fate}" for fate, n in fates.items())


def rows_in_short(rows: Sequence[str]) -> Sequence[str]:
    """Return the first of many rows, and how many there are besides."""
    return rows if len(rows) <= _MOST_ROWS else [*rows[:_MOST_ROWS], f"… {len(rows) - _MOST_ROWS:,} more"]


def large_errors_text(rows: Sequence[LargeError]) -> str:
    """Return each tensor of some large errors, with the largest; empty without any."""
    worst: dict[str, float] = {}
    for row in rows:
        worst[row.name] = max(worst.get(row.name, 0.0), row.relative_error)
    texts = [
        f"{name} {text.error_size(error)}" for name, error in sorted(worst.items(), key=lambda one: -one[1])
    ]
    return ", ".join(rows_in_short(texts))


def original_lines(known: str) -> list[str]:
    """Return what is known of the originals' checksums, unless all of them matched."""
    return [] if known == "checked" else [f"checksums of the originals: {known}"]


def promised_facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was promised of restored steps and how they keep it; nothing where nothing was promised.

    Parameters
    ----------
    document
        With ``bounds``, ``max_drop``, ``max_divergence``, ``evaluations`` and ``frames``.
    """
    if "bounds" not in document:
        return []
    bounds, frames, decided = document["bounds"], document["frames"], document.get("decided")
    limits = {
        name: f"  (bound {bounds[name] * factor:g}{unit})" if bounds.get(name) is not None else ""
        for name, factor, unit in (("drop", 100, " %"), ("divergence", 1, ""), ("restore_cost", 100, " %"))
    }
    exact = _which([frame for frame in frames if frame["exact"]])
    stale = _which([frame for frame in frames if frame["informative"] is False])
    unclear = _which([frame for frame in frames if "noise" in str(frame["side"])])
    decides = ""
    if decided is not None:
        how = ", stored exactly" if decided["exact"] else ""
        step, least = text.count(decided["step"]), text.ratio(decided["ratio_weights"])
        decides = f"step {step}, whose weights shrink least: {least}{how}"
    return [
        ("largest drop", f"{text.percent(document['max_drop'])}{limits['drop']}"),
        ("largest divergence", f"{text.nats(document['max_divergence'])} nats{limits['divergence']}"),
        (
            "largest restore cost",
            f"{text.percent(document['max_restore_cost'])} of the loss{limits['restore_cost']}",
        ),
        ("decided by", decides),
        ("evaluations", text.count(document["evaluations"])),
        ("stored exactly", f"{exact}, where nothing smaller keeps the bounds" if exact else ""),
        ("says nothing", f"{stale}, where the previous checkpoint keeps them too" if stale else ""),
        ("within noise", f"{unclear}, whose metric's noise reaches the bound" if unclear else ""),
    ]


def _which(frames: list[Mapping[str, Any]]) -> str:
    """Return the steps; of several trainings, how many saves."""
    if any("seed" in frame for frame in frames):
        return f"{text.count(len(frames))} saves"
    return text.steps_in_short([frame["step"] for frame in frames]) if frames else ""


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
    rest = f"; {text.count(without)} stored without it" if without else ""
    digest = str(base["digest"])[:12]
    name, tensors = text.printable(str(base["name"])), text.count(base["tensors"])
    return f"{name}  (SHA-256 {digest}…, {tensors} tensors{rest})"


def named_ratio(name: str, base: object | None) -> str:
    """Return the name of a ratio, which says whether it holds with a base model alone."""
    return name if base is None else f"{name}, with the base model"


def stored_lines(stored: Exactness) -> list[str]:
    """Return which roles are exact, and which are not, in a line each."""
    kinds = ("bit-exact", stored.exact), ("compressed with an error", stored.lossy)
    return [f"{what}: {', '.join(sorted(roles))}" for what, roles in kinds if roles]


def size_facts(size: ArchiveSize, optimizer: str | None) -> Iterator[tuple[str, str]]:
    """Yield what an archive holds, and how small it is."""
    from inshrink_core.report import plain_value

    base, frames = plain_value(size.base), size.frames
    roles = {row.spec.role.value for frame in frames for row in frame.tensors}
    keyframes = sum(frame.info.kind == "keyframe" for frame in frames)
    yield "optimizer state", optimizer_text(optimizer, roles)
    yield "frames", f"{text.count(len(frames))}  ({text.counted(keyframes, 'keyframe')})"
    yield "base model", base_text(base)
    sizes = f"{text.size(size.raw_total)} in {text.size(size.nbytes)}"
    yield named_ratio("ratio of everything", base), f"{text.ratio(size.ratio_total)}  ({sizes})"
    yield named_ratio("ratio of the weights", base), text.ratio(size.ratio_weights)
    yield "bits per weight", text.plain(size.bits_per_weight)
