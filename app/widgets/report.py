"""Figures and tables as one HTML file, which loads nothing and runs only its own scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
import plotly.graph_objects as go
from inshrink_app.server.gate import script_digests
from inshrink_app.theme import theme_config
from inshrink_app.widgets import fmt
from pandas.api.types import is_numeric_dtype
from plotly.offline import get_plotlyjs

MAX_ROWS: Final = 2000
"""With more rows, browsers open the file slowly."""

_SCHEMES = ("light", "dark")
_ASSETS = Path(__file__).parents[1] / "assets"


class Part(NamedTuple):
    """A part of a report: heading, figure or table, and text."""

    heading: str
    content: go.Figure | pd.DataFrame
    notes: tuple[str, ...] = ()


def report(title: str, parts: Iterable[Part]) -> bytes:
    """Return a report as an HTML file. All text is untrusted."""
    heading = _text(title)
    sections = "".join(_section(f"part-{place}", part) for place, part in enumerate(parts))
    style, program = ((_ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    templates = json.dumps({scheme: _template(_colours(scheme)) for scheme in _SCHEMES})
    script = f"const templates = {templates};\n{program}"
    body = f"<script>{get_plotlyjs()}</script><h1>{heading}</h1>{sections}<script>{script}</script>"
    light, dark = (
        ";".join(f"--{name}:{value}" for name, value in _colours(scheme).items()) for scheme in _SCHEMES
    )
    scheme = f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    policy = f"default-src 'none'; script-src {script_digests(body)}; style-src 'unsafe-inline'; "
    policy += "base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{heading}</title>'
        f"<style>{scheme}\n{style}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'.encode()


def _section(key: str, part: Part) -> str:
    content, notes = part.content, part.notes
    if isinstance(content, go.Figure):
        figure = go.Figure(content).update_layout(template=_template(_colours("light")))
        drawn = figure.to_html({"displayModeBar": False}, False, False, full_html=False, div_id=key)
    else:
        drawn = _table(content.head(MAX_ROWS), key)
        if len(content) > MAX_ROWS:
            notes = (*notes, f"The first {fmt.count(MAX_ROWS)} of {fmt.count(len(content))} rows.")
    paragraphs = "".join(f"<p>{_text(note)}</p>" for note in notes)
    return f"<section><h2>{_text(part.heading)}</h2>{drawn}{paragraphs}</section>"


def _table(table: pd.DataFrame, key: str) -> str:
    """Return a table; numbers are right-aligned."""
    numbers = [place for place, name in enumerate(table, 1) if is_numeric_dtype(table[name])]
    style = "".join(f"#{key} :is(td,th):nth-child({place}){{text-align:right}}" for place in numbers)
    cells = table.map(_cell).to_html(index=False, border=0, justify="left", table_id=key)
    return f'<style>{style}</style><div class="table">{cells}</div>'


def _cell(value: Any) -> str:
    """Return the content of a cell; `to_html` escapes it."""
    if isinstance(value, str):
        return fmt.printable(value)
    if value is None or value is pd.NA or math.isnan(value):
        return "–"
    return fmt.value(value) if isinstance(value, float) else fmt.count(value)


def _text(text: str) -> str:
    return escape(fmt.printable(text))


def _colours(scheme: str) -> dict[str, str]:
    start = f"theme.{scheme}."
    config = theme_config()
    return {key.removeprefix(start): str(config[key]) for key in config if key.startswith(start)}


def _template(colours: dict[str, str]) -> dict[str, Any]:
    """Return the template that Streamlit's theme applies to the figures of a page."""
    ink, line = colours["textColor"], colours["borderColor"]
    axis = {"automargin": True, "gridcolor": line, "zerolinecolor": line, "linecolor": line}
    hover = {"bgcolor": colours["secondaryBackgroundColor"], "font": {"color": ink}}
    font = {"color": ink, "family": "system-ui, sans-serif"}
    grounds = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), colours["backgroundColor"])
    return {"layout": {"font": font, "hoverlabel": hover, "xaxis": axis, "yaxis": axis, **grounds}}
