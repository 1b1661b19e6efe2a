"""Sensitivity: how much the loss minds an error, for every layer at every step, in one view."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import ASK_ABOVE_BYTES, METRICS, Page, Sensitivity, ServiceError, Subject
from inshrink_app.pages.sensitivity import cells, changes
from inshrink_app.widgets import ending, fmt, job_card, modules, problem, subject
from inshrink_app.widgets.choices import one_of_few, one_of_many
from inshrink_app.widgets.layout import section

_VIEWS = {"steps": "All steps", "diff": "Two steps", "runs": "Two runs"}
_STATISTICS = {"mean": "Mean", "p50": "Median", "p99": "99th percentile"}

_VIEW = "view"
_METRIC_OF = "sensitivity.run"
_BEFORE = "sensitivity.before"

_control = functools.partial(one_of_few, "control", required=True)


def render() -> None:
    """Draw the page."""
    shown = subject.require("Sensitivity", watched=True)
    if shown is None:
        return
    view, metric, level, statistic = _choices(shown)
    state.publish(metric=metric, stat=statistic)
    if view == "steps":
        state.retract(_VIEW)
    st.caption(f"{METRICS[metric].symbol} — {METRICS[metric].meaning} {_untold(shown)}")
    tables = _measured(shown, metric)
    told = functools.partial(_snippets, shown, metric, level)
    if tables is not None and view == "steps":
        cells.show(shown, tables, level, statistic, told)
        return
    if tables is None:
        told()
    elif view == "diff":
        changes.two_steps(shown, tables, statistic)
    else:
        changes.two_runs(shown, tables, statistic, level, lambda other: _measured(other, metric, ".other"))
    ending.offer(ending.ALLOCATE, ending.EXPORT)


def _choices(shown: Subject) -> tuple[str, str, str, str]:
    """Draw the controls, and return view, metric, level of the rows and statistic."""
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        view = _control("View", _VIEW, _VIEWS, "steps", label_visibility="collapsed")
        metric = _metric(shown)
        with st.popover("Depth and statistic", icon=":material/account_tree:"):
            level = modules.TENSOR
            if view != "diff":
                names = dict.fromkeys(row.name for row in shown.tensors if row.role == "weight")
                level = modules.level_slider("control", tuple(names))
            statistic = _control("Statistic", state.STATISTIC, _STATISTICS, "mean")
    return view, metric, level, statistic


def _metric(shown: Subject) -> str:
    """Draw the choice of a metric; a run is opened on one that it tells, whatever was looked at before."""
    untold = services.untold_metrics(shown)
    offered = {key: metric.label for key, metric in METRICS.items() if key not in untold}
    first = services.told_metrics(shown)[0]
    widget = f"control.{state.METRIC}"
    if st.session_state.get(_METRIC_OF) != str(shown.path):
        st.session_state[_METRIC_OF] = str(shown.path)
        st.session_state.pop(widget, None)
    return one_of_many(
        "control", "Metric", state.METRIC, offered, first, label_visibility="collapsed", width=170
    )


def _untold(shown: Subject) -> str:
    """Say which metrics are not offered, and why; empty where all are."""
    why: dict[str, list[str]] = {}
    for key in services.untold_metrics(shown):
        why.setdefault(METRICS[key].needs, []).append(METRICS[key].label)
    said = [f"{' and '.join(names)} off: {reason}" for reason, names in why.items()]
    if METRICS["fisher"].needs in why:
        held = ", ".join(role.replace("_", " ") for role in services.optimizer_state(shown))
        said.append(f"Their optimizer state: {held or 'none'}.")
    return " ".join(said)


def _measured(shown: Subject, metric: str, key: str = "") -> Mapping[str, Sensitivity] | None:
    """Return the tables of a metric by grouping; None where the page shows how to come to them instead.

    Parameters
    ----------
    shown
        What is measured.
    metric
        A key of `METRICS`.
    key
        Tells the widgets of several measurements on one page apart.
    """
    path = str(shown.path)
    before = _before(path, metric, key)
    try:
        job = services.sensitivity_job(path, metric)
        is_wanted = job is None or job.state == "interrupted"
        if is_wanted and state.was_clicked() and _cost(shown, metric, before) <= ASK_ABOVE_BYTES:
            job = _begun_anew(job, path, metric)
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return None
    if job is not None and job.state == "finished":
        tables: Mapping[str, Sensitivity] = job.result
        earlier = services.find_job(before.job_id) if before and before.job_id != job.job_id else None
        if earlier is not None:  # Of the run before it has grown: no page asks for it any more.
            services.forget_job(earlier)
        st.session_state[f"{_BEFORE}{key}"] = _Measured(path, metric, job.job_id, tables)
        return tables
    if job is None:
        _ask(shown, metric, key)
    else:
        job_card.settled(job, f"Measuring {METRICS[metric].word}")
    return None if before is None else before.tables


class _Measured(NamedTuple):
    """What was measured before a run has grown: it stays on screen until the new checkpoints are."""

    path: str
    metric: str
    job_id: str
    tables: Mapping[str, Sensitivity]


def _before(path: str, metric: str, key: str) -> _Measured | None:
    """Return what this page showed last, where it is of the same run and metric."""
    found: _Measured | None = st.session_state.get(f"{_BEFORE}{key}")
    return found if found is not None and (found.path, found.metric) == (path, metric) else None


def _cost(shown: Subject, metric: str, before: _Measured | None) -> float:
    """Return the bytes that have to be read: of a run that has grown, those of the new checkpoints."""
    cost = services.measuring_cost(shown, metric)
    if before is None:
        return cost
    new = set(shown.steps) - set(before.tables["tensor"].steps)
    return cost * len(new) / len(shown.steps)


def _ask(shown: Subject, metric: str, key: str) -> None:
    """Say what the question costs before it is asked."""
    with section("Not measured yet"):
        cost = services.measuring_cost(shown, metric)
        st.write(
            f"This reads up to {fmt.size(cost)} from {fmt.counted(len(shown.steps), 'checkpoint')}. The "
            "result is kept on disk; checkpoints measured before are not read again."
        )
        if not state.was_clicked():
            st.caption("You followed a link, and a link alone starts nothing.")
        if st.button(
            f"Measure {METRICS[metric].word}",
            type="primary",
            icon=":material/play_arrow:",
            key=f"measure{key}",
        ):
            state.clicked()
            services.start_sensitivity(str(shown.path), metric)
            st.rerun()


def _begun_anew(job: Job | None, path: str, metric: str) -> Job:
    """Drop a measurement that did not finish, and measure."""
    if job is not None and not job.is_running and job.state != "finished":
        services.forget_job(job)
    return services.start_sensitivity(path, metric)


def _snippets(shown: Subject, metric: str, level: str) -> None:
    """Show the command and the lines that give the same figures; those of modules are means of tensors."""
    by = modules.TENSOR if level.isdigit() else level
    ending.requests([services.sensitivity_request(shown, metric, by)])


PAGE = Page("Sensitivity", ":material/grid_on:", render)
