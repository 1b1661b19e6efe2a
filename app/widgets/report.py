"""Figures and tables as one HTML file, which loads nothing and runs only its own scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from html import escape
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
_STYLE: Final = """:root{color-scheme:light dark;%s}@media(prefers-color-scheme:dark){:root{%s}}
body{max-width:70rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif;
color:var(--textColor);background:var(--backgroundColor);overflow-wrap:anywhere}
h1{font-size:1.7rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .5rem}
p{color:var(--grayTextColor);margin:.3rem 0}
.table{overflow:auto;max-height:34rem;border:1px solid var(--borderColor);border-radius:.5rem}
table{border-collapse:collapse;width:100%%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem .8rem;border-bottom:1px solid var(--borderColor);overflow-wrap:normal}
th{position:sticky;top:0;color:var(--grayTextColor);background:var(--secondaryBackgroundColor)}
@media print{.table{max-height:none}}"""

_SCRIPT: Final = """const templates = %s, dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.querySelectorAll(".plotly-graph-div").forEach(
  one => Plotly.relayout(one, {template: templates[dark.matches ? "dark" : "light"]}));
dark.addEventListener("change", paint);
if (dark.matches) paint();"""


class Part(NamedTuple):
    """A part of a report: heading, figure or table, and text."""

    heading: str
    content: go.Figure | pd.DataFrame
    notes: tuple[str, ...] = ()


def report(title: str, parts: Iterable[Part]) -> bytes:
    """Return a report as an HTML file. All text is untrusted."""
    heading = _text(title)
    sections = "".join(_section(f"part-{place}", part) for place, part in enumerate(parts))
    script = _SCRIPT % json.dumps({scheme: _template(_colours(scheme)) for scheme in _SCHEMES})
    body = f"<script>{get_plotlyjs()}</script><h1>{heading}</h1>{sections}<script>{script}</script>"
    variables = [
        ";".join(f"--{name}:{value}" for name, value in colours.items())
        for colours in map(_colours, _SCHEMES)
    ]
    policy = f"default-src 'none'; script-src {script_digests(body)}; style-src 'unsafe-inline'; "
    policy += "base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{heading}</title>'
        f"<style>{_STYLE % tuple(variables)}</style>"
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
