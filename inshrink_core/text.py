"""Formatting and parsing of numbers, sizes, durations and steps.

Sizes use SI prefixes (1 MB = 10^6 bytes). An unknown value is shown as a dash, never as zero.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from inshrink_core.errors import InputError, clipped

Item = TypeVar("Item")

UNKNOWN = "–"
"""Shown instead of an unknown number."""

_PREFIXES = ("", "k", "M", "G", "T", "P")
_THOUSAND = 1000.0
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 1 << 10 * (i + 1) for i, letter in enumerate("kmgt")
}
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?i?)b?", re.IGNORECASE)

_FEW_STEPS = 8
"""Longest list of steps that is shown in full; of longer ones, the first two, the last and the number."""

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_JOINED_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


def is_url(path: object) -> bool:
    """Return whether a path is a URL.

    Examples
    --------
    >>> is_url("s3://bucket/run.inshrink"), is_url("runs/run.inshrink"), is_url("C:/run.inshrink")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def was_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path was a URL before its conversion to a `Path`, which merges slashes.

    Examples
    --------
    >>> from pathlib import Path
    >>> was_url(Path("s3://bucket/run.inshrink")), was_url(Path("C:/run.inshrink"))
    (True, False)
    """
    return _JOINED_URL.match(os.fspath(path)) is not None


def url_of(place: str | os.PathLike[str]) -> str | None:
    """Return the URL that a place is, or was before its conversion to a `Path`; None for a path."""
    text = os.fspath(place)
    if is_url(text):
        return text
    return _JOINED_URL.sub(r"\1://", text, count=1) if was_url(place) and not Path(text).exists() else None


def _three_digits(value: float) -> str:
    """Return three significant digits without an exponent, for a value below about 1000."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _scaled(value: float, unit: str) -> str:
    power = 0
    while value >= _THOUSAND - 0.5 and power < len(_PREFIXES) - 1:
        value /= _THOUSAND
        power += 1
    return f"{_three_digits(value)} {_PREFIXES[power]}{unit}"


def size(n_bytes: float | None) -> str:
    """Return a size in SI units.

    Examples
    --------
    >>> size(1_234_567)
    '1.23 MB'
    >>> size(17)
    '17 B'
    """
    if n_bytes is None or not math.isfinite(n_bytes):
        return UNKNOWN
    return f"{n_bytes:.0f} B" if n_bytes < _THOUSAND else _scaled(n_bytes, "B")


def parse_size(text: str) -> int:
    """Return the number of bytes of a size: ``4GB``, ``1.5 GiB``, ``800M`` or plain bytes.

    Raises
    ------
    InputError
        The text is not a size.

    Examples
    --------
    >>> parse_size("4GB"), parse_size("1.5 GiB")
    (4000000000, 1610612736)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"'{text[:40]}' is not a size", remedy="write 4GB, 1.5GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(nbytes: int) -> str:
    """Return a size for a message that compares two: in megabytes and larger units, else in plain bytes.

    Examples
    --------
    >>> format_size(999), format_size(1 << 40)
    ('999 bytes', '1.1 TB')
    """
    for power, unit in ((18, "EB"), (15, "PB"), (12, "TB"), (9, "GB"), (6, "MB")):
        if nbytes >= 10**power:
            if nbytes >= 10**24:  # a hostile archive may declare 64 large dimensions
                return f"over 10^{len(str(nbytes)) - 1} bytes"
            return f"{nbytes / 10**power:.1f} {unit}"
    return f"{nbytes} bytes"


def rate(mb_per_s: float | None) -> str:
    """Return a speed in MB/s (10^6 bytes per second).

    Examples
    --------
    >>> rate(12.34)
    '12.3 MB/s'
    """
    return f"{_three_digits(mb_per_s)} MB/s" if mb_per_s is not None and math.isfinite(mb_per_s) else UNKNOWN


def ratio(value: float | None) -> str:
    """Return a compression ratio.

    Examples
    --------
    >>> ratio(12.345), ratio(None)
    ('12.3×', '–')
    """
    return f"{_three_digits(value)}×" if value is not None and math.isfinite(value) else UNKNOWN


def count(value: float | None) -> str:
    """Return a whole number with thousands separators.

    Examples
    --------
    >>> count(1234567)
    '1,234,567'
    """
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else UNKNOWN


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Examples
    --------
    >>> counted(1, "keyframe"), counted(24, "frame")
    ('1 keyframe', '24 frames')
    """
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def plain(value: float | None) -> str:
    """Return a number with four significant digits, trailing zeros included, so that widths agree.

    Examples
    --------
    >>> plain(0.98765), plain(0.5)
    ('0.9877', '0.5000')
    """
    return f"{value:#.4g}".rstrip(".") if value is not None and math.isfinite(value) else UNKNOWN


