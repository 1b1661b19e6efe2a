"""Numbers and names as text, in forms that differ from the command line's."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from inshrink_core.errors import clipped
from inshrink_core.text import count, counted, exponential, limit_text, percentage, ratio, shape
from inshrink_core.text import size as size_text

__all__ = ["clipped", "count", "counted", "ratio", "shape"]
"""Names re-exported from the engine."""

_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

_MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&^=@/])")
"""Characters that Streamlit's markdown may interpret (emphasis, links, colour and icon directives,
mathematics, HTML, and the ``://`` and ``@`` of automatic links).
"""


_BEFORE_UNITS = re.compile(r"(?<=≤) | (?=%)|(?<=\d) (?=(?:[kMGTPE]?B|[kMGTPE]|s|min|h|nats)\b)")


def joined(text: str) -> str:
    r"""Return a text with a no-break space between each number and its unit.

    Examples
    --------
    >>> joined("cost ≤ 0.30 % in 12 s")
    'cost ≤\xa00.30\xa0% in 12\xa0s'
    """
    return _BEFORE_UNITS.sub("\N{NO-BREAK SPACE}", text)


def size(n_bytes: float | None) -> str:
    """Return a size in SI units, such as ``1.23 MB``."""
    return joined(size_text(n_bytes))


def limit(figure: str, value: float) -> str:
    """Return an upper bound of a figure, such as ``≤ 1.00 %``."""
    return joined(limit_text(figure, value))


def value(value: float, digits: int = 3) -> str:
    """Return a measured value with three significant digits, such as ``1.20e-3`` if far from one.

    Trailing zeros count as digits, so that numbers of one kind are equally exact. The browser formats tables
    and hover texts in the same form.

    Examples
    --------
    >>> value(0.01234), value(23), value(1234.5), value(0.0012)
    ('0.0123', '23.0', '1,230', '1.20e-3')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and not 1e-2 <= abs(value) < 1e4:
        return exponential(value, digits)
    rounded = float(f"{value:.{digits}g}")
    if not rounded or abs(rounded) >= 1000:
        return f"{rounded:,.15g}"
    return f"{rounded:#.{digits}g}".rstrip(".")


def tick(round_value: float, digits: int = 3) -> str:
    """Return the label of a round value on a scale: as `value`, without trailing zeros.

    Examples
    --------
    >>> tick(0.5), tick(20), tick(3e-3), tick(1500)
    ('0.5', '20', '3e-3', '1,500')
    """
    return re.sub(r"\.0+(?!\d)|(\.\d*?)0+(?!\d)", r"\1", value(round_value, digits))


def d3_format(values: Iterable[float]) -> str:
    """Return the d3 format in which the browser formats such values like `value`.

    Examples
    --------
    >>> d3_format([0.5, 12.0]), d3_format([0.5, 1.2e-5])
    (',.3r', '.2e')
    """
    wild = any(math.isfinite(value) and value and not 1e-2 <= abs(value) < 1e4 for value in values)
    return ".2e" if wild else ",.3r"


def percent(value: float | None) -> str:
    r"""Return a signed relative change in percent, such as ``0.12 %`` or ``−50.0 %``.

    Examples
    --------
    >>> percent(0.00123), percent(-0.5), percent(0.0), percent(None)
    ('0.12\xa0%', '−50.0\xa0%', '0\xa0%', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    return joined(("−" if value < 0 else "") + percentage(abs(value)))


def sentence(clause: str) -> str:
    """Return a clause of the engine as a sentence."""
    return joined(clause[:1].upper() + clause[1:].rstrip(".") + ".")


def steps(steps: Sequence[int]) -> str:
    """Return the range of steps: one number, or the first and the last."""
    if not steps:
        return "no steps"
    if len(steps) == 1:
        return f"step {count(steps[0])}"
    # Non-breaking spaces; a line could still break at a dash.
    return f"steps\u00a0{count(steps[0])}\u00a0to\u00a0{count(steps[-1])}"


def all_steps(number: int) -> str:
    """Return a phrase for all steps: ``all 24 steps``, or ``the one step``."""
    return "the one step" if number == 1 else f"all {counted(number, 'step')}"


def duration(seconds: float) -> str:
    """Return a duration in seconds below two minutes, then in minutes, then in hours."""
    if seconds < 120:
        return joined(f"{seconds:.0f} s")
    return joined(f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h")


def clipped_all(names: Sequence[str], width: int) -> list[str]:
    """Shorten names as `clipped` does, but keep more of names that would look the same.

    Examples
    --------
    >>> clipped_all(["runs/a/last.pt", "runs/b/last.pt", "checkpoint.pt"], 9)
    ['runs/a…ast.pt', 'runs/b…ast.pt', 'chec…t.pt']
    """
    labels = {name: clipped(name, width) for name in names}
    while True:
        counts = Counter(labels.values())
        alike = [name for name, label in labels.items() if counts[label] > 1 and label != name]
        if not alike:
            return [labels[name] for name in names]
        width += 4
        labels |= {name: clipped(name, width) for name in alike}


def printable(text: str) -> str:
    """Replace control, bidirectional and zero-width characters, which could forge the displayed text."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in _UNPRINTABLE else sign for sign in text
    )


def markdown(text: str) -> str:
    """Escape untrusted text so that Streamlit's markdown shows it unchanged.

    Notes
    -----
    Escapes end at the parser, but bare links, addresses and ``:icons:`` are searched for in the
    text after parsing. A word joiner, which has no width, breaks those up.
    """
    escaped = _MARKDOWN_SIGNS.sub(r"\\\1", printable(text))
    return re.sub(r"(:|@|www)", "\\1\u2060", escaped, flags=re.IGNORECASE)


def inked(text: str) -> str:
    """Return the label of a segment or pill in the colour of plain text, chosen or not.

    Streamlit draws a chosen one in the primary colour on a tint of it. In dark mode no colour is legible
    there and also carries white text as a button (WCAG AA). The theme's violet is used only for this.
    """
    return f":violet[{text}]"


def html(text: str) -> str:
    """Escape untrusted text for Plotly, whose labels and hovers read a subset of HTML."""
    return escape(printable(text), quote=False)
