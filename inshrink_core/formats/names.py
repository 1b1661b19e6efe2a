"""Read the numbers in checkpoint names, and distinguish counters from dates, metrics, sizes and ranks.

A step pattern, given by the user, specifies how names contain the step.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from inshrink_core.errors import ConfigError, clipped

MAX_STEP: Final = 1 << 62
"""Upper bound for steps."""

_MAX_DIGITS: Final = 24
"""Maximum length of a number, with fraction and exponent; longer ones are ignored."""

_LEVELS: Final[Mapping[str, str]] = {
    word: level
    for level, words in {
        "step": "step steps global globalstep gstep s ba",
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
_EPOCHS: Final = "|".join(word for word, level in _LEVELS.items() if level == "epoch")

AVERAGES: Final = frozenset({"ema", "swa", "avg", "average", "averaged", "ave"})
_LABEL: Final = re.compile(
    r"(?<![a-z])(?:ema|swa|avg|averaged?|ave|best|last|latest|final|init|initial|interrupt(?:ed)?|emergency|"
    r"backup|bak|resume|current|newest|recent|optimal|pretrained|crash|preempted|old|prev|previous|lowest|"
    r"highest|finished)(?![a-z])|(?<![a-z])(?:best|final|last)(?=model)|(?<=model)(?:best|final|last)(?![a-z])"
)

_SUFFIXES: Final = re.compile(
    r"(\.(pt|pth|bin|ckpt|safetensors|tar|t7|th|zip|h5|hdf5|pkl|npz|params|weights|distcp))+$", re.IGNORECASE
)
_REVISION: Final = re.compile(r"-v\d+$")
"""The suffix that Lightning adds to a name that already exists."""
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_MEASURES: Final = re.compile(
    r"(?<![a-z0-9])(?:f1|r2|top-?[15]|acc[15]|map50|ap50|hits@?\d+|recall@\d+)(?=[-_=:@]*\d)"
)
_ID: Final = re.compile(
    r"(?<![a-z0-9])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[a-z0-9]{6,})(?![a-z0-9])"
)
_HASH: Final = re.compile(r"(?=.{7})(?=.*\d)(?=.*[a-f].*[a-f])[0-9a-f]+")
_SWITCHED: Final = re.compile(r"[a-z]+|\d+")
_SHARD: Final = re.compile(r"(?<![a-z0-9])(\d+)[-_]?of[-_]?(\d+)(?!\d)")

RANK: Final = re.compile(
    r"[._-]?(?:mp|dp|tp|pp|zero|local)?_?(?:pp_)?rank[._-]?\d+(?:[._-]\d+)*", re.IGNORECASE
)
"""The part of a name that identifies the rank that wrote a file or a directory."""

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
    rf"(?P<after>(?:{_EPOCHS})(?![a-z0-9])|(?:{_COUNTED})(?![a-z0-9])(?![-_= ]*\d)|"
    rf"[-_ ](?:{_COUNTED})(?![a-z])(?![-_= ]*\d))?(?=(?P<rest>[a-z]*))"
)
_SCALES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}

_N_MONTHS: Final = 12
_N_UNIX: Final = 2
"""Length of a `Time` in seconds since 1970."""

Number = int | float
Time = tuple[Any, ...]
"""Whether day and month may be swapped, then year, month, day and time of day, or seconds since 1970."""


class Name(NamedTuple):
    """The content of a single name.

    Parameters
    ----------
    unit
        Unit of the counter: ``step``, ``epoch`` or ``version``; ``inner`` for a number after an epoch;
        ``pair`` for the last of several numbers without words, ``plain`` for a single number; ``attached``
        for digits at the end of a word; ``time`` if the name has only times; empty without a number.
    counter
        The number.
    versions, times
        Numbers of runs, versions and folders; dates and times.
    leading
        Numbers at whose change the counter may restart: epochs, or the other numbers of a pair.
    labels
        Words such as ``best`` and ``ema``.
    part
        The rank that wrote the file, such as ``rank0``, if it is one rank's part.
    words
        The words that are no labels.
    """

    unit: str
    counter: Number | None
    versions: tuple[Number, ...]
    times: tuple[Time, ...]
    leading: tuple[Number, ...]
    labels: tuple[str, ...]
    part: str
    words: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers of steps, epochs and times, to compare with sibling names; empty without a number."""
        counter = () if self.counter is None or self.unit == "attached" else (self.counter,)
        return (*self.versions, *self.leading, *counter, *self.times)


def stem_of(path: str) -> str:
    """Return a path without checkpoint suffixes."""
    return _SUFFIXES.sub("", path)


