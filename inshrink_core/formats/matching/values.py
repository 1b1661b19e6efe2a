"""Match numbered optimizer state to parameters by values: weights move in the direction of their moments.

The direction of an optimizer's step (first moment over the root of the second, or momentum) correlates with
the movement of its weight between two checkpoints. This distinguishes weights of equal shape. Among all
assignments of states to weights, the one with the highest correlation is chosen, as far as it is certain.
Laws of order (`inshrink_core.formats.matching.laws`) fill in the rest, unless values contradict them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from inshrink_core.checkpoint import FLOATS, MODEL_ROLES, Checkpoint, TensorRole
from inshrink_core.errors import InshrinkError
from inshrink_core.formats.matching.laws import (
    Claims,
    Matching,
    Slot,
    by_anchors,
    by_number,
    by_order,
    by_shape,
    by_shapes,
    in_order,
)
from inshrink_core.formats.source import peek

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.formats.assembly import ParsedCheckpoint


N_PAIRS: Final = 8
"""Number of neighbouring pairs of checkpoints to compare, from the start of the run.

Later pairs are ignored, so that a run archived step by step gets the same matching as one archived at
once.
"""

_N_CLUSTERS: Final = 64
_FEWEST_CLUSTERS: Final = 8
_CERTAIN: Final = 5.0
"""Standard errors by which a weight must fit better than any other: by chance, one in three million."""

_CLEAR: Final = 4.0
"""Standard errors that confirm or refute a claim made without values."""

_MAX_ALIKE: Final = 250
"""Maximum number of slots of one shape compared pairwise; larger classes are sampled evenly to this size."""

_FEWEST_CONFIRMED: Final = 2
_TINY: Final = 1e-12


class _Class:
    """Slots and weights of one shape, and the sums of their correlations."""

    def __init__(self, slots: Sequence[Slot], names: Sequence[str]) -> None:
        self.slots, self.names = list(slots), list(names)
        self.sums: list[NDArray[np.float64]] = []

    def compare(self, *ends: Checkpoint) -> None:
        """Add a pair of checkpoints: the movement, and directions and masters at both ends."""
        values = [{n: read for n in self.names if (read := _read(end, n)) is not None} for end in ends]
        common = values[0].keys() & values[1].keys()
        movements = {name: values[1][name] - values[0][name] for name in self.names if name in common}
        keys = [slot.key for slot in self.slots]
        for end, items in zip(ends, values, strict=True):
            self._add({key: d for key in keys if (d := _direction(end, key)) is not None}, movements)
            masters = {key: _read(end, f"{key}@{TensorRole.MASTER}") for key in keys}
            self._add({key: master for key, master in masters.items() if master is not None}, items)

    def _add(self, directions: Mapping[str, Tensor], movements: Mapping[str, Tensor]) -> None:
        import torch

        shape = next((direction.shape for direction in directions.values()), None)
        if shape is None or len(movements) != len(self.names):
            return
        nothing = torch.zeros(shape, dtype=torch.float64)
        states = torch.stack([_unit(directions.get(slot.key, nothing)) for slot in self.slots])
        moves = torch.stack([_unit(movements[name]) for name in self.names])
        sums = []
        for turned in (False, True):
            item, other = (_clusters(items.mT if turned else items) for items in (states, moves))
            sums.append(torch.einsum("ike,jke->ijk", item, other).numpy())
        self.sums = sums if not self.sums else [a + b for a, b in zip(self.sums, sums, strict=True)]

    def best(self) -> dict[str, str]:
        """Return the weights that certainly fit better than all others, by slot."""
        pairs = _matched(self.sums[0].sum(-1)) if self.sums else ()
        claims = {self.slots[row].key: self.names[column] for row, column in pairs}
        margins = self.margins(claims)
        return {key: name for key, name in claims.items() if margins[key] >= _CERTAIN}

    def margins(self, claims: Claims) -> dict[str, float]:
        """Return by how many standard errors each slot fits its claimed weight better than the next best.

        An alternative choice is an exchange with another slot, or a weight or slot without a partner.
        Components that tensors share cancel in an exchange. Elements of one row, or of one column, depend on
        each other, so standard errors are computed from sums over rows and over columns, and the smaller
        margin is used.
        """
        import numpy as np

        place = {name: at for at, name in enumerate(self.names)}
        claimed = [(i, claims.get(slot.key)) for i, slot in enumerate(self.slots)]
        pairs = [(i, place[name]) for i, name in claimed if name in place]
        slots, weights = [i for i, _ in pairs], [j for _, j in pairs]
        left = sorted(set(range(len(self.slots))) - set(slots))
        over = sorted(set(range(len(self.names))) - set(weights))
        found = [math.inf] * len(pairs)
        for sums in self.sums:
            if sums.shape[-1] < _FEWEST_CLUSTERS:
                continue
            fits = sums[slots, weights]
            for at, (i, j) in enumerate(pairs):
                exchanged = fits[at] + fits - sums[i, weights] - sums[slots, j]
                rest = [fits[at][None], fits[at] - sums[i, over], fits[at] - sums[left, j]]
                contrasts = np.concatenate([np.delete(exchanged, at, axis=0), *rest])
                found[at] = min(found[at], float(_errors(contrasts).min()))
        margins = zip(slots, found, strict=True)
        return {self.slots[i].key: margin if math.isfinite(margin) else 0.0 for i, margin in margins}


def _errors(contrasts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means in units of their standard errors, corrected for a small number of clusters.

    With n clusters, mean m and standard deviation s, the result is ``m / (s / sqrt(n)) / (1 + 8 / n)``. The
    divisor ``1 + 8 / n`` accounts for the uncertainty of s.
    """
    import numpy as np

    n = contrasts.shape[-1]
    spread = contrasts.std(-1, ddof=1) / math.sqrt(n)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = contrasts.mean(-1) / spread / (1 + 8 / n)
    finite: NDArray[np.float64] = np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)
    return finite


