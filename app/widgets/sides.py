"""Two runs side by side, and the lines that tell the values of both."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from inshrink_app import services
from inshrink_app.model.sensitivity import METRICS, Sensitivity
from inshrink_app.model.subject import Subject
from inshrink_app.widgets import ending, fmt, heatmap
from inshrink_app.widgets.layout import chart

_NAME_WIDTH = 30


def show(mine: Sensitivity, other: Sensitivity, names: tuple[str, str], statistic: str, level: str) -> None:
    """Draw both, and say what is to be seen; nothing where they have no tensor in common.

    Parameters
    ----------
    mine, other
        One metric of two runs, by tensor.
    names
        What to call them.
    statistic, level
        What of the values is shown, and what a row is.
    """
    if not {row.name for row in mine.rows} & {row.name for row in other.rows}:
        st.info("The two runs have no tensor of the same name.", icon=":material/info:")
        return
    sides = heatmap.aligned(mine, other, level)
    short = (fmt.elided(names[0], _NAME_WIDTH), fmt.elided(names[1], _NAME_WIDTH))
    metric = METRICS[mine.metric]
    chart(heatmap.sides_figure(sides, short, statistic), "sides", f"{metric.label} of two runs side by side")
    st.caption(_caption(sides, short))


def _caption(sides: heatmap.Sides, names: Sequence[str]) -> str:
    """Say what the picture does not show by itself."""
    left, right = map(fmt.markdown, names)
    said = [f"Left: {left}. Right: {right}. The same rows and colours; each run over its own steps."]
    common = len(set(sides.tables[0].steps) & set(sides.tables[1].steps))
    said.append(f"{fmt.counted(common, 'step')} in common." if common else "No step in common.")
    for who, name in zip(((True, False), (False, True)), names, strict=True):
        n_rows = sides.present.count(who)
        if n_rows:
            said.append(f"{heatmap.MARKS[who]}{fmt.count(n_rows)} only in {fmt.markdown(name)}.")
    return " ".join(said)


def runs_snippet(shown: Subject, other: Subject, metric: str, statistic: str, key: str = "snippets") -> None:
    """Show the commands and the lines that tell the values of two runs."""
    told = "update" if METRICS[metric].pooled else metric
    ending.requests(
        [services.sensitivity_request(one, told, "tensor", statistic) for one in (shown, other)], key
    )