def step_in_name(name: str) -> int | None:
    """Return the step in a file's name, or None.

    Examples
    --------
    >>> step_in_name("epoch=3-step=400.ckpt"), step_in_name("model_1.5M.pt"), step_in_name("last.pt")
    (400, 1500000, None)
    """
    counter = read_name(name).counter
    return counter if isinstance(counter, int) else None


def is_numbered(name: str) -> bool:
    """Return whether a name has a number that distinguishes it from its siblings, or a time.

    Examples
    --------
    >>> is_numbered("Feb01_00-10-00"), is_numbered("model_0200.pt"), is_numbered("best.pt")
    (True, True, False)
    """
    return bool(read_name(name).unit)


def _blank(found: re.Match[str]) -> str:
    return "|" * len(found.group())


def _without_id(found: re.Match[str]) -> str:
    """Blank a digest or a random name, but not words with their counters."""
    text = found.group()
    pieces = _SWITCHED.findall(text)
    is_random = len(pieces) > 3 and not any(piece in _LEVELS for piece in pieces)
    return _blank(found) if "-" in text or is_random or _HASH.fullmatch(text) else text


def _take_dates(text: str) -> tuple[str, list[Time]]:
    """Return a text without its dates, and the dates: whether day and month may be swapped, then fields."""
    times: list[Time] = []
    for pattern in _DATES:
        at = 0
        while found := pattern.search(text, at):
            fields, clock = found.groupdict(), _CLOCK.match(text, found.end())
            at = found.end() + 1
            is_cut = not fields.get("year") or text[at - 1 : at].isdigit()
            if clock is None and (is_cut or _COUNTS.search(text, 0, found.start())):
                continue
            month = _MONTHS.index(fields["name"][:3]) // 3 + 1 if fields.get("name") else fields.get("first")
            date = [int(item or 0) for item in (fields.get("year"), month, fields.get("second"))]
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
    """Return the level of the number at a match, from the words around it; empty for a size or a metric."""
    word, after, digits, scale = found["word"], found["after"], found["digits"], found["scale"]
    level = _LEVELS.get(word or "", "plain" if not word or found["gap"] else "attached")
    if after and level not in (*_STEPS, "epoch"):
        level = _LEVELS[after.strip("-_ ")]
    sized = _LEVELS.get(found["rest"]) != "plain" if found["rest"] else _FRACTION.search(digits)
    if level in ("plain", "attached") and sized and not scale:
        return ""
    return "" if level == "measure" else level


def _numbers(text: str) -> Iterator[tuple[str, Number, int, str]]:
    """Yield level, value, position and text of the numbers that count something."""
    for found in _NUMBER.finditer(text):
        level, digits, scale = _level(found), found["digits"], _SCALES[found["scale"] or ""]
        if not level or len(digits) > _MAX_DIGITS:
            continue
        value = int(digits) * scale if digits.isdigit() else round(float(digits) * scale, 6)
        value = int(value) if value == int(value) else value
        if value < MAX_STEP:
            yield level, value, found.start("digits"), f"{found['word']}{digits}"


@functools.lru_cache(maxsize=1 << 14)
def read_name(path: str) -> Name:
    """Return the content of a path's name, without regard to other names.

    Examples
    --------
    >>> read_name("version_0/epoch=3-step=400.ckpt")[:3]
    ('step', 400, (0,))
    """
    text = _CAMEL.sub("_", _REVISION.sub("", stem_of(path))).lower()
    labels = tuple(dict.fromkeys(_LABEL.findall(text)))
    words = tuple(word for word in re.findall("[a-z]+", text) if word not in labels)
    text, times = _take_dates(_MEASURES.sub("score", text))
    parts: list[str] = []
    for shard in _SHARD.finditer(text):
        # In "epoch_3_of_100" the 3 is the counter.
        begin = shard.end(1) if _COUNTS.search(text, 0, shard.start()) else shard.start()
        parts += [f"{shard[1]}-of-{shard[2]}"] if begin == shard.start() else []
        text = text[:begin] + "|" * (shard.end() - begin) + text[shard.end() :]
    found: dict[str, list[tuple[int, Number]]] = {}
    for level, value, at, number in _numbers(_ID.sub(_without_id, text)):
        if level == "rank" and not (number.startswith("rank") and "lora" in text):
            parts.append(number)
        else:
            found.setdefault(level, []).append((at, value))
    versions, epochs, plain = (found.get(level, []) for level in ("version", "epoch", "plain"))
    unit = next((level for level in (*_STEPS, "epoch", "plain", "attached") if level in found), "")
    counters = found.get(unit, [])
    leading = epochs if unit in _STEPS else counters[:-1]
    if (unit == "attached" and versions and versions[-1] > counters[-1]) or not (unit or times):
        unit, counters, versions = "version" if versions else "", versions[-1:], versions[:-1]
    elif unit:
        folder = text.rfind("/", 0, counters[0][0])
        others = [number for level in {"plain", "attached"} - {unit} for number in found.get(level, [])]
        versions = sorted([*versions, *(number for number in others if number[0] < folder)])
        if unit == "epoch" and plain and plain[-1] > counters[-1]:
            unit, counters, leading = "inner", plain, counters
    if unit in _STEPS or not unit:
        unit = "step" if unit else "time" * bool(times)
    elif unit == "plain" and leading:
        unit = "pair"
    outer, within = (tuple(value for _, value in numbers) for numbers in (versions, leading))
    counter = counters[-1][1] if counters else None
    return Name(unit, counter, outer, tuple(times), within, labels, "-".join(parts), words)