def _unit(values: Tensor) -> Tensor:
    import torch

    values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    norm = float(values.norm())
    return values / norm if norm > _TINY * math.sqrt(values.numel()) else torch.zeros_like(values)


def _clusters(values: Tensor) -> Tensor:
    """Return (n, rows, columns) as (n, clusters, elements): neighbouring rows together, padded with zeros."""
    import torch

    n, rows, columns = values.shape
    clusters = min(rows, _N_CLUSTERS)
    each = -(-rows // clusters)
    padded = torch.zeros((n, clusters * each, columns), dtype=values.dtype)
    padded[:, :rows] = values
    remaining = padded.reshape(n, clusters, each * columns)
    return remaining[:, : -(-rows // each)]


def _matched(scores: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Yield pairs of a row and a column with high scores; each row and column occurs in at most one pair.

    The highest score is taken first. Row and column means do not matter: tensors may share a component.
    """
    import numpy as np

    scores = scores - scores.mean(0) - scores.mean(1, keepdims=True)
    for _ in range(min(scores.shape)):
        row, column = divmod(int(scores.argmax()), scores.shape[1])
        yield row, column
        scores[row], scores[:, column] = -np.inf, -np.inf


def _certain(classes: Sequence[_Class]) -> dict[str, str]:
    return {key: name for group in classes for key, name in group.best().items()}


def _margins(classes: Sequence[_Class], claims: Claims) -> dict[str, float]:
    return {key: margin for group in classes for key, margin in group.margins(claims).items()}


def gather(
    steps: Sequence[int],
    slots: Sequence[Slot],
    free: Mapping[str, tuple[int, ...]],
    read: Callable[[int], Checkpoint],
    claims: Claims,
) -> list[_Class]:
    """Measure how weights moved between the first checkpoints of a run, for each shape.

    Parameters
    ----------
    steps
        Steps of the checkpoints, ascending.
    slots, free
        Slots and weights to match, as in `ParsedCheckpoint`.
    read
        Returns a checkpoint without any matching.
    claims
        Claims that select slots where one shape has too many.
    """
    classes = _classes_of(slots, free, claims)
    alike = {slot.key for group in classes if len(group.names) > 1 for slot in group.slots}
    for before, after in list(itertools.pairwise(steps))[:N_PAIRS]:
        ends = read(before), read(after)
        # Ignore checkpoints deleted or damaged meanwhile; reading them later raises the error.
        with suppress(InshrinkError, OSError):
            for group in classes:
                group.compare(*ends)
        certain = _certain(classes)
        # Stop early if a law covers all slots, contradicts none of the certain matches, and the certain
        # matches cover at least half of the ambiguous slots: the law then fills in the rest.
        agreed = all(claims.get(key) == name for key, name in certain.items())
        law_holds = agreed and len(claims) == len(slots) and len(alike) <= 2 * len(certain.keys() & alike)
        if law_holds or sum(len(group.slots) for group in classes) == len(certain):
            break
    return classes


def _classes_of(slots: Sequence[Slot], free: Mapping[str, tuple[int, ...]], claims: Claims) -> list[_Class]:
    found = []
    for shape, (alike, names) in by_shapes(slots, free).items():
        if shape is None or not names:
            continue
        if max(len(alike), len(names)) > _MAX_ALIKE:
            claimed = [slot for slot in alike if slot.key in claims]
            alike = claimed[:: -(-len(claimed) // _MAX_ALIKE)] if claimed else []
            names = [claims[slot.key] for slot in alike]
        found.append(_Class(alike, names))
    return [item for item in found if item.slots]


def _direction(checkpoint: Checkpoint, key: str) -> Tensor | None:
    """Return the direction in which an optimizer moves a parameter next; None if its state does not show it.

    With first moment m and second moment v, it is ``-m / (sqrt(v) + _TINY)``; without v it is ``-sign(m)``.
    With a momentum buffer b it is ``-b``.
    """
    first = _read(checkpoint, f"{key}@{TensorRole.EXP_AVG}")
    if first is None:
        momentum = _read(checkpoint, f"{key}@{TensorRole.MOMENTUM}")
        return None if momentum is None else -momentum
    second = _read(checkpoint, f"{key}@{TensorRole.EXP_AVG_SQ}")
    if second is None or second.shape != first.shape:
        return -first.sign()
    return -first / (second.clamp(min=0).sqrt() + _TINY)


def _read(checkpoint: Checkpoint, key: str) -> Tensor | None:
    """Return a sample of a tensor as a matrix; equal shapes give the same elements."""
    import torch

    if key not in checkpoint:
        return None
    spec = checkpoint.spec(key)
    if spec.dtype not in FLOATS or not spec.numel:
        return None
    values = peek(checkpoint.source, spec, sampled=True).to(torch.float64).reshape(-1)
    if values.numel() == spec.numel:
        return values.reshape(spec.shape[0] if spec.shape else 1, -1)
    from inshrink_core.ops.sample import SAMPLE_RUN

    return values.reshape(-1, SAMPLE_RUN)


def match_slots(
    parsed: ParsedCheckpoint,
    steps: Sequence[int],
    read: Callable[[int], Checkpoint],
    *,
    known: Claims | None = None,
    order: tuple[str, ...] = (),
) -> Matching:
    """Decide which parameter each slot of a checkpoint belongs to.

    Parameters
    ----------
    parsed
        The checkpoint.
    steps, read
        The checkpoints whose values are compared, as in `gather`.
    known
        The matching in an existing archive of the run.
    order
        Names of the model's tensors in registration order, if known from the model's code.

    Notes
    -----
    Certain matches from values are final. The laws that do not contradict them fill in the remaining slots in
    turn, except where values clearly refute a claim. Claims about the membership in several groups with equal
    shapes are accepted if values confirm at least two of them.
    """
    slots, free = parsed.slots, parsed.free
    orders = [dict(free)] if parsed.ordered else []
    if order and free.keys() <= set(order):
        orders.append({name: free[name] for name in in_order(free, order)})
    claimed = [by_order(slots, row) for row in orders]
    laws = [known or {}, *(claims for claims, _ in claimed), by_number(slots, free)]
    classes = gather(steps, slots, free, read, next(filter(None, laws), {}))
    certain = _certain(classes)
    alike = Counter(free.values())
    telling = {key: name for key, name in certain.items() if alike[free[name]] > 1}
    found = dict(certain)

    def fill(more: Claims) -> None:
        margins = _margins(classes, found | dict(more)) if more else {}
        found.update({key: name for key, name in more.items() if margins.get(key, 0.0) > -_CLEAR})

    doubted = frozenset().union(*(unsure for _, unsure in claimed))
    alone = by_shape(slots, free)
    for law in [*laws, alone]:
        agreed = [key for key, name in law.items() if certain.get(key) == name]
        if any(certain.get(key, name) != name for key, name in law.items()):
            continue
        if telling and law is not known and law is not alone:
            confirmed = {key for key, margin in _margins(classes, law).items() if margin >= _CLEAR}
            clear = {key for key in confirmed if alike[free[law[key]]] > 1}
            if len(clear.union(key for key in agreed if key in telling)) < _FEWEST_CONFIRMED:
                continue
        if law is not known and sum(key in doubted for key in agreed) < _FEWEST_CONFIRMED:
            law = {key: name for key, name in law.items() if key not in doubted}
        taken = set(found.values())
        fill({key: name for key, name in law.items() if key not in found and name not in taken})
    for order_known in orders:
        fill(by_anchors(slots, order_known, found))
    return Matching(found, order or parsed.order)


def same_places(parsed: ParsedCheckpoint, reference: Checkpoint) -> Matching:
    """Return an archived checkpoint's matching for a checkpoint with the same file layout."""
    neutral = parsed.matched(Matching({}, ()))
    specs = {spec.key: spec for spec in neutral.specs}
    slots = {slot.key for slot in parsed.slots}
    archived = {file.path: file for file in reference.files}
    if len(reference.files) == len(neutral.layouts) == 1:
        # Single files are named after their steps, so match them without comparing names.
        archived = {neutral.layouts[0].path: reference.files[0]}
    owners: dict[str, str] = {}
    for file in neutral.layouts:
        both = (file, archived.get(file.path, file))
        keys, theirs = ([m.key for region in item.regions for m in region.members] for item in both)
        if file.path not in archived or len(keys) != len(theirs):
            continue
        for key, named in zip(keys, theirs, strict=True):
            spec, other = specs[key], reference.spec(named)
            alike = (spec.role, spec.dtype, spec.shape) == (other.role, other.dtype, other.shape)
            if alike and spec.parameter in slots and other.parameter in parsed.free:
                owners[spec.parameter] = other.parameter
    return Matching(owners, tuple(spec.name for spec in reference.specs if spec.role in MODEL_ROLES))
