"""Sensitivity: how much the loss minds an error, for every layer at every step, in one view."""

from __future__ import annotations

import shlex

import numpy as np
import pandas as pd
import streamlit as st
from inshrink_app import figures, heatmap, services, state
from inshrink_app.components import download, problem, snippets, subject
from inshrink_app.formatting import bytes_text, count_text, duration_text, markdown_text, shape_text
from inshrink_app.jobs import Job
from inshrink_app.tables import METRICS, HeatRow, Sensitivity, ServiceError, Subject

_GROUPINGS = {"tensor": "Tensor", "block": "Block", "layer_type": "Layer type"}
_STATISTICS = {"mean": "Mean", "p50": "Median", "p99": "99th percentile"}

# With more tensors than this, rows are blocks unless the reader says otherwise.
_ROWS_BEFORE_BLOCKS = 60

# Reading more than this takes long enough that the reader is asked first.
_ASK_ABOVE_BYTES = 200_000_000

_POLL_SECONDS = 0.5
_ROWS_WITHOUT_SCROLLING = 20


def render() -> None:
    """Draw the page."""
    shown = subject.require("Sensitivity")
    if shown is None:
        return
    metric, by, statistic = _choices(shown)
    state.publish(metric=metric, by=by, stat=statistic)
    st.caption(f"{METRICS[metric].symbol} — {METRICS[metric].meaning}")
    _measured(shown, metric, by, statistic)
    path = str(shown.path)
    snippets.show(
        f"inshrink sensitivity {shlex.quote(path)} --metric {metric} --by {by} --statistic {statistic}",
        f"import inshrink_core\n\nrun = inshrink_core.open({path!r})\n"
        f"measured = inshrink_core.sensitivity(run, {metric!r}).by({by!r})\n"
        f"print(measured.rows, measured.{statistic}[:, -1])",
    )


def _choices(shown: Subject) -> tuple[str, str, str]:
    """Draw the controls, and return metric, grouping and statistic."""
    n_weights = len({row.name for row in shown.tensors if row.role == "weight"})
    default_by = "tensor" if n_weights <= _ROWS_BEFORE_BLOCKS else "block"
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        metric = _control("Metric", state.METRIC, {key: m.label for key, m in METRICS.items()}, "magnitude")
        by = _control("Rows", state.BY, _GROUPINGS, default_by)
        statistic = _control("Statistic", state.STATISTIC, _STATISTICS, "mean")
    return metric, by, statistic


def _control(label: str, key: str, options: dict[str, str], default: str) -> str:
    """Draw one control, beginning with what the link or the session says."""
    widget = f"control.{key}"
    if widget not in st.session_state:
        st.session_state[widget] = state.choice(key, list(options), default)
    chosen = st.segmented_control(
        label, list(options), format_func=options.__getitem__, key=widget, required=True
    )
    return chosen or default


def _measured(shown: Subject, metric: str, by: str, statistic: str) -> None:
    """Draw the measurement, or how far it is, or what it would cost."""
    path = str(shown.path)
    try:
        job = services.sensitivity_job(path, metric)
        if job is None and services.measuring_cost(shown, metric) <= _ASK_ABOVE_BYTES:
            job = services.start_sensitivity(path, metric)
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return
    if job is None:
        _ask(shown, metric)
    elif job.state == "running":
        _progress(path, metric)
    elif job.state == "finished":
        _show(job.result[by], statistic)
    else:
        _stopped(path, metric, job)


def _ask(shown: Subject, metric: str) -> None:
    """Say what the question costs before it is asked."""
    with st.container(border=True):
        st.subheader("Not measured yet", anchor=False)
        cost = services.measuring_cost(shown, metric)
        st.write(
            f"This reads up to {bytes_text(cost)} from {count_text(len(shown.steps))} checkpoints. The "
            "result is kept on disk; checkpoints measured before are not read again."
        )
        if st.button(
            f"Measure {METRICS[metric].label.lower()}", type="primary", icon=":material/play_arrow:"
        ):
            services.start_sensitivity(str(shown.path), metric)
            st.rerun()


@st.fragment(run_every=_POLL_SECONDS)
def _progress(path: str, metric: str) -> None:
    """Look at the job; the page is drawn anew once it has ended."""
    job = services.sensitivity_job(path, metric)
    if job is None or job.state != "running":
        st.rerun()
    with st.container(border=True):
        st.subheader(f"Measuring {METRICS[metric].label.lower()}", anchor=False)
        text = f"{job.done:,} of {job.total:,} checkpoints · {_remaining(job)}"
        st.progress(job.fraction, text=text if job.total else "Starting…")
        if st.button("Cancel", icon=":material/close:"):
            services.cancel_sensitivity(path, metric)
            st.rerun()


def _remaining(job: Job) -> str:
    """Return how long it has taken, and may still take."""
    if job.fraction < 0.02:
        return duration_text(job.seconds)
    left = job.seconds * (1 - job.fraction) / job.fraction
    return f"{duration_text(job.seconds)}, about {duration_text(left)} left"


def _stopped(path: str, metric: str, job: Job) -> None:
    """Say that there is no measurement, why, and offer to try again."""
    if job.problem is not None:
        problem.show(job.problem)
    else:
        st.info("Measuring was cancelled. Nothing was changed.", icon=":material/info:")
    if st.button("Measure again", type="primary", icon=":material/refresh:"):
        services.forget_sensitivity(path, metric)
        services.start_sensitivity(path, metric)
        st.rerun()


