"""Order the checkpoints of a run: the numbers in their names and those inside, read together.

A name is read alone: which of its numbers count steps, epochs or runs, which are dates, metrics, sizes or
ranks. The checkpoints of a run are then compared: each source of an order (a key inside, a counter in the
names) is a candidate, and the best one numbers the checkpoints.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby, pairwise
from typing import Any, Final, NamedTuple

from inshrink_core.formats.disk import natural_key
from inshrink_core.formats.state_tree import STEP_KEYS

_GLOBAL: Final = frozenset({"global_step", "iter_num", "num_updates"})
"""Keys that count from the beginning of the training."""

_COUNTS_OF: Final = {"step": "step", "inner": "step", "pair": "step", "epoch": "epoch"}
_MIXED: Final = "keys in the files and names"
_MAX_STEP: Final = 1 << 62
_MOST_DIGITS: Final = 24
"""Of a number, with a fraction and an exponent: what is longer counts nothing."""

_SECOND_NS: Final = 10**9
"""Files that a training saved are this far apart at least; those that were copied may be closer."""

_LEVELS: Final[Mapping[str, str]] = {
    word: level
    for level, words in {
        "step": "step steps global globalstep gstep s",
        "iteration": "iter iters iteration iterations it its itr i update updates upd timestep timesteps",
        "amount": "tick ticks kimg img imgs token tokens tok frame frames sample samples example examples "
        "episode episodes game games",
        "epoch": "epoch epochs epo ep e round rounds generation generations",
        "version": "version ver v run trial stage phase fold seed exp experiment cycle task attempt split",
        "rank": "rank shard tp pp dp mp worker proc process gpu node device partition",
        "measure": "acc accuracy loss psnr ssim fid bleu wer cer map miou iou auc ppl perplexity score "
        "reward val valid rmse mse mae err error dice precision recall metric lpips kid elo mrr ndcg rouge "
        "auroc ap bpb bpd nll ce lr wd bs batchsize dropout dim hidden size",
        "plain": "checkpoint checkpoints ckpt ckpts chkpt cp cpt model models mdl net network snapshot "
        "weight weights save saved state g d gen dis disc opt optim optimizer batch b",
    }.items()
    for word in words.split()
}
_STEPS: Final = ("step", "iteration", "amount")
_COUNTED: Final = "|".join(
    sorted((w for w, at in _LEVELS.items() if at in (*_STEPS, "epoch")), key=len)[::-1]
)

_AVERAGES: Final = frozenset({"ema", "swa", "avg", "average", "averaged", "ave"})
_LABELS: Final = _AVERAGES.union(
    re.findall(
        r"\w+",
        "best last latest final init initial interrupt interrupted emergency backup bak resume current "
        "newest recent optimal pretrained crash preempted old prev previous lowest highest finished",
    )
)
_LABEL: Final = re.compile(r"best(?=model|$)|(?<=model)(?:best|final|last)$|(?:final|latest|last)(?=model)")

_SUFFIXES: Final = re.compile(
    r"(\.(pt|pth|bin|ckpt|safetensors|tar|t7|th|zip|h5|hdf5|pkl|npz|params|weights|distcp))+$", re.IGNORECASE
)
_REVISION: Final = re.compile(r"-v\d+$")
"""What Lightning adds to a name that is there already."""
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PIECES: Final = re.compile(r"[^A-Za-z0-9.]+")
_MEASURES: Final = re.compile(
    r"(?<![a-z0-9])(?:f1|r2|top-?[15]|acc[15]|map50|ap50|hits@?\d+|recall@\d+)(?=[-_=:@]*\d)"
)
_ID: Final = re.compile(
    r"(?<![a-z0-9])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[a-z0-9]{6,})(?![a-z0-9])"
)
_HASH: Final = re.compile(r"(?=.{7})(?=.*\d)(?=.*[a-f].*[a-f])[0-9a-f]+")
_SWITCHED: Final = re.compile(r"[a-z]+|\d+")
_OF: Final = re.compile(r"(?<![a-z0-9])(\d+)[-_]?of[-_]?(\d+)(?!\d)")

_YEAR: Final = r"(?P<year>(?:19|20)\d\d)"
_MONTHS: Final = "janfebmaraprmayjunjulaugsepoctnovdec"
_MONTH: Final = (
    r"(?P<name>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_DATES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?<!\d){_YEAR}([-_.]?)(?P<first>0[1-9]|1[0-2])\2(?P<second>0[1-9]|[12]\d|3[01])",
        rf"(?<!\d)(?P<second>[0-3]?\d)[-_ ]?{_MONTH}[-_ ]?{_YEAR}",
        rf"(?<![a-z]){_MONTH}[-_ ]?(?P<second>[0-3]?\d)(?!\d)(?:[-_, ]+{_YEAR})?",
        rf"(?<!\d)(?P<first>[0-3]\d)(?P<either>[-_.])(?P<second>[0-3]\d)[-_.]{_YEAR}",
        r"(?<![\d.])(?=\d\d[-:]\d\d[-:]\d\d(?![\d.]))",
    )
)
_CLOCK: Final = re.compile(
    r"[-_ t./|]{0,3}([01]\d|2[0-3])(?:[-_:.h]([0-5]\d)(?:[-_:.m]([0-5]\d))?|([0-5]\d)([0-5]\d))"
    r"([.,]\d{1,9})?s?z?(?!\d)"
)
_FRACTION: Final = re.compile(r"\.\d+$|e-")
_UNIX: Final = re.compile(r"(?<![\d.])1[2-9]\d{8}(?:\d{3})?(?:\.\d+)?(?!\d)")
_COUNTS: Final = re.compile(rf"(?<![a-z])(?:{_COUNTED})[-_=:]*$")
_NUMBER: Final = re.compile(
    r"(?:(?<![a-z])(?P<word>[a-z]+)(?P<gap>[-_=:.#@ ]*)"
    r"(?:(?<![a-z])(?:num|number|no|nr|idx|index|count)[-_=:]*)?)?"
    r"(?P<digits>\d+(?:\.\d+)?(?:e[-+]?\d{1,2}(?!\d))?)"
    rf"(?:(?P<scale>[kmgbt])(?=(?:{_COUNTED})?(?![a-z0-9])))?"
    rf"(?P<after>(?:{_COUNTED})(?![a-z0-9])|[-_ ](?:{_COUNTED})(?![a-z])(?![-_= ]*\d))?(?=(?P<rest>[a-z]*))"
)
_SCALES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}

Number = int | float
Value = tuple[Any, ...]
"""What orders a checkpoint: the tuples around its counter, outermost first, and the counter last."""


class Evidence(NamedTuple):
    """What is known of a checkpoint that its place in a run follows from.

    Parameters
    ----------
    path
        POSIX, relative to the run.
    keys
        Step keys found inside with their values.
    model
        A signature of the model in it, such as names and shapes; None where that is not known.
    mtime_ns
        When the file was written; None where nothing tells, as in a bucket.
    """

    path: str
    keys: tuple[tuple[str, int], ...] = ()
    model: Hashable | None = None
    mtime_ns: int | None = None


class Placement(NamedTuple):
    """The place of a checkpoint in a run.

    Parameters
    ----------
    step
        None for a checkpoint that has a branch, and no number.
    branch
        Empty on the main line, else a name: ``best``, ``last``, ``ema``.
    reason
        Why it is not on the main line.
    part
        Of a file that one rank wrote, which: ``rank0``. The parts of one step are one checkpoint.
    """

    step: int | None
    branch: str = ""
    reason: str = ""
    part: str = ""


class Order(NamedTuple):
    """The places of checkpoints, in the order in which they were given.

    Parameters
    ----------
    placements
        One for each checkpoint.
    origin
        Where the steps come from, and what decided where there was doubt.
    doubtful
        Whether there was.
    """

    placements: tuple[Placement, ...]
    origin: str
    doubtful: bool


class _Name(NamedTuple):
    """What a name says: `unit` is what its counter counts, `leading` what that may restart with."""

    unit: str = ""
    counter: Number | None = None
    versions: tuple[float, ...] = ()
    times: tuple[Value, ...] = ()
    leading: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    part: str = ""


class _Source(NamedTuple):
    """A candidate for the order: where it is read, the unit it counts, and a value or None for each."""

    text: str
    unit: str
    values: list[Value | None]


def step_in_name(name: str) -> int | None:
    """Return the step in a file's name, or None.

    Examples
    --------
    >>> step_in_name("epoch=3-step=400.ckpt"), step_in_name("model_1.5M.pt"), step_in_name("last.pt")
    (400, 1500000, None)
    """
    counter = _read(name).counter
    return counter if isinstance(counter, int) else None


def is_numbered(name: str) -> bool:
    """Tell whether a name has a number that tells it from its siblings, or a time.

    Examples
    --------
    >>> is_numbered("Feb01_00-10-00"), is_numbered("model_0200.pt"), is_numbered("best.pt")
    (True, True, False)
    """
    return bool(_read(name).unit)


def _blank(found: re.Match[str]) -> str:
    return "|" * len(found.group())


def _without_id(found: re.Match[str]) -> str:
    """Blank a digest or a random name, not words with their counters."""
    text = found.group()
    pieces = _SWITCHED.findall(text)
    is_random = len(pieces) > 3 and not any(piece in _LEVELS for piece in pieces)
    return _blank(found) if "-" in text or is_random or _HASH.fullmatch(text) else text


def _take_dates(text: str) -> tuple[str, list[Value]]:
    """Return a text without its dates, and these: whether day and month may be swapped, and the fields."""
    times: list[Value] = []
    for pattern in _DATES:
        at = 0
        while found := pattern.search(text, at):
            fields, clock = found.groupdict(), _CLOCK.match(text, found.end())
            at = found.end() + 1
            alone = (
                not fields.get("year")
                or text[at - 1 : at].isdigit()
                or _COUNTS.search(text, 0, found.start())
            )
            if clock is None and alone:
                continue
            month = _MONTHS.index(fields["name"][:3]) // 3 + 1 if fields.get("name") else fields.get("first")
            date = [int(one or 0) for one in (fields.get("year"), month, fields.get("second"))]
            if clock:
                hour, minute, second, minutes, seconds, rest = clock.groups()
                date += [int(hour), int(minute or minutes), int(second or seconds or 0)]
                date.append(int((rest or "")[1:].ljust(9, "0")))
            times.append(("either" in fields, *date))
            end = clock.end() if clock else at - 1
            text = text[: found.start()] + "|" * (end - found.start()) + text[end:]
    for found in _UNIX.finditer(text):
        if not _COUNTS.search(text, 0, found.start()):
            times.append((False, float(found.group())))
            text = text[: found.start()] + _blank(found) + text[found.end() :]
    return text, times


def _level(found: re.Match[str]) -> str:
    """Return what the number at a match counts, by the words around it; nothing for a size or a metric."""
    word, after, digits, scale = found["word"], found["after"], found["digits"], found["scale"]
    level = _LEVELS.get(word or "", "plain" if not word or found["gap"] else "attached")
    if after and level not in (*_STEPS, "epoch"):
        level = _LEVELS[after.strip("-_ ")]
    sized = _LEVELS.get(found["rest"]) != "plain" if found["rest"] else _FRACTION.search(digits)
    if level in ("plain", "attached") and sized and not scale:
        return ""
    return "" if level == "measure" else level


def _numbers(text: str) -> Iterator[tuple[str, Number, int, str]]:
    """Yield level, value, place and text of the numbers that count something."""
    for found in _NUMBER.finditer(text):
        level, digits, scale = _level(found), found["digits"], _SCALES[found["scale"] or ""]
        if not level or len(digits) > _MOST_DIGITS:
            continue
        value = int(digits) * scale if digits.isdigit() else round(float(digits) * scale, 6)
        value = int(value) if value == int(value) else value
        if value < _MAX_STEP:
            yield level, value, found.start("digits"), f"{found['word']}{digits}"


@functools.lru_cache(maxsize=1 << 14)
def _read(path: str) -> _Name:
    """Return what a path says, without regard to others."""
    text = _CAMEL.sub("_", _REVISION.sub("", _SUFFIXES.sub("", path))).lower()
    words = re.findall("[a-z]+", text)
    labels = [one[0] for word in words if (one := [word] if word in _LABELS else _LABEL.findall(word))]
    text, times = _take_dates(_MEASURES.sub("score", text))
    part: list[str] = []
    for of in _OF.finditer(text):
        # Of "epoch_3_of_100" the 3 counts.
        begin = of.end(1) if _COUNTS.search(text, 0, of.start()) else of.start()
        part += [f"{of[1]}-of-{of[2]}"] if begin == of.start() else []
        text = text[:begin] + "|" * (of.end() - begin) + text[of.end() :]
    found: dict[str, list[tuple[Number, int]]] = {}
    for level, value, at, number in _numbers(_ID.sub(_without_id, text)):
        if level == "rank" and not (number.startswith("rank") and "lora" in words):
            part.append(number)
        else:
            found.setdefault(level, []).append((value, at))
    versions = found.get("version", [])
    unit = next((one for one in (*_STEPS, "epoch", "plain", "attached") if one in found), "")
    counters = found.get(unit, [])
    inner = [one for one in found.get("plain", []) if unit == "epoch" and one[1] > counters[-1][1]]
    counters = [*counters, *inner]
    if unit == "attached" and versions and versions[-1][1] > counters[-1][1]:
        unit = ""
    if unit:
        folder = text.rfind("/", 0, counters[0][1])
        others = [one for level in {"plain", "attached"} - {unit} for one in found.get(level, [])]
        versions = sorted([*versions, *(one for one in others if one[1] < folder)], key=lambda one: one[1])
    elif versions and not times:
        unit, counters, versions = "version", versions[-1:], versions[:-1]
    leading = found.get("epoch", []) if unit in _STEPS else counters[:-1]
    is_pair = unit == "plain" and leading
    return _Name(
        "step"
        if unit in _STEPS
        else "inner"
        if inner
        else "pair"
        if is_pair
        else unit or ("time" if times else ""),
        counters[-1][0] if counters else None,
        tuple(value for value, _ in versions),
        tuple(times),
        tuple(value for value, _ in leading),
        tuple(dict.fromkeys(labels)),
        "-".join(part),
    )


def order_checkpoints(evidence: Sequence[Evidence]) -> Order:
    """Return the place of every checkpoint of a run.

    Parameters
    ----------
    evidence
        What is known of each checkpoint, in any order.

    Returns
    -------
    Order
        A step on the main line or a branch for each. Checkpoints with the same step on the main line are
        of different models, or parts of one checkpoint.

    Notes
    -----
    The sources of an order are, in this order: keys that count steps, steps in names, the key ``epoch``,
    epochs in names, versions of the run, other numbers, dates and times. The one is taken that most
    checkpoints have, that tells most of them apart, that most others agree with, and that comes first.
    A counter that restarts within an epoch, a version or a day goes on where the last one ended, so that a
    later checkpoint changes no earlier step. Where there is no number, files are numbered by their times, if
    these are known and seconds apart, else in natural order. ``best``, ``last`` and the like take a step that
    is free if a number or a key says it, else they are branches. Time is n log n in the number of files.

    Examples
    --------
    >>> found = order_checkpoints([Evidence("ep1_it500.pt"), Evidence("ep2_it500.pt"), Evidence("best.pt")])
    >>> [(one.step, one.branch) for one in found.placements]
    [(500, ''), (1000, ''), (None, 'best')]
    """
    # "a.ckpt" comes before "a-v1.ckpt".
    stems = [natural_key(_SUFFIXES.sub("", one.path)) for one in evidence]
    natural = sorted(range(len(evidence)), key=lambda i: (stems[i], evidence[i].path))
    if not evidence:
        return Order((), "no checkpoints", False)
    back = sorted(natural, key=natural.__getitem__)
    run = _Run([evidence[i] for i in natural])
    placements = run.placements()
    return Order(tuple(placements[at] for at in back), *run.origin())


class _Run:
    """The checkpoints of a run in natural order, and how they are numbered.

    `regular` are those that the main line consists of; the rest takes what places are left.
    """

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        self.evidence = evidence
        self.keys = [dict(one.keys) for one in evidence]
        self.names = _settled([_read(one.path) for one in evidence])
        self.kinds = [(one.model, name.part) for one, name in zip(evidence, self.names, strict=True)]
        self.regular = self._regular()
        self.sources = list(self._sources())
        self.chosen = self._choose() or self._positions()
        self.offsets: dict[Value, Number] = {}
        self.steps = self._steps()

    def _regular(self) -> list[int]:
        every = range(len(self.names))
        numbered, labelled = ({i for i in every if getattr(self.names[i], of)} for of in ("unit", "labels"))
        keyed = {i for i in every if self.keys[i]}
        choices = ((numbered | keyed) - labelled, numbered, keyed, set(every) - labelled, set(every))
        return sorted(next(filter(None, choices)))

    def _source(
        self, text: str, unit: str, counters: Sequence[Any], leading: Sequence[Any]
    ) -> Iterator[_Source]:
        """Yield an order by counters within what they may restart with, and within versions alone."""
        rows = list(zip(self.names, counters, leading, strict=True))
        full = [None if n is None else ((name.versions, name.times, more), n) for name, n, more in rows]
        alone = [None if n is None else ((name.versions, (), ()), n) for name, n, _ in rows]
        yield _Source(text, unit, full)
        if alone != full:
            yield _Source(text, unit, alone)

    def _sources(self) -> Iterator[_Source]:
        """Yield the candidates for the order, in order of precedence."""
        nothing: list[Value] = [()] * len(self.names)
        epochs = [keys.get("epoch") for keys in self.keys]
        around = [() if epoch is None else (epoch,) for epoch in epochs]
        counting = [key for key in _sorted_keys(self.keys) if key != "epoch"]
        for key in counting:
            inner = [keys.get(key) for keys in self.keys]
            yield from self._source(f"the key '{key}'", "step", inner, nothing if key in _GLOBAL else around)
        units = ["step", "inner", "pair", "plain", "epoch", "version", "attached"]
        apart = {c - e for c, e in zip(self._counters("plain"), epochs, strict=True) if None not in (c, e)}
        late = 3 if len(apart) == 1 and apart <= {-1, 0, 1} else 4
        for unit in units[:late]:
            yield from self._named(unit)
        yield from self._source("the key 'epoch'", "epoch", epochs, nothing)
        for unit in units[late:]:
            yield from self._named(unit)
        if any(name.unit == "time" for name in self.names):
            times = [0 if name.unit == "time" else None for name in self.names]
            yield next(self._source("the dates and times in names", "time", times, nothing))
        first = [next((keys[key] for key in counting if key in keys), None) for keys in self.keys]
        for counters, also in ((first, "step"), (epochs, "epoch")):
            plain, attached = self._counters("plain"), self._counters("attached")
            named = zip(counters, self._counters(also), plain, attached, strict=True)
            mixed = [next((one for one in row if one is not None), None) for row in named]
            yield next(self._source(_MIXED, also, mixed, nothing))

    def _counters(self, unit: str) -> list[Any]:
        return [name.counter if name.unit == unit else None for name in self.names]

    def _named(self, unit: str) -> Iterator[_Source]:
        counters, leading = self._counters(unit), [name.leading for name in self.names]
        if unit == "pair":
            # Of "ckpt_900_93", the first number counts: updates are more than epochs.
            rows = [(leading[i], counters[i]) for i in self.regular if counters[i] is not None]
            if len(dict(rows)) == len(rows) and all(0 < inner <= outer[-1] for outer, inner in rows):
                counters = [None if n is None else one[-1] for one, n in zip(leading, counters, strict=True)]
                leading = [one[:-1] for one in leading]
        return self._source("names", unit, counters, leading)

    def _ranks(self, values: Sequence[Any]) -> list[int]:
        at = {value: rank for rank, value in enumerate(sorted({values[i] for i in self.regular}))}
        return [at[values[i]] for i in self.regular]

    @functools.cached_property
    def columns(self) -> dict[str, list[int]]:
        """What an order may agree with: ranks by keys, and by names or their natural order."""
        found = {}
        for key in _sorted_keys(self.keys):
            if all(key in self.keys[i] for i in self.regular):
                values = [
                    (name.versions, keys.get(key)) for name, keys in zip(self.names, self.keys, strict=True)
                ]
                found[f"the key '{key}'"] = self._ranks(values)
        named = (s for s in self.sources if s.text == "names" or s.unit == "time")
        whole = next((s for s in named if all(s.values[i] is not None for i in self.regular)), None)
        text = "the natural order of names" if whole is None else whole.text
        column = range(len(self.regular)) if whole is None else self._ranks(whole.values)
        return found | {text: list(column)}

    def _disagreeing(self, source: _Source) -> list[str]:
        order = self._ranks(source.values)
        return [
            text
            for text, column in self.columns.items()
            if any(a[1] > b[1] for a, b in pairwise(sorted(zip(order, column, strict=True))))
        ]

    def _choose(self) -> _Source | None:
        best, chosen, n = (0, 0, 0), None, len(self.regular)
        for source in self.sources:
            merit = self._merit(source)
            if merit > best:
                best, chosen = merit, source
            if best == (n, n, 0):
                break
        return chosen

    def _merit(self, source: _Source) -> tuple[int, int, int]:
        held = [(value, self.kinds[i]) for i in self.regular if (value := source.values[i]) is not None]
        if source.unit == "attached" and len(held) > 1 and len({value[1] for value, _ in held}) == 1:
            return 0, 0, 0
        disagreeing = self._disagreeing(source) if len(held) == len(self.regular) else []
        return len(held), len(set(held)), -len(disagreeing)

    def _positions(self) -> _Source:
        """Return the order where no number tells it: of file times or of names, for each model and part."""
        values: list[Value | None] = [None] * len(self.names)
        text = "the times of the files: no number was found"
        groups: dict[Hashable, list[int]] = {}
        for i in self.regular:
            groups.setdefault(self.kinds[i], []).append(i)
        times = {i: self.evidence[i].mtime_ns or 0 for i in self.regular}
        rows = [sorted(times[i] for i in group) for group in groups.values()]
        if not all(row[0] and all(b - a >= _SECOND_NS for a, b in pairwise(row)) for row in rows):
            times, text = dict.fromkeys(times, 0), "the natural order of names: no number was found"
        for group in groups.values():
            for at, i in enumerate(sorted(group, key=lambda i: (times[i], i))):
                values[i] = ((), at)
        return _Source(text, "position", values)

    def _steps(self) -> list[int | None]:
        """Return the steps by the chosen source, and note how far counters that restart are moved."""
        values = self.chosen.values
        known = sorted({value for i in self.regular if (value := values[i]) is not None})
        by_value: dict[Value, Any] = {}
        reach: dict[Value, Number] = {}
        for outer, counter in filter(None, values):
            # What may take a place that is free, too: a later restart does not meet it.
            reach[outer] = max(counter, reach.get(outer, 0))
        top: Number = -1
        offset: Number = 0
        for outer, group in groupby(known, key=lambda value: value[0]):
            counters = [value[1] for value in group]
            if counters[0] + offset <= top:
                offset = top + (not counters[0])
            self.offsets[outer], top = offset, reach[outer] + offset
            by_value |= {(outer, counter): counter + offset for counter in counters}
        whole = all(isinstance(step, int) for step in by_value.values()) and top < _MAX_STEP
        self.is_ordinal = self.chosen.unit == "time" or not whole
        if self.is_ordinal:
            self.offsets, by_value = {}, {value: rank for rank, value in enumerate(known)}
        return [self._step(value, by_value) for value in values]

    def _step(self, value: Value | None, by_value: Mapping[Value, int]) -> int | None:
        if value is None or value in by_value:
            return None if value is None else by_value[value]
        # One of those that take what is left.
        if not self.offsets or (value[0] not in self.offsets and any(self.offsets.values())):
            return None
        step = value[1] + self.offsets.get(value[0], 0)
        return step if isinstance(step, int) and step < _MAX_STEP else None

    def _comparable(self) -> list[_Source]:
        """Return the sources whose counters are the steps of the main line, as far as it has them."""
        if not self.offsets or any(self.offsets.values()):
            return []
        unit = _COUNTS_OF.get(self.chosen.unit) if self.chosen.text == "names" else None
        # Where nothing on the main line has keys, those of others count the same if they are called so.
        alike = {} if any(self.keys[i] for i in self.regular) else _COUNTS_OF
        found = []
        for source in self.sources:
            known = [(v[1], self.steps[i]) for i in self.regular if (v := source.values[i]) is not None]
            agrees = (
                all(counter == step for counter, step in known) if known else alike.get(source.unit) == unit
            )
            if agrees and source.text != _MIXED and (known or unit):
                found.append(source)
        return found

    def placements(self) -> list[Placement]:
        """Return the place of each checkpoint: the main line first, and what is left of it for the others."""
        regular, comparable = set(self.regular), self._comparable()
        in_turn = sorted(
            range(len(self.names)),
            key=lambda i: (i not in regular, self.steps[i] is None, bool(self.names[i].labels), i),
        )
        held: dict[Hashable, int] = {}
        places: dict[int, Placement] = {}
        for i in in_turn:
            name, kind, step = self.names[i], self.kinds[i], self.steps[i]
            if step is None:
                found = (source.values[i] for source in comparable)
                step = next((value[1] for value in found if value is not None), None)
            is_average = i not in regular and not _AVERAGES.isdisjoint(name.labels)
            holder = held.get(("", step, kind))
            if step is not None and holder is None and not is_average:
                held["", step, kind], places[i] = i, Placement(step, part=name.part)
                continue
            reason = "no number in it or in its name, unlike the others"
            if holder is not None:
                reason = f"step {step} is in {self.evidence[holder].path} already"
            elif is_average:
                reason = "an average of weights beside them"
            elif (
                isinstance(name.counter, int) and name.unit not in ("version", "attached") and not name.labels
            ):
                reason, step = "its number counts something else", name.counter
            branches = self._branches(i, in_turn[0] if holder is None else holder)
            branch = next(one for one in branches if held.setdefault((one, step, kind), i) == i)
            places[i] = Placement(step, branch, reason, name.part)
        return [places[i] for i in range(len(places))]

    def _branches(self, i: int, other: int) -> Iterator[str]:
        """Yield names for the branch of a checkpoint beside another, until one is free."""
        name, stem = self.names[i], _SUFFIXES.sub("", self.evidence[i].path)
        beside = _PIECES.split(_SUFFIXES.sub("", self.evidence[other].path))
        pieces = [one for one in _PIECES.split(stem) if one and one not in beside]
        counter = re.compile(rf"(^|(?<=[A-Za-z]))0*{name.counter}$")
        differ = [one for piece in pieces if (one := counter.sub("", piece))]
        names = ("-".join(filter(None, one)) for one in (name.labels, differ, pieces, _PIECES.split(stem)))
        yield from filter(None, names)
        yield from (f"{stem}-{n}" for n in count(2))

    def origin(self) -> tuple[str, bool]:
        """Return where the steps come from, and whether there was doubt."""
        doubts = (
            ["counters that restart go on where the last ones ended"] if any(self.offsets.values()) else []
        )
        if all(self.chosen.values[i] is not None for i in self.regular) and self.chosen.unit != "position":
            others = [text for text in self._disagreeing(self.chosen) if text != self.chosen.text]
            doubts += [f"{text} would order them otherwise" for text in others]
        is_guess = self.chosen.unit == "position" and len(self.regular) > 1
        text = "the order of " * self.is_ordinal + self.chosen.text
        return "; ".join([f"steps come from {text}", *doubts]), bool(doubts) or is_guess


def _sorted_keys(keys: Iterable[Mapping[str, int]]) -> list[str]:
    found = {key for one in keys for key in one}
    return sorted(found, key=lambda key: (STEP_KEYS.index(key) if key in STEP_KEYS else len(STEP_KEYS), key))


def _settled(names: list[_Name]) -> list[_Name]:
    """Return names whose dates can be compared: with the day after the month, and across New Year."""
    times = [time for name in names for time in name.times if len(time) > 2]
    unsure = [time for time in times if time[0]]
    swap = bool(unsure) and (
        max(t[2] for t in unsure) > 12
        or (max(t[3] for t in unsure) <= 12 and len({t[2] for t in unsure}) > len({t[3] for t in unsure}))
    )
    months = {time[2] for time in times if not time[1]} - {0}
    first = 12
    while {1, 12} <= months and first - 1 in months:
        # The first of the months that lead up to the end of a year: those after it are of the next.
        first -= 1
    turned = {1, 12} <= months and first > 1

    def settled(time: Value) -> Value:
        if len(time) < 3:
            return time
        year, month, day = (time[1], time[3], time[2]) if time[0] and swap else time[1:4]
        return (False, year or int(turned and 0 < month < first), month, day, *time[4:])

    if not (unsure or turned):
        return names
    return [name._replace(times=tuple(map(settled, name.times))) for name in names]
