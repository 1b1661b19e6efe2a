"""Order the checkpoints of a run by the numbers in their names and in the files.

Each source of an order (a key in the files, a counter in the names) is a candidate. The best candidate
numbers the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

from inshrink_core.formats.disk import natural_key
from inshrink_core.formats.names import AVERAGES, MAX_STEP, Number, read_name, settled, stem_of
from inshrink_core.formats.state_tree import STEP_KEYS

_GLOBAL: Final = frozenset({"global_step", "iter_num", "num_updates"})
"""Keys that count from the beginning of the training."""

_UNITS: Final = ("step", "inner", "pair", "plain", "epoch", "version", "attached")
"""Units of counters in names, in order of precedence."""

_COUNTS: Final = {"step": "step", "inner": "step", "pair": "step", "epoch": "epoch"}
_NAMES: Final = "names"
_MIXED: Final = "keys in the files and names"
_SECOND_NS: Final = 10**9
"""Minimum time between files saved by a training; copied files may be closer."""

Value = tuple[Any, ...]
"""The sort key of a checkpoint: the numbers around its counter, outermost first, and the counter."""


class Evidence(NamedTuple):
    """The properties of a checkpoint that determine its place in a run.

    Parameters
    ----------
    path
        POSIX path relative to the run.
    keys
        Step keys found inside, with their values.
    mtime_ns
        Modification time in nanoseconds; None if unknown, as in a bucket.
    """

    path: str
    keys: tuple[tuple[str, int], ...] = ()
    mtime_ns: int | None = None


class Placement(NamedTuple):
    """The step of a checkpoint, None if unknown, and whether it belongs to the run's main line."""

    step: int | None
    is_main: bool = True


class _Source(NamedTuple):
    """A candidate for the order: its description, the unit it counts, and a value or None per checkpoint."""

    text: str
    unit: str
    values: list[Value | None]


def order_checkpoints(evidence: Sequence[Evidence]) -> tuple[list[Placement], str]:
    """Return the place of every checkpoint of a run, and the origin of the steps.

    Parameters
    ----------
    evidence
        The properties of each checkpoint, in any order.

    Returns
    -------
    placements
        One for each checkpoint. Those with the same step on the main line are parts of one checkpoint.
    origin
        A sentence. After a semicolon it lists sources that would order the checkpoints differently.

    Notes
    -----
    The sources of an order are, in order of precedence: keys that count steps, steps and bare
    numbers in names, the key ``epoch``, epochs and versions in names, digits after words, dates and times.
    The chosen source covers the most checkpoints; ties are resolved by the number of distinct values, then by
    agreement with the other sources, then by precedence.

    A counter that restarts within an epoch, a version or a day continues after the previous values, so that a
    later checkpoint changes no earlier step. Without any number, files are numbered by their modification
    times if these are known and at least a second apart, otherwise in natural order. ``best``, ``last`` and
    the like take a free step if a number or a key gives one. Time is n log n in the number of files.

    Examples
    --------
    >>> rows, _ = order_checkpoints([Evidence("ep1_it500.pt"), Evidence("ep2_it500.pt"), Evidence("best.pt")])
    >>> [(one.step, one.is_main) for one in rows]
    [(500, True), (1000, True), (None, False)]
    """
    stems = [natural_key(stem_of(item.path)) for item in evidence]
    natural = sorted(range(len(evidence)), key=lambda i: (stems[i], evidence[i].path))
    if not evidence:
        return [], "no checkpoints"
    run = _Run([evidence[i] for i in natural])
    places = dict(zip(natural, run.placements(), strict=True))
    return [places[i] for i in range(len(evidence))], run.origin()