def _show(table: Sensitivity, statistic: str) -> None:
    """Draw the heatmap and the table under it."""
    with st.container(border=True):
        shown, clip = _filtered(table)
        if not shown.rows:
            st.caption("No row matches. Clear the filter to see all of them.")
            return
        if not np.isfinite(shown.values[statistic]).any():
            _nothing_to_see(shown)
            return
        st.plotly_chart(
            heatmap.heatmap_figure(shown, statistic, clip=clip),
            config=dict(figures.CONFIG),
            key="heatmap",
            alt=f"{METRICS[table.metric].label} of {len(shown.rows)} rows over {len(table.steps)} steps",
        )
        st.caption(_caption(shown, clip))
    _table(shown, statistic)


def _filtered(table: Sensitivity) -> tuple[Sensitivity, bool]:
    """Draw the filter of the rows, and return what is left and whether outliers are clipped."""
    layers = sorted({row.layer for row in table.rows if row.layer})
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        pattern = st.text_input(
            "Filter rows",
            placeholder="Filter by name",
            key="row_filter",
            icon=":material/search:",
            label_visibility="collapsed",
            width=260,
        )
        chosen: list[str] = []
        if len(layers) > 1 and table.by != "layer_type":
            chosen = st.pills(
                "Layer types",
                layers,
                selection_mode="multi",
                key="layer_filter",
                label_visibility="collapsed",
            )
        clip = st.toggle(
            "Clip outliers",
            value=True,
            key="clip",
            help="Spread the colours between the 1st and 99th percentile.",
        )
    keep = [
        i
        for i, row in enumerate(table.rows)
        if pattern.casefold() in row.name.casefold() and (not chosen or row.layer in chosen)
    ]
    if len(keep) == len(table.rows):
        return table, clip
    return (
        Sensitivity(
            metric=table.metric,
            by=table.by,
            rows=tuple(table.rows[i] for i in keep),
            steps=table.steps,
            values={name: values[keep] for name, values in table.values.items()},
            note=table.note,
        ),
        clip,
    )


def _nothing_to_see(table: Sensitivity) -> None:
    """Say why a metric has no values."""
    st.subheader("This run does not tell", anchor=False)
    reasons = {
        "update": "Movement needs two checkpoints; there is no earlier one to compare with.",
        "fisher": "It is read from Adam's second moment, and the checkpoints hold no optimizer state.",
        "taylor": "It needs gradients or Adam's first moment, and the checkpoints hold neither.",
    }
    st.write(reasons.get(table.metric, "No weight has a finite value."))
    if table.note:
        st.text(table.note)


def _caption(table: Sensitivity, clip: bool) -> str:
    """Say what the picture does not show by itself."""
    parts = ["Colours are logarithmic" + (", outliers clipped at 1 % and 99 %." if clip else ".")]
    if len(table.steps) > heatmap.MAX_COLUMNS:
        per_column = -(-len(table.steps) // heatmap.MAX_COLUMNS)
        parts.append(f"Each column is the mean of up to {per_column} neighbouring steps.")
    if any(np.isnan(values).any() for values in table.values.values()):
        parts.append("Grey: the tensor is absent or has no value at this step.")
    if table.note:
        parts.append(markdown_text(table.note))
    return " ".join(parts)


def _table(table: Sensitivity, statistic: str) -> None:
    """List the rows with their course, and offer all values as CSV."""
    values = table.values[statistic]
    trend = heatmap.bucket_steps(values, table.steps, 40).values
    rows = [_table_row(row, values[i], trend[i]) for i, row in enumerate(table.rows)]
    first = {"tensor": "Tensor", "block": "Block", "layer_type": "Layer type"}[table.by]
    columns = [first, "Layer type", "Shape", "First", "Last", "Smallest", "Largest", "Course"]
    frame = pd.DataFrame(rows, columns=[*columns[:1], "layer", *columns[2:]])
    frame = (
        frame.rename(columns={"layer": columns[1]}) if table.by == "tensor" else frame.drop(columns="layer")
    )
    number = st.column_config.NumberColumn(format="%.2e")
    st.dataframe(
        frame,
        hide_index=True,
        height="content" if len(rows) <= _ROWS_WITHOUT_SCROLLING else 560,
        alt=f"{METRICS[table.metric].label} per row: first, last, smallest and largest value",
        column_config={
            "First": number,
            "Last": number,
            "Smallest": number,
            "Largest": number,
            "Course": st.column_config.LineChartColumn(
                width="medium", help="log₁₀ of the value over the steps"
            ),
        },
    )
    download.csv_button(
        _long(table),
        f"sensitivity-{table.metric}.csv",
        key="sensitivity.csv",
        label="Download all values as CSV",
    )


def _table_row(row: HeatRow, values: np.ndarray, trend: np.ndarray) -> tuple[object, ...]:
    """Summarize one row of the heatmap."""
    finite = values[np.isfinite(values)]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(trend.astype(np.float64))
    shape = (
        shape_text(row.shape)
        if row.shape is not None
        else f"{row.n_tensors} tensor{'s' * (row.n_tensors != 1)}"
    )
    ends = (finite[0], finite[-1], finite.min(), finite.max()) if finite.size else (np.nan,) * 4
    return (row.name, row.layer, shape, *map(float, ends), [float(v) for v in logs if np.isfinite(v)])


def _long(table: Sensitivity) -> pd.DataFrame:
    """Return every value with its row and step, all statistics side by side."""
    n_rows, n_steps = len(table.rows), len(table.steps)
    columns = {
        table.by: np.repeat([row.name for row in table.rows], n_steps),
        "step": np.tile(table.steps, n_rows),
    }
    return pd.DataFrame(columns | {name: values.ravel() for name, values in table.values.items()})


render()