def percentage(value: float) -> str:
    """Return a non-negative fraction in percent: three significant digits, and at most two decimals.

    Examples
    --------
    >>> percentage(0.003), percentage(0.23), percentage(1.0175), percentage(0.0), percentage(1.2e-6)
    ('0.30 %', '23.0 %', '102 %', '0 %', '1.20e-4 %')
    """
    value *= 100
    if 0 < value < 0.005:
        return f"{exponential(value)} %"
    return f"{_three_digits(value)} %" if value else "0 %"


def limit_text(figure: str, limit: float) -> str:
    """Return an upper bound of a figure: a divergence in nats, others in percent.

    Examples
    --------
    >>> limit_text("drop", 0.01), limit_text("divergence", 0.003)
    ('≤ 1.00 %', '≤ 0.003 nats')
    """
    return f"≤ {limit:g} nats" if figure == "divergence" else f"≤ {percentage(limit)}"


def exponential(value: float, digits: int = 3) -> str:
    """Return a number in scientific notation.

    Examples
    --------
    >>> exponential(1.09e-4)
    '1.09e-4'
    """
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def percent(value: float | None) -> str:
    """Return a fraction as a signed percentage, for drops.

    Examples
    --------
    >>> percent(0.00312), percent(-0.02), percent(0.0)
    ('+0.31 %', '−2.00 %', '0.00 %')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    text = f"{abs(value) * 100:.2f} %"
    if float(text[:-2]) == 0:
        return text
    return ("+" if value > 0 else "−") + text


def nats(value: float | None) -> str:
    """Return a divergence in nats; values below 1e-4 have an exponent.

    Examples
    --------
    >>> nats(0.0123), nats(0.0000042)
    ('0.01230', '4.2e-6')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return exponential(value, 2) if 0 < abs(value) < 1e-4 else f"{value:.5f}"


def error_size(value: float | None) -> str:
    """Return an error in scientific notation; zero is ``0``.

    Examples
    --------
    >>> error_size(0.0), error_size(0.00123)
    ('0', '1.2e-3')
    """
    if value is None or math.isnan(value):
        return UNKNOWN
    return "0" if value == 0 else exponential(value, 2)


def duration(seconds: float | None) -> str:
    """Return a duration.

    Examples
    --------
    >>> duration(0.04), duration(12.3), duration(75), duration(7260)
    ('0.04 s', '12.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def shape(extents: Sequence[int]) -> str:
    """Return a tensor's shape.

    Examples
    --------
    >>> shape((16, 1, 3, 3)), shape(())
    ('16×1×3×3', 'scalar')
    """
    return "×".join(str(extent) for extent in extents) if extents else "scalar"


def steps_in_short(steps: Sequence[int]) -> str:
    """Return a list of steps that fits one line.

    Examples
    --------
    >>> steps_in_short((0, 10, 20))
    '0, 10, 20'
    >>> steps_in_short(range(0, 1000, 10))
    '0, 10 … 990 (100 steps)'
    """
    if not steps:
        return "none"
    if len(steps) <= _FEW_STEPS:
        return ", ".join(str(step) for step in steps)
    return f"{steps[0]}, {steps[1]} … {steps[-1]} ({len(steps)} steps)"


def printable(text: str) -> str:
    r"""Return text on one line that a terminal cannot interpret as commands.

    Names of tensors and files are untrusted, so escape sequences in them are escaped.

    Examples
    --------
    >>> printable("layer\x1b[31m one")
    'layer\\x1b[31m one'
    """
    joined = " ".join(text.split("\n")) if "\n" in text else text
    if joined.isprintable():
        return joined
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


_MAX_REASON_LENGTH: Final = 300


def described(error: BaseException) -> str:
    r"""Return class and message of an error of foreign code, in one line that fits a screen.

    Examples
    --------
    >>> described(ValueError("no\nbatch"))
    'ValueError: no batch'
    """
    try:
        reason = str(error)
    except Exception:  # the error's __str__ is foreign code, too
        reason = "it does not say why"
    # Clip before escaping, too: escaping a megabyte is slow.
    return clipped(
        printable(clipped(f"{type(error).__name__}: {reason}", _MAX_REASON_LENGTH)), _MAX_REASON_LENGTH
    )


_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_FORMULA: Final = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


def csv_cell(value: object) -> object:
    """Return a value for a CSV cell: a text that a spreadsheet would read as a formula gets a quote.

    Names in a table are untrusted. Numbers stay numbers, also as text.

    Examples
    --------
    >>> csv_cell("=HYPERLINK(A1)"), csv_cell("fc1.weight"), csv_cell(-1.5), csv_cell("-1.5e-3")
    ("'=HYPERLINK(A1)", 'fc1.weight', -1.5, '-1.5e-3')
    """
    if not isinstance(value, str):
        return value
    text = printable(value)  # a line feed would begin a new row
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items at even distances, including the first and the last.

    Examples
    --------
    >>> spread(range(9), 3)
    [0, 4, 8]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