def settled(names: list[Name]) -> list[Name]:
    """Return the names of a run with comparable dates: day after month, and ordered across New Year."""
    dates = [time for name in names for time in name.times if len(time) > _N_UNIX]
    swap = any(swapped and first > _N_MONTHS for swapped, _, first, *_ in dates)
    months = {month for _, year, month, *_ in dates if not year} - {0}
    first = _N_MONTHS
    while {1, _N_MONTHS} <= months and first - 1 in months:
        # Find the months that lead up to the end of a year; earlier months belong to the next year.
        first -= 1
    turned = first > 1 and {1, _N_MONTHS} <= months
    if not (turned or any(date[0] for date in dates)):
        return names

    def settle(time: Time) -> Time:
        if len(time) <= _N_UNIX:
            return time
        year, month, day = (time[1], time[3], time[2]) if time[0] and swap else time[1:4]
        return (False, year or int(turned and 0 < month < first), month, day, *time[4:])

    return [name._replace(times=tuple(map(settle, name.times))) for name in names]


_DECIMAL: Final = re.compile(r"\d+(\.\d+)*")

_STEP_PART: Final = "{step}"
_LONGEST_PATTERN: Final = 255
"""Maximum length of a file name."""


def name_shape(name: str) -> str:
    """Return a name with its numbers replaced by ``*``; checkpoints of one series share it.

    Examples
    --------
    >>> name_shape("epoch=3-step=400.ckpt"), name_shape("last.ckpt")
    ('epoch=*-step=*.ckpt', 'last.ckpt')
    """
    return _DECIMAL.sub("*", name)


def split_step_pattern(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return a path and its step pattern, if its last part is one; otherwise the path and None.

    The name of an existing file is no pattern.

    Examples
    --------
    >>> split_step_pattern("runs/a/model_ep{step}_*.pt")
    (PosixPath('runs/a'), 'model_ep{step}_*.pt')
    """
    named = Path(path)
    if _STEP_PART not in named.name or os.path.lexists(named):
        return named, None
    return named.parent, named.name


def compile_step_pattern(pattern: str) -> re.Pattern[str]:
    """Return a step pattern as a regular expression with one group.

    Parameters
    ----------
    pattern
        A full name in which ``{step}`` matches the number and ``*`` matches anything.

    Raises
    ------
    ConfigError
        The pattern is invalid.

    Notes
    -----
    Patterns are untrusted: matching takes time proportional to the name's length times the pattern's.

    Examples
    --------
    >>> compile_step_pattern("model_ep{step}_*.pt").search("model_ep07_acc0.91.pt").group(1)
    '07'
    """
    if pattern.count(_STEP_PART) != 1 or len(pattern) > _LONGEST_PATTERN:
        what, expected = "a step pattern is a name with one {step}", "such as 'model_ep{step}_*.pt'"
        raise ConfigError(what, expected=expected, found=clipped(pattern))

    def literal(text: str) -> str:
        number = r"(\d{1,18})(?!\d)"
        at_start = r"(?<!\d)" if text.startswith(_STEP_PART) else ""
        return at_start + number.join(map(re.escape, text.split(_STEP_PART)))

    first, *others = pattern.split("*")
    # Parts between two stars match at their first position: backtracking would find no further matches.
    middle = "".join(f"(?>.*?{literal(text)})" for text in others[:-1] if text)
    end = f".*{literal(others[-1])}" if others else ""
    return re.compile(rf"\A{literal(first)}{middle}{end}\Z", re.DOTALL | re.ASCII)


def step_by_pattern(name: str, pattern: str) -> int | None:
    """Return the step that a pattern finds in a file or directory name; None if the name does not match.

    Parameters
    ----------
    name
        The name.
    pattern
        As for `compile_step_pattern`.

    Raises
    ------
    ConfigError
        The pattern is invalid.

    Examples
    --------
    >>> step_by_pattern("a_1.pt", "*_{step}.pt"), step_by_pattern("best.pt", "*_{step}.pt")
    (1, None)
    """
    found = compile_step_pattern(pattern).search(name)
    return int(found[1]) if found else None
