"""Match numbered optimizer state to parameters from order and headers alone.

A torch optimizer numbers its parameters in the order in which the training script passes them: group by
group, and within a group nearly always in the model's order. A file may instead sort its weights by name. A
*law* assigns weights to numbers under the assumption that the script followed a certain order, and makes no
claim where the assignment is ambiguous. The values decide whether the law holds
(`inshrink_core.formats.matching.values`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from inshrink_core.formats.disk import natural_key

_DIGITS: Final = re.compile(r"\d+")
_LEAVES: Final = {"weight": "0", "bias": "1"}
"""Rank of a module's leaves: modules register the weight before the bias."""

_NO_DECAY: Final = re.compile(
    r"(^|[._])(bias|(layer|rms|group|batch)?_?norm\d*|ln(_\w+)?)([._]|$)", re.IGNORECASE
)
_MAX_TRIED: Final = 1 << 22
"""Maximum number of shapes compared while searching for the position of a group's parameters."""

_FEWEST_CONFIRMED: Final = 5

Shape = tuple[int, ...]
Claims = Mapping[str, str]
"""Name of the matched weight by slot key."""


class Slot(NamedTuple):
    """A parameter that an optimizer knows by number only.

    Parameters
    ----------
    key
        Name of its state while its parameter is unknown, such as ``optimizer.state.3``.
    optimizer, group
        Number of its optimizer, and number of its group among the groups of all optimizers.
    shape
        Shape of the parameter; None if no state tensor shows it.
    """

    key: str
    optimizer: int
    group: int
    shape: Shape | None


class Matching(NamedTuple):
    """The weight that each slot belongs to, and the model's tensor order.

    Parameters
    ----------
    owners
        Name of the weight by slot key; a missing slot is unattributed.
    order
        Names of the model's tensors; missing tensors follow in natural order.
    """

    owners: Claims
    order: tuple[str, ...] = ()


def is_sorted(names: Sequence[str]) -> bool:
    """Return whether names are in alphabetical order, which gives no information about the model's order."""
    return all(name <= other for name, other in itertools.pairwise(names))


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return names in a model's order; unknown names follow their modules, in natural order.

    Examples
    --------
    >>> in_order(["h.10.weight", "h.2.bias", "h.2.weight"], ())
    ['h.2.weight', 'h.2.bias', 'h.10.weight']
    """
    rank = {name: at for at, name in enumerate(order)}
    module = {name.rpartition(".")[0]: at for name, at in rank.items()}

    def place(name: str) -> tuple[int, tuple[tuple[int, int, str], ...]]:
        at = rank.get(name)
        parent = module.get(name.rpartition(".")[0], len(rank))
        return (parent, natural_key(_as_registered(name))) if at is None else (at, ())

    return sorted(names, key=place)


def _as_registered(name: str) -> str:
    """Return a sort key that places a module's weight before its bias."""
    parent, dot, leaf = name.rpartition(".")
    return f"{parent}{dot}{_LEAVES.get(leaf, leaf)}"


def by_shape(slots: Sequence[Slot], weights: Mapping[str, Shape]) -> Claims:
    """Claim what shapes alone determine: the only slot and the only weight of a shape belong together."""
    classes = by_shapes(slots, weights).values()
    return {members[0].key: names[0] for members, names in classes if len(members) == len(names) == 1}


def by_number(slots: Sequence[Slot], weights: Mapping[str, Shape]) -> Claims:
    """Claim weights of one group whose names differ only in numbers, in the order of their numbers."""
    found: dict[str, str] = {}
    for members, names in by_shapes(slots, weights).values():
        patterns = {_DIGITS.sub("#", name) for name in names}
        if len(members) == len(names) and len(patterns) == 1 and len({slot.group for slot in members}) == 1:
            found |= dict(zip((slot.key for slot in members), sorted(names, key=natural_key), strict=True))
    return found


def claims_of_headers(
    slots: Sequence[Slot], weights: Mapping[str, Shape], *, ordered: bool
) -> dict[str, str]:
    """Return the claims that need no values.

    Parameters
    ----------
    slots, weights
        As for `by_order`.
    ordered
        Whether the weights are in the model's order.
    """
    claims, doubted = by_order(slots, weights) if ordered else (by_number(slots, weights), frozenset())
    found = {key: name for key, name in claims.items() if key not in doubted}
    taken = set(found.values())
    alone = by_shape(slots, weights)
    return found | {k: v for k, v in alone.items() if k not in found and v not in taken}


def by_shapes(
    slots: Sequence[Slot], weights: Mapping[str, Shape]
) -> dict[Shape | None, tuple[list[Slot], list[str]]]:
    """Group slots and weights by shape."""
    found: dict[Shape | None, tuple[list[Slot], list[str]]] = {}
    for slot in slots:
        found.setdefault(slot.shape, ([], []))[0].append(slot)
    for name, shape in weights.items():
        found.setdefault(shape, ([], []))[1].append(name)
    return found


