"""Comparison of archives with their run, by step and metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Job, subjects_of
from inshrink_app.model import Subject, when
from inshrink_app.pages.archives.table import Measured
from inshrink_app.services import Bound
from inshrink_app.theme import CATEGORICAL, GAP
from inshrink_app.widgets import ending, fmt, job_card, listing, problem, quality
from inshrink_app.widgets.choices import one_of_few
from inshrink_app.widgets.figures import byte_ticks, curve, lay_out, log_ticks, n_named, steps_axis, title
from inshrink_app.widgets.layout import chart

from inshrink_core.chain.report import ChainFrame, ChainReport
from inshrink_core.text import spread
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.shared.measured import Known

_WHICH = {"some": "A few steps", "all": "All steps"}
_MAX_METRICS = 4
_REASON_WIDTH = 400
_HEADINGS = {"restore_cost": "restore cost"} | {
    f"previous_{name}": f"{name.replace('_', ' ')} of the previous checkpoint"
    for name in ("drop", "divergence", "restore_cost")
}


def archives_of(job: Job) -> set[str]:
    """Return the paths of the archives that a job compares."""
    return {path for request in job.requests for path in subjects_of(request)}


def show(
    original: Subject, archives: Sequence[ChainReport], measured: Measured, colours: Mapping[str, str]
) -> None:
    """Draw the button that starts a comparison, its progress, and all known results."""
    now = services.chosen(original)
    job = services.newest_job("archives", "compare", original.path)
    if job is not None and not {str(chain.path) for chain in archives} & archives_of(job):
        job = None
    request = _ask(original, archives, measured, job)
    known = [found for chain in archives for found in measured.get(chain.path, {}).values()]
    known.sort(key=lambda found: found.comparison.metric != now.metric)  # The chosen metric comes first.
    job_card.settled(job)
    for document in () if job is None else services.documents_of(job):
        for path, reason in document.get("failed", {}).items():
            text = f"{Path(path).name} is left out: {fmt.clipped(reason, _REASON_WIDTH)}"
            st.warning(fmt.markdown(text), icon=":material/warning:")
    if known:
        _found(known, {str(chain.path): chain.nbytes for chain in archives}, now.bound, colours)
    elif job is None or not job.is_running:
        st.caption("Not compared yet. Compare restores each step and evaluates it.")
    ending.requests([request])


def _ask(
    original: Subject, archives: Sequence[ChainReport], measured: Measured, job: Job | None
) -> CompareArchives:
    """Draw the options and the button; return the request. The header has evaluator and metric."""
    evaluator, trusted = services.evaluator_and_trust(original)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        button = st.container(width="content")
        steps = _steps(original, archives)
    problem.show_unreadable(original.unreadable, "They are not compared.")
    metric = evaluator.metric if evaluator is not None and evaluator.is_asked else ""
    again = all(_is_known(chain, measured.get(chain.path, {}), steps, metric) for chain in archives)
    tip = f"Restores and evaluates {fmt.counted(len(steps), 'step')} of each archive."
    if not trusted:
        tip = f"{'Choose an' if evaluator is None else 'Trust the'} evaluator in the header first."
        st.caption(tip)
    among = [chain.path for chain in archives if set(steps) & set(chain.steps) or not steps]
    used = [step for step in steps if any(step in chain.steps for chain in archives)]
    request = services.comparison(original, among, used, evaluator, again=again)
    with button:
        job_card.start_button(
            "Measure again" if again else "Compare",
            lambda: services.comparison_work(original, archives, request, evaluator),
            "compare_arrows",
            job=job,
            disabled=not trusted or not steps,
            type="secondary" if again else "primary",
            help=tip,
        )
    return request


def _is_known(chain: ChainReport, known: Mapping[str, Known], steps: Sequence[int], metric: str) -> bool:
    """Return whether the present archive was measured at the given steps, by a metric or any."""
    wanted = set(steps) & set(chain.steps)
    found = [known.get(metric)] if metric else list(known.values())
    return bool(found) and all(
        row is not None and row.is_current and wanted <= {step.step for step in row.comparison.steps}
        for row in found
    )


def _steps(original: Subject, archives: Sequence[ChainReport]) -> tuple[int, ...]:
    """Draw the choice of steps and return it."""
    common = [step for step in original.steps if any(step in chain.steps for chain in archives)]
    some = tuple(spread(common, services.MAX_COMPARED))
    which = one_of_few("compare", "Steps", "which", _WHICH, "some" if len(some) < len(common) else "all")
    return some if which == "some" else tuple(common)


def _found(
    known: Sequence[Known], sizes: Mapping[str, int], bound: Bound, colours: Mapping[str, str]
) -> None:
    """Draw results: charts over steps, size against cost, and a table of every step."""
    if old := sorted({found.name for found in known if not found.is_current}):
        text = f"{', '.join(old)}: measured before its last change. Measure it again."
        st.warning(fmt.markdown(text), icon=":material/history:")
    _charts(known, sizes, bound, colours)
    st.caption(_basis(known))
    with st.expander("Every step", icon=":material/table_rows:"):
        _table(known, bound)


def _basis(known: Sequence[Known]) -> str:
    """Return when and where it was measured, and at how many steps it is not discriminative."""
    newest = max(known, key=lambda found: found.at)
    samples = "" if newest.n_samples is None else f" on {fmt.counted(newest.n_samples, 'sample')}"
    parts = [f"Measured {when(newest.at)}{samples}, on {newest.comparison.device.upper() or 'CPU'}."]
    parts.append("Dashed grey: the previous checkpoint in place of each step, which stores nothing.")
    as_good = sum(
        row.previous_restore_cost <= row.restore_cost
        for found in known
        for row in found.comparison.steps
        if row.restore_cost is not None and row.previous_restore_cost is not None
    )
    if as_good:
        parts.append(
            f"At {fmt.counted(as_good, 'step')} it costs no more than the archive, so these steps say little."
        )
    return fmt.markdown(" ".join(parts))


def _charts(
    known: Sequence[Known], sizes: Mapping[str, int], bound: Bound, colours: Mapping[str, str]
) -> None:
    """Draw the bounded figure, size against it, each metric, and the divergence, in rows of two."""
    first = {found.archive: found for found in reversed(known)}  # Costs are equal for all metrics.
    each = [first[path] for path in dict.fromkeys(found.archive for found in known)]
    rows = [row for found in each for row in found.comparison.steps]
    drawn: list[tuple[str, go.Figure, str]] = []

    def add(name: str, of: Sequence[Known], key: str, alt: str) -> None:
        drawn.append((key, cost_figure(of, name, colours, bound), alt))

    if any(row.restore_cost is not None for row in rows):
        add("restore_cost", each, "cost", "Restore cost")
    for metric in list(dict.fromkeys(found.comparison.metric for found in known))[:_MAX_METRICS]:
        of = [found for found in known if found.comparison.metric == metric]
        drawn.append((f"metric.{metric}", metric_figure(of, colours), f"{metric}, restored"))
        if bound.kind == "drop":
            add("drop", of, f"drop.{metric}", f"Drop of {metric}")
    if any(row.divergence for row in rows):
        add("divergence", each, "divergence", "Divergence")
    if len(sizes) > 1:  # A metric and its drop stay side by side.
        kind = "restore_cost" if bound.kind == "none" else bound.kind
        figure = size_figure(each, sizes, colours, kind, bound)
        drawn.insert(1 if drawn[0][0] == "cost" else len(drawn), ("sizes", figure, "Cost against size"))
    names = ", ".join(fmt.html(found.name) for found in each)
    columns = st.columns(2, gap="medium")
    for place, (key, figure, alt) in enumerate(drawn):
        with columns[place % 2]:
            chart(figure, f"compare.{key}", f"{alt} by step, of {names}")


def _table(known: Sequence[Known], bound: Bound) -> None:
    """List every step of every archive by every metric."""
    rows: list[dict[str, Any]] = []
    for found in known:
        for row in found.comparison.steps:
            fields = {name: getattr(row, name) for name in row.__slots__}
            about = {"archive": found.name, "metric": found.comparison.metric}
            rows.append({**about, **fields, "bound": bound.check(bound.of(row))})
    table = pd.DataFrame(rows).rename(columns=_HEADINGS)
    small = dict.fromkeys((name for name in table if str(name).startswith("divergence")), listing.SMALL)
    listing.show(
        table,
        "compare",
        alt="Original and restored metric, drop, divergence and restore cost of every step",
        formats={"original": "%.4g", "restored": "%.4g", **small},
        hidden=[name for name in ("archive", "metric") if table[name].nunique() < 2],
        helps=dict.fromkeys(small, quality.NATS),
    )


_NAME_WIDTH = 30
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
_HEIGHT = 220
_ROOM = 0.12
_BOUND = CATEGORICAL[5]
_KINDS = {"keyframe": "Keyframe", "delta": "Delta frame"}


def metric_figure(known: Sequence[Known], colours: Mapping[str, str]) -> go.Figure:
    """Draw a metric by step: original, and restored from each archive."""
    rows = {row.step: row for found in known for row in found.comparison.steps}
    errors = {step: error for found in known for step, error in found.standard_errors.items()}
    metric, steps = fmt.html(known[0].comparison.metric), sorted(rows)
    hover = f"original, step %{{x:,}}<br>{metric} %{{y:.5g}}"
    original = curve(steps, [rows[step].original for step in steps], "Original", hover, GAP, width=3)
    if rows.keys() <= errors.keys():
        original.error_y = {"array": [errors[step] for step in steps], "thickness": 1, "width": 2}
    figure = go.Figure(original)
    for found in known:
        restored = [row.restored for row in found.comparison.steps]
        figure.add_trace(_archive(found, restored, colours, metric, ".5g"))
    return _lay_out(figure, metric)


def cost_figure(
    known: Sequence[Known], name: str, colours: Mapping[str, str], bound: Bound | None = None
) -> go.Figure:
    """Draw a figure of the comparison by step, its bound, and the previous-checkpoint baseline.

    The axis covers the archives and the bound; a far worse baseline runs out of it.

    Parameters
    ----------
    known
        The comparisons.
    name
        ``restore_cost``, ``drop`` or ``divergence``; the divergence has a logarithmic axis.
    colours
        Colour of each archive, by its path.
    bound
        The quality bound.
    """
    figure, cost = go.Figure(), quality.COSTS[name]
    rows = [row for found in known for row in found.comparison.steps]
    baseline = {row.step: value for row in rows if (value := getattr(row, f"previous_{name}")) is not None}
    if baseline:
        steps = sorted(baseline)
        values = [cost.scale * baseline[step] for step in steps]
        hover = f"previous checkpoint, step %{{x:,}}<br>%{{y:{fmt.d3_format(values)}}} {cost.unit}"
        look: dict[str, Any] = {"dash": "dash", "mode": "lines"}
        figure.add_trace(curve(steps, values, "Previous checkpoint", hover, GAP, **look))
    drawn: list[float] = []
    for found in known:
        known_values = (getattr(row, name) for row in found.comparison.steps)
        values = [math.nan if value is None else cost.scale * value for value in known_values]
        figure.add_trace(_archive(found, values, colours, cost.word, fmt.d3_format(values), f" {cost.unit}"))
        drawn += filter(math.isfinite, values)
    drawn += _draw_bound(figure, name, bound)
    metric = f" of {fmt.html(known[0].comparison.metric)}" if name == "drop" else ""
    _lay_out(figure, f"{cost.label}{metric}, {cost.unit}")
    worst = max((cost.scale * value for value in baseline.values()), default=0.0)
    if name == "divergence":
        return figure.update_yaxes(type="log", **log_ticks([*drawn, worst]))
    least, most = min([0.0, *drawn]), max(drawn, default=0.0)
    if most > least and worst > most:
        room = _ROOM * (most - least)
        figure.update_yaxes(range=[least - room, most + room])
    return figure


def size_figure(
    known: Sequence[Known], sizes: Mapping[str, int], colours: Mapping[str, str], name: str, bound: Bound
) -> go.Figure:
    """Draw the largest restore cost, drop or divergence of each archive against its size."""
    figure, cost = go.Figure(), quality.COSTS[name]
    for found in known:
        value = getattr(found.comparison, f"max_{name}")
        if value is not None and found.archive in sizes:
            mark = _archive(found, [cost.scale * value], colours, cost.word, ".3g", f" {cost.unit}")
            hover = f"{mark.name}<br>%{{x:.4s}}B, {cost.word} %{{y:.3g}} {cost.unit}<extra></extra>"
            mark.update(x=[sizes[found.archive]], hovertemplate=hover, mode="markers", marker={"size": 12})
            figure.add_trace(mark)
    _draw_bound(figure, name, bound)
    _lay_out(figure, f"Largest {cost.word}, {cost.unit}")
    ticks = byte_ticks(max(sizes.values(), default=0))
    return figure.update_xaxes(title=title("Size of the archive"), rangemode="tozero", **ticks)


def _draw_bound(figure: go.Figure, name: str, bound: Bound | None) -> list[float]:
    """Draw a bound across a figure; return its position in a list, empty if the figure is not bounded."""
    if bound is None or bound.kind != name:
        return []
    limit = quality.COSTS[name].scale * bound.value
    line = {"color": _BOUND, "width": 1.5, "dash": "dash"}
    text = {"text": f"Bound {fmt.limit(name, bound.value)}", "font": {"size": 12}, "yshift": 2}
    figure.add_hline(y=limit, line=line, annotation=text, annotation_position="top left")
    return [limit]


def _archive(
    known: Known, values: Sequence[float], colours: Mapping[str, str], what: str, form: str, unit: str = ""
) -> go.Scatter:
    """Return the curve of an archive, with its colour, mark and name."""
    name = fmt.html(fmt.clipped(known.name, _NAME_WIDTH))
    place = list(colours).index(known.archive) if known.archive in colours else 0
    hover = f"{name}, step %{{x:,}}<br>{what} %{{y:{form}}}{unit}"
    steps = [row.step for row in known.comparison.steps]
    symbol = _SYMBOLS[(place + place // len(_SYMBOLS)) % len(_SYMBOLS)]
    marker = {"size": 7, "symbol": symbol}
    return curve(steps, values, name, hover, colours.get(known.archive, CATEGORICAL[1]), marker=marker)


def _lay_out(figure: go.Figure, y: str) -> go.Figure:
    lay_out(figure, _HEIGHT, legend=2 * (n_named(figure) > 1))
    figure.update_xaxes(**steps_axis(8))
    return figure.update_yaxes(title=title(y), automargin=True, nticks=6)


def frames_figure(frames: Sequence[ChainFrame]) -> go.Figure:
    """Draw the bytes of each frame by step, keyframes and delta frames in different colours."""
    figure = go.Figure()
    for colour, (kind, label) in zip(CATEGORICAL, _KINDS.items(), strict=False):
        rows = [frame for frame in frames if frame.kind == kind]
        about = [(fmt.size(row.nbytes), fmt.ratio(row.ratio_total), row.branch) for row in rows]
        hover = f"{label} of step %{{x:,}}<br>%{{customdata[0]}}, %{{customdata[1]}}"
        hover += "<br>branch %{customdata[2]}"
        bars = {"x": [row.step for row in rows], "y": [row.nbytes for row in rows], "customdata": about}
        bars |= {"name": label, "marker": {"color": colour}, "hovertemplate": f"{hover}<extra></extra>"}
        figure.add_trace(go.Bar(**bars))
    figure.update_layout(barmode="stack")
    _lay_out(figure, "Size of the frame")
    return figure.update_yaxes(**byte_ticks(max((frame.nbytes for frame in frames), default=0)))
