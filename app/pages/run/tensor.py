"""The panel of the selected tensor: its sensitivity, its values over time, and its storage."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Sensitivity, Subject
from inshrink_app.pages.run import rows
from inshrink_app.pages.run.heatmap import StepAxis
from inshrink_app.theme import CATEGORICAL, GAP, MARK, SEQUENTIAL
from inshrink_app.widgets import ending, fmt
from inshrink_app.widgets.choices import codec_labels, one_of_few, one_of_many
from inshrink_app.widgets.figures import count_ticks, lay_out, steps_axis, title
from inshrink_app.widgets.layout import allowed, answer, chart
from numpy.typing import NDArray

from inshrink_core.analysis.anatomy import Anatomy

_VIEWS = {"time": "Time", "values": "Values"}
_LEVELLESS = {
    "exact": "Stored bit for bit, without levels.",
    "rounded": "Each value is rounded to bfloat16.",
    "other": "The codec stores the difference from the step before, so there are no fixed levels.",
}


def show(shown: Subject, table: Sensitivity, tensor: str, step: int) -> None:
    """Draw the panel of one tensor at one step; `table` is the metric of the map."""
    way = _way(shown, step)
    # The cost covers the tensor, its previous step, and the optimizer state of both.
    asked, cost = f"panel.asked.{tensor}", services.drill_cost(shown, tensor)
    if not allowed(asked, cost, "Look inside", ":material/visibility:"):
        return
    metric = table.metric if table.metric in ("taylor", "fisher", "update") else None
    seen = answer(lambda: services.drill_down(shown, step, tensor, way, metric), "Looking inside")
    if seen is None:
        return
    st.markdown(f":small[{why(shown, table, seen)}]")
    st.caption(_stored(seen))
    views = _VIEWS if len(table.steps) > 1 else {"values": _VIEWS["values"]}
    view = one_of_few("panel", "Figure", "view", views, next(iter(views)), label_visibility="collapsed")
    if view == "time":
        _over_time(shown, seen)
    else:
        _histogram(shown, seen)


def why(shown: Subject, table: Sensitivity, seen: Anatomy) -> str:
    """Return a sentence about the share of a tensor, and its reason."""
    names = [row.name for row in table.rows]
    share = math.nan
    if seen.spec.name in names:
        share = float(table.shares()[names.index(seen.spec.name), table.steps.index(seen.step)])
    text = rows.carried(shown, table.metric, seen.spec.name, seen.spec.numel, share)
    more = []
    moved = answer(lambda: services.moved_since(shown, seen.spec.key, seen.step))
    if moved is not None:
        more.append(f"it moved {fmt.percent(moved)} since the previous checkpoint")
    if seen.rows is not None and 0 < (half := half_in(seen.rows)) < 0.5:
        more.append(f"{fmt.percent(half)} of its rows carry half of its sensitivity")
    return f"{text}; {' and '.join(more)}." if more else f"{text}."


def _stored(seen: Anatomy) -> str:
    """Return a description of the stored form."""
    shares = {part.name: part.share for part in seen.histogram.parts}
    bits = "" if seen.bits_per_weight is None else f"{fmt.value(seen.bits_per_weight)} bits per weight"
    parts = [bits, f"{fmt.size(seen.nbytes)} {'estimated alone' if seen.estimated else 'as archived'}"]
    if seen.relative_error is not None:
        parts.append(f"rounding error {fmt.percent(seen.relative_error)}")
    parts += [f"{fmt.percent(shares[name])} {name}" for name in ("pruned", "protected") if shares.get(name)]
    return " · ".join(filter(None, parts))


def _way(shown: Subject, step: int) -> str:
    """Return the form to show: as archived, or as the chosen codec would store it."""
    ways = services.stored_ways(shown, step)
    way = st.session_state.get("panel.way", state.choice("way", ways, ways[0]))
    return way if way in ways else ways[0]


def _over_time(shown: Subject, seen: Anatomy) -> None:
    """Draw the distribution of the values over the steps."""
    values = answer(lambda: services.values_over_time(shown, seen.spec.key), "Reading values")
    if values is None:
        return
    n_steps = len(values[0])
    figure = over_time_figure(*values, seen.step)
    chart(figure, "panel.time", f"Histogram of the values over {n_steps} steps")
    if n_steps < len(shown.steps):
        st.caption(f"{fmt.counted(n_steps, 'step')} of {fmt.count(len(shown.steps))}, evenly spaced.")


def _histogram(shown: Subject, seen: Anatomy) -> None:
    """Draw the values with their partition and levels."""
    labels = {services.ARCHIVE: "As archived", **codec_labels()}
    ways = {way: labels[way] for way in services.stored_ways(shown, seen.step)}
    tip = "As the archive beside this run has it, or as a codec would store this tensor alone."
    if len(ways) > 1:
        one_of_many("panel", "Stored", "way", ways, _way(shown, seen.step), tip, width=150)
    alt = f"Histogram of {fmt.count(seen.spec.numel)} values by what became of them, with the levels"
    chart(histogram_figure(seen), "panel.histogram", alt)
    st.caption(_levels_text(seen))


def half_in(line: NDArray[np.float64]) -> float:
    """Return the smallest share of entries that hold half of the sum; 0 if the sum is zero.

    Examples
    --------
    >>> half_in(np.array([1.0, 1.0, 1.0, 97.0])), half_in(np.ones(10))
    (0.25, 0.5)
    """
    known = np.sort(line[np.isfinite(line)])[::-1]
    with np.errstate(over="ignore"):
        total = float(known.sum())
    if not known.size or not 0 < total < np.inf:
        return 0.0
    return (int(np.searchsorted(np.cumsum(known), total / 2 * (1 - 1e-12))) + 1) / known.size


def _levels_text(seen: Anatomy) -> str:
    """Return the meaning of the lines, and which levels are not drawn."""
    whose = "Restored" if seen.restored else "Original"
    parts = [f"{whose} values; root mean square {fmt.value(seen.histogram.rms)}."]
    drawn = level_lines(seen).size
    if seen.level_kind in _LEVELLESS:
        parts.append(_LEVELLESS[seen.level_kind])
    elif seen.step_size is not None:
        lines = "" if drawn else ", too fine to draw"
        parts.append(f"Levels are {fmt.value(seen.step_size)} apart{lines}.")
    else:
        parts.append(f"Lines: the {fmt.count(seen.points.size)} codebook entries in use.")
    if seen.histogram.n_nonfinite:
        parts.append(f"{fmt.count(seen.histogram.n_nonfinite)} values are NaN or infinite.")
    return fmt.markdown(" ".join(parts))


def code(shown: Subject, tensor: str, step: int, metric: str) -> None:
    """Draw the command closest to the panel, and Python lines that give exactly its data."""
    path, way, before = str(shown.path), _way(shown, step), shown.steps[max(0, shown.steps.index(step) - 1)]
    opened, arguments = repr(path), f"run, {step}, {tensor!r}"
    if way == services.ARCHIVE and shown.kind == "run" and shown.archive is not None:
        opened = repr(str(shown.archive.path))
        arguments += f", against={path!r}"
    elif way != services.ARCHIVE:
        arguments += f", {way!r}"
    ending.snippets(
        f"inshrink sensitivity {shlex.quote(path)} --metric {metric} --by tensor --steps {step}",
        f"import inshrink_core\n\nrun = inshrink_core.open({opened})\n"
        f"seen = inshrink_core.analysis.anatomy({arguments})\n"
        "print(seen.bits_per_weight, seen.histogram.parts)\n"
        f"print(inshrink_core.analysis.moved_between(run[{before}], run[{step}], [{tensor!r}]).tensors)",
    )


_HEIGHT = 180

_PART_LOOKS: Mapping[str, tuple[str, str]] = {
    "pruned": (CATEGORICAL[5], "x"),
    "quantized": (CATEGORICAL[0], ""),
    "protected": (CATEGORICAL[1], "/"),
}
"""Colour and hatching of each part, so that colour alone carries no meaning."""

_MAX_LINES = 300
"""Largest number of drawn lattice levels; more would merge into a grey area."""


def level_lines(seen: Anatomy) -> NDArray[np.float64]:
    """Return the drawn levels: those of the codebook, or of a sufficiently coarse lattice.

    Returns
    -------
    ndarray
        Ascending; empty if there are none, or too many to distinguish.
    """
    edges = seen.histogram.edges
    if edges.size == 0:
        return np.empty(0)
    low, high = float(edges[0]), float(edges[-1])
    if seen.points.size:
        return seen.points[(seen.points >= low) & (seen.points <= high)]
    if seen.level_kind == "lattice" and seen.step_size and (high - low) / seen.step_size <= _MAX_LINES:
        first = math.ceil(low / seen.step_size)
        return np.arange(first, math.floor(high / seen.step_size) + 1, dtype=np.float64) * seen.step_size
    return np.empty(0)


def histogram_figure(seen: Anatomy) -> go.Figure:
    """Draw a histogram of values, stacked by their coded part, with a line at every level."""
    figure = go.Figure()
    values = seen.histogram
    middles = (values.edges[:-1] + values.edges[1:]) / 2
    near = fmt.d3_format(np.abs(values.edges[[0, -1]]) / 10 if values.edges.size else ())
    for part, counts in zip(values.parts, values.counts, strict=True):
        if part.n == 0:
            continue
        colour, hatch = _PART_LOOKS[part.name]
        pattern = {"shape": hatch, "size": 5, "solidity": 0.3, "bgcolor": colour, "fgcolor": "#FFFFFF"}
        look = {"color": colour, "line": {"width": 0}, "pattern": pattern}
        hover = f"%{{y:,}} {part.name} values near %{{x:{near}}}<extra></extra>"
        bars = {"x": middles.astype(np.float32), "y": counts.astype(np.float32), "name": part.name}
        figure.add_trace(go.Bar(**bars, marker=look, hovertemplate=hover))
    top = float(values.counts.sum(axis=0).max(initial=1))
    lines = level_lines(seen)
    if lines.size:
        figure.add_trace(
            go.Scatter(  # A thin line at every level, all of them as one trace.
                x=np.repeat(lines, 3),
                y=np.tile([0.0, top, np.nan], lines.size),
                name=f"{fmt.count(lines.size)} levels",
                mode="lines",
                line={"color": GAP, "width": 1},
                opacity=0.75,
                hoverinfo="skip",
            )
        )
    lay_out(figure, _HEIGHT, legend=3)
    figure.update_layout(barmode="stack", bargap=0, hovermode="closest")
    figure.update_xaxes(title=title("Value"), showgrid=False, nticks=7)
    figure.update_yaxes(
        title=title("Values in a bin"), range=[0, top * 1.08], automargin=True, **count_ticks(top)
    )
    return figure


def over_time_figure(
    steps: Sequence[int], edges: NDArray[np.float64], shares: NDArray[np.float64], step: int
) -> go.Figure:
    """Draw the distribution of the values at every step: one column per step, darker for more values.

    Parameters
    ----------
    steps, edges, shares
        As `services.values_over_time` returns them.
    step
        The marked step.
    """
    axis = StepAxis.of(steps)
    figure = go.Figure(
        go.Heatmap(
            z=np.where(shares > 0, np.sqrt(shares), np.nan).astype(np.float32),  # Keeps tails visible.
            x=axis.edges,
            y=((edges[:-1] + edges[1:]) / 2).astype(np.float32),
            customdata=np.stack(
                [100 * shares, np.broadcast_to(np.asarray(steps, np.float64), shares.shape)], axis=2
            ),
            colorscale=SEQUENTIAL,
            showscale=False,
            hoverongaps=False,
            hovertemplate="step %{customdata[1]:,d}<br>%{customdata[0]:.3r} % of the values near %{y:.3r}"
            "<extra></extra>",
        )
    )
    lay_out(figure, _HEIGHT)
    figure.update_xaxes(**steps_axis(6) | axis.ticks, showgrid=False)
    figure.update_yaxes(title=title("Value"), showgrid=False, automargin=True, nticks=6)
    if step in steps:
        left, right = axis.edges[[list(steps).index(step), list(steps).index(step) + 1]]
        look = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": MARK, "width": 2}}
        figure.add_shape(**look, x0=left, x1=right)
    return figure