def by_order(slots: Sequence[Slot], weights: Mapping[str, Shape]) -> tuple[Claims, frozenset[str]]:
    """Claim what follows if every group lists its parameters in the model's order; name the doubtful slots.

    Parameters
    ----------
    slots
        The slots of all optimizers, in order.
    weights
        Shapes by name, in the model's order.

    Notes
    -----
    An optimizer has all weights of the model or of one part of it. Its groups follow each other, or the first
    of two groups omits biases and norms and the second holds them. A claim must follow from every reading
    that agrees with all shapes. If no reading agrees, each group is assumed to be a subsequence of the
    model's order; a claim then requires that only one position is possible.

    A slot is doubtful if its claim depends on groups that follow each other in the model: several groups of
    its optimizer contain its shape, and no split into biases and norms separates the groups. Order alone then
    does not determine which weight is in which group.
    """
    found: dict[str, str] = {}
    doubted: set[str] = set()
    items = {(slot.optimizer, slot.group, slot.shape) for slot in slots}
    n_groups = Counter((optimizer, shape) for optimizer, _, shape in items)
    for of_optimizer in _groups(slots, "optimizer"):
        readings = list(_readings(_groups(of_optimizer), weights))
        if not readings or not all(apart for _, apart in readings):
            doubted |= {slot.key for slot in of_optimizer if n_groups[slot.optimizer, slot.shape] > 1}
        if readings:
            first, *others = (claims for claims, _ in readings)
            found |= {key: n for key, n in first.items() if all(claims.get(key) == n for claims in others)}
        elif len(slots) == len(of_optimizer):
            for group in _groups(of_optimizer):
                places = zip(group, _embedded(group, weights, {}), strict=False)
                found |= {slot.key: names[0] for slot, names in places if len(names) == 1}
    times = Counter(found.values())
    return {key: name for key, name in found.items() if times[name] == 1}, frozenset(doubted)


def _groups(slots: Iterable[Slot], field: str = "group") -> list[list[Slot]]:
    return [list(items) for _, items in itertools.groupby(slots, key=attrgetter(field))]


def _readings(
    groups: Sequence[Sequence[Slot]], weights: Mapping[str, Shape]
) -> Iterator[tuple[Claims, bool]]:
    """Yield the claims of every assignment of model tensors to an optimizer that agrees with all shapes.

    The second item is whether biases and norms separate its groups.
    """
    names, n = list(weights), sum(map(len, groups))
    parts = _parts(names)
    # An optimizer covers whole parts of a model.
    cuts = {0, len(names), *(at for at in range(1, len(names)) if parts[at - 1] != parts[at])}
    starts = [at for at in sorted(cuts) if at + n in cuts]
    if len(starts) * n > _MAX_TRIED:
        return
    splits: list[Callable[[str, Shape], bool]] = []
    if len(groups) == 2:
        splits = [lambda name, _: _NO_DECAY.search(name) is not None, lambda _, shape: len(shape) < 2]
    for start in starts:
        part = list(weights.items())[start : start + n]
        arranged = [part]
        for is_last in splits:
            first = [item for item in part if not is_last(*item)]
            last = [item for item in part if is_last(*item)]
            halves = (first, last), (last, first)
            arranged += [one + other for one, other in halves if len(one) == len(groups[0])]
        slots = [slot for group in groups for slot in group]
        for at, row in enumerate(arranged):
            if all(slot.shape in (None, shape) for slot, (_, shape) in zip(slots, row, strict=True)):
                yield {slot.key: name for slot, (name, _) in zip(slots, row, strict=True)}, at > 0


def _parts(names: Sequence[str]) -> list[str]:
    """Return the model part of each tensor: the module below the common prefix of all names."""
    split = [name.split(".") for name in names]
    pairs = zip(min(split)[:-1], max(split)[:-1], strict=False) if split else ()
    n_common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [".".join(item[: n_common + 1]) for item in split]


def _embedded(slots: Sequence[Slot], weights: Mapping[str, Shape], certain: Claims) -> list[list[str]]:
    """Return the possible weights of each slot of a group embedded in the model's order with gaps.

    The result is empty if the group does not fit.
    """
    names, shapes = list(weights), list(weights.values())
    first = _leftmost(slots, names, shapes, certain)
    last = _leftmost(slots[::-1], names[::-1], shapes[::-1], certain)
    if first is None or last is None:
        return []
    return [names[start : len(names) - end] for start, end in zip(first, reversed(last), strict=True)]


def by_anchors(slots: Sequence[Slot], weights: Mapping[str, Shape], certain: Claims) -> dict[str, str]:
    """Claim the only weights that are possible if every group lists its parameters in the model's order.

    Parameters
    ----------
    slots, weights
        As for `by_order`.
    certain
        The claims already known.

    Returns
    -------
    dict
        Name of the weight by slot key, for slots that are not certain. Empty unless five pairs of
        neighbours confirm the order and none contradicts it. For one group the chance of this is one in 720,
        and the shapes must agree as well.
    """
    place = {name: at for at, name in enumerate(weights)}
    found: dict[str, str] = {}
    n_confirmed = 0
    for group in _groups(slots):
        at = [place[certain[slot.key]] for slot in group if certain.get(slot.key) in place]
        if any(item >= other for item, other in itertools.pairwise(at)):
            return {}
        n_confirmed += max(0, len(at) - 1)
        places = _embedded(group, weights, certain)
        if not places:
            return {}
        taken = set(certain.values())
        for slot, between in zip(group, places, strict=True):
            names = [n for n in between if slot.shape in (None, weights[n]) and n not in taken]
            if slot.key not in certain and len(names) == 1:
                found[slot.key] = names[0]
    times = Counter(found.values())
    claims = {key: name for key, name in found.items() if times[name] == 1}
    return claims if n_confirmed >= _FEWEST_CONFIRMED else {}


def _leftmost(
    slots: Sequence[Slot], names: Sequence[str], shapes: Sequence[Shape], certain: Claims
) -> list[int] | None:
    """Return the position of each slot if all are placed as early as possible; None if they do not fit."""
    found, at = [], 0
    owned = {name: key for key, name in certain.items()}
    for slot in slots:
        wanted = certain.get(slot.key)
        while at < len(shapes) and (
            (wanted is not None and wanted != names[at])
            or owned.get(names[at], slot.key) != slot.key
            or slot.shape not in (None, shapes[at])
        ):
            at += 1
        if at == len(shapes):
            return None
        found.append(at)
        at += 1
    return found