class _Run:
    """The checkpoints of a run in natural order, and their numbering.

    The main line consists of the checkpoints in `regular`; the others take the remaining places.
    """

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        self.evidence = evidence
        self.keys = [dict(item.keys) for item in evidence]
        self.names = settled([read_name(item.path) for item in evidence])
        self.regular = self._regular()
        self.sources = list(self._sources())
        self.columns = self._columns()
        best = max(self.sources, key=self._merit)
        self.chosen = best if self._merit(best)[0] else self._positions()
        self.offsets: dict[Value, Number] = {}
        self.steps = self._steps()

    def _regular(self) -> list[int]:
        every = set(range(len(self.names)))
        keyed = {i for i in every if self.keys[i]}
        numbered = {i for i in every if self.names[i].unit}
        labelled = {i for i in every if self.names[i].labels}
        choices = ((numbered | keyed) - labelled, numbered, keyed, every - labelled, every)
        return sorted(next(filter(None, choices)))

    def _sources(self) -> Iterator[_Source]:
        """Yield the candidates for the order, in order of precedence."""
        epochs = [keys.get("epoch") for keys in self.keys]
        nothing: list[Value] = [()] * len(epochs)
        present = {key for keys in self.keys for key in keys} - {"epoch"}
        counting = [*(key for key in STEP_KEYS if key in present), *sorted(present.difference(STEP_KEYS))]
        for key in counting:
            counters = [keys.get(key) for keys in self.keys]
            around = [() if epoch is None or key in _GLOBAL else (epoch,) for epoch in epochs]
            yield self._source(f"the key '{key}'", "step", counters, around)
            yield self._source(f"the key '{key}'", "step", counters)
        for unit in _UNITS:
            if unit == "epoch":
                yield self._source("the key 'epoch'", unit, epochs, nothing)
            yield self._named(unit)
        times = [0 if name.unit == "time" else None for name in self.names]
        yield self._source("the dates and times in names", "time", times, nothing)
        first = [next((keys[key] for key in counting if key in keys), None) for keys in self.keys]
        for unit, inside in (("step", first), ("epoch", epochs)):
            rows = zip(inside, *map(self._counters, (unit, "plain", "attached")), strict=True)
            mixed = [next((counter for counter in row if counter is not None), None) for row in rows]
            yield self._source(_MIXED, unit, mixed)

    def _counters(self, unit: str) -> list[Any]:
        counters = [name.counter if name.unit == unit else None for name in self.names]
        # Digits that are equal everywhere are no counter, as in "resnet50_a.pt" and "resnet50_b.pt".
        found = [counter for counter in counters if counter is not None]
        is_name = unit == "attached" and len(found) > 1 and len(set(found)) == 1
        return [None] * len(counters) if is_name else counters

    def _source(
        self, text: str, unit: str, counters: Sequence[Any], leading: Sequence[Value] | None = None
    ) -> _Source:
        """Return an order by counters within versions, and within times and leading numbers if given."""
        values: list[Value | None] = [None] * len(counters)
        for i, (name, counter) in enumerate(zip(self.names, counters, strict=True)):
            if counter is not None:
                more = ((), ()) if leading is None else (name.times, leading[i])
                values[i] = ((name.versions, *more), counter)
        return _Source(text, unit, values)

    def _named(self, unit: str) -> _Source:
        counters, leading = self._counters(unit), [name.leading for name in self.names]
        rows = [(leading[i], counters[i]) for i in self.regular if counters[i] is not None]
        distinct = len(dict(rows)) == len(rows)
        if unit == "pair" and distinct and all(0 < last <= outer[-1] for outer, last in rows):
            # In "ckpt_900_93" the first number counts: updates outnumber epochs.
            counters = [None if n is None else outer[-1] for outer, n in zip(leading, counters, strict=True)]
            leading = [outer[:-1] for outer in leading]
        return self._source(_NAMES, unit, counters, leading)

    def _is_complete(self, source: _Source) -> bool:
        return all(source.values[i] is not None for i in self.regular)

    def _ranks(self, values: Sequence[Any]) -> list[int]:
        ranks = {value: rank for rank, value in enumerate(sorted({values[i] for i in self.regular}))}
        return [ranks[values[i]] for i in self.regular]

    def _columns(self) -> dict[str, list[int]]:
        """Return the orders to compare with: ranks by keys, and by names or their natural order."""
        complete = [source for source in self.sources if self._is_complete(source) and source.text != _MIXED]
        columns = {source.text: self._ranks(source.values) for source in complete}
        if not any(source.text == _NAMES or source.unit == "time" for source in complete):
            columns["the natural order of names"] = list(range(len(self.regular)))
        return columns

    def _disagreeing(self, source: _Source) -> list[str]:
        order = self._ranks(source.values)
        rows = ((text, sorted(zip(order, column, strict=True))) for text, column in self.columns.items())
        return [text for text, row in rows if any(a[1] > b[1] for a, b in pairwise(row))]

    def _merit(self, source: _Source) -> tuple[int, int, int]:
        found = [(source.values[i], self.names[i].part) for i in self.regular if source.values[i] is not None]
        disagreeing = self._disagreeing(source) if len(found) == len(self.regular) else ()
        return len(found), len(set(found)), -len(disagreeing)

    def _positions(self) -> _Source:
        """Return an order without numbers: by file times or by names, for each part."""
        times = [item.mtime_ns or 0 for item in self.evidence]
        groups: dict[str, list[int]] = {}
        for i in sorted(self.regular, key=times.__getitem__):
            groups.setdefault(self.names[i].part, []).append(i)
        gaps = [(times[a], times[b] - times[a]) for group in groups.values() for a, b in pairwise(group)]
        text = "the times of the files: no number was found"
        if not gaps or not all(begin and gap >= _SECOND_NS for begin, gap in gaps):
            groups = {part: sorted(group) for part, group in groups.items()}
            text = "the natural order of names: no number was found"
        places = {i: place for group in groups.values() for place, i in enumerate(group)}
        values = [((), places[i]) if i in places else None for i in range(len(times))]
        return _Source(text, "position", values)

    def _steps(self) -> list[int | None]:
        """Return the steps by the chosen source, and record the offsets of counters that restart."""
        values = self.chosen.values
        known = sorted({value for i in self.regular if (value := values[i]) is not None})
        last: dict[Value, Number] = {}
        for outer, counter in filter(None, values):
            # Include checkpoints outside the main line, so that a later restart does not collide with them.
            last[outer] = max(counter, last.get(outer, 0))
        top: Number = -1
        offset: Number = 0
        for outer, group in groupby(known, key=lambda value: value[0]):
            first = next(group)[1]
            if first + offset <= top:
                offset = top + (not first)
            self.offsets[outer], top = offset, last[outer] + offset
        steps = [self._step(value) for value in values]
        exact = all(steps[i] is not None for i in self.regular if values[i] is not None)
        self.is_ordinal = self.chosen.unit == "time" or not exact
        if self.is_ordinal:
            self.offsets = {}
            places: dict[Value | None, int] = {value: place for place, value in enumerate(known)}
            steps = [places.get(value) for value in values]
        return steps

    def _step(self, value: Value | None) -> int | None:
        if value is None or (value[0] not in self.offsets and any(self.offsets.values())):
            return None
        step = value[1] + self.offsets.get(value[0], 0)
        return step if isinstance(step, int) and step < MAX_STEP else None

    def _comparable(self) -> list[_Source]:
        """Return the sources whose counters equal the steps of the main line wherever both exist."""
        if not self.offsets or any(self.offsets.values()):
            return []
        # If no checkpoint of the main line has keys, other checkpoints' keys count if their unit matches.
        has_keys = any(self.keys[i] for i in self.regular)
        unit = _COUNTS.get(self.chosen.unit) if self.chosen.text == _NAMES and not has_keys else None
        found = []
        for source in self.sources:
            known = [(v[1], self.steps[i]) for i in self.regular if (v := source.values[i]) is not None]
            alike = unit is not None and _COUNTS.get(source.unit) == unit
            if source.text != _MIXED and (all(a == b for a, b in known) if known else alike):
                found.append(source)
        return found

    def placements(self) -> list[Placement]:
        """Return the place of each checkpoint: the main line first, the others in the remaining places."""
        regular, comparable = set(self.regular), self._comparable()
        names = enumerate(self.names)
        rows = [(i not in regular, self.steps[i] is None, not n.unit, bool(n.labels), i) for i, n in names]
        taken: set[tuple[int, str]] = set()
        places: dict[int, Placement] = {}
        for *_, i in sorted(rows):
            name, step = self.names[i], self.steps[i]
            if step is None:
                found = (source.values[i] for source in comparable)
                step = next((value[1] for value in found if value is not None), None)
            is_average = i not in regular and not AVERAGES.isdisjoint(name.labels)
            if step is not None:
                places[i] = Placement(step, not is_average and (step, name.part) not in taken)
                if places[i].is_main:
                    taken.add((step, name.part))
                continue
            counter = name.counter if isinstance(name.counter, int) else None
            counts = name.unit in _UNITS[:5] and not name.labels and not is_average
            places[i] = Placement(counter if counts else None, is_main=False)
        return [places[i] for i in range(len(places))]

    def origin(self) -> str:
        """Return the origin of the steps, and any doubts about it."""
        doubts = ["counters that restart go on where the last ones ended"] * any(self.offsets.values())
        if self._is_complete(self.chosen) and self.chosen.unit != "position":
            others = (text for text in self._disagreeing(self.chosen) if text != self.chosen.text)
            doubts += [f"{text} would order them otherwise" for text in others]
        return "; ".join([f"steps come from {'the order of ' * self.is_ordinal}{self.chosen.text}", *doubts])
