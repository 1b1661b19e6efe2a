"""Run: the map, the selection beside it, the card that writes an archive, and the bits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Requests
from inshrink_app.model import ASK_ABOVE_BYTES, METRICS, Page, Sensitivity, ServiceError, Subject
from inshrink_app.pages.run import ahead, bits, changes, picture, rows, search, shrink, strip, tensor
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.board import Board
from inshrink_app.pages.run.picture import remembered
from inshrink_app.pages.run.rows import Look, View
from inshrink_app.pages.run.selection import Selection
from inshrink_app.widgets import ending, fmt, job_card, listing, modules, problem, subject, tables
from inshrink_app.widgets.choices import AUTO, one_of_few
from inshrink_app.widgets.layout import section

from inshrink_core.verbs.inspect import Inspect

_DRAWERS = {"bits": "Bits", "table": "Table", "compare": "Compare", "code": "Code"}
_COMPARED = {"steps": "Two steps", "runs": "Two runs"}
_LISTED = {"rows": "Rows of the map", "tensors": "All tensors"}
_MEASURED = ("fisher", "taylor", "magnitude", "update")
_NAME_WIDTH = 40

Tables = Mapping[str, Sensitivity]


def render() -> None:
    """Draw the place. Each part has its own container, so that a changing part moves no other."""
    header, notices, place = (st.container() for _ in range(3))
    with header:
        shown = subject.require("Run", watched=True)
    if shown is None:
        return
    with notices:
        if shown.kind == "archive":
            _archive(shown)
        problem.show_unreadable(
            shown.unreadable, "The map and archives hold all others: keep these files, or fetch whole ones."
        )
    with place:
        _place(shown)


def _archive(shown: Subject) -> None:
    """Lead from an archive to its panels, and to its run."""
    original = services.original_of(shown)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("An archive: the map shows what it restores.", width="content")
        if st.button("Open in Archives", icon=":material/inventory_2:", key="run.archive"):
            state.go_to("archives")
        if original is not None and st.button("Open its run", icon=":material/folder_open:"):
            state.set_run(str(original.path))
            st.rerun()


@st.fragment
def _place(shown: Subject) -> None:
    """Draw everything below the header as a fragment, so that a click redraws only this part."""
    if state.was_clicked():
        ahead.warm_up(shown)
    left, right = st.columns([5, 2], gap="medium")
    controls, notices, figure, progress, below = (left.container() for _ in range(5))
    card, panel = (right.container() for _ in range(2))
    strip_place, drawer = (st.container() for _ in range(2))
    with controls:
        look = rows.controls(shown)
    with notices:
        measured, job = _measured(shown, look)  # It starts before the estimates of sizes.
        board = _board(shown)
        values, is_partial = (measured, False) if measured else _unmeasured(shown, look, board, job)
        found = _valid(chosen.current(shown.steps), values["tensor"])
    ticked = chosen.ticked(str(shown.path))
    view = rows.narrowed(shown, values, look, found)
    with figure:
        picture.show(view, found, ticked, is_partial=is_partial)
    with progress:
        if job is not None and job.is_running:
            st.fragment(_watched, run_every=job_card.POLL_SECONDS)(job, len(job.documents))
        elif job_card.settled(job, "") and is_partial:
            _ask(shown, look)
    with below:
        picture.sentence(shown, values, look.level)
        picture.lines(view, ticked)
    requests: Requests = ()
    if board is not None:
        with card:
            requests = shrink.show(board)
        with strip_place:
            strip.show(board)
    with panel:
        _panel(view, found)
    chosen.publish(found, ticked)
    with drawer:
        _drawer(view, values, board, found, requests)


def _board(shown: Subject) -> Board | None:
    """Collect the state of a run's bits; None for an archive and for an unreadable run."""
    if shown.kind != "run":
        return None
    device = str(st.session_state.get("shrink.device", AUTO))
    try:
        return boards.gather(shown, services.chosen(shown), services.judge_of(shown), device)
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return None


def _unmeasured(shown: Subject, look: Look, board: Board | None, job: Job | None) -> tuple[Tables, bool]:
    """Return the tables of a map without measurements so far, and whether measurements will follow."""
    if look.colour == "bits" and board is not None:
        return _bits(board), False
    if look.colour == "error" and (errors := services.compared_errors(shown)) is not None:
        return _stable("error", errors, shown), False
    part = services.measured_so_far(shown, job) if job is not None and job.is_running else None
    known = part or _before(shown, look.metric)
    known = known or _stable(look.metric, services.unmeasured(shown, look.metric), shown)
    return known, look.colour in ("sensitivity", "ratio")


def _metrics(look: Look) -> tuple[str, ...]:
    """Return the metrics that the map needs."""
    return {"sensitivity": (look.metric,), "ratio": ("update", "magnitude")}.get(look.colour, ())


def _measured(shown: Subject, look: Look) -> tuple[Tables | None, Job | None]:
    """Return the measurement for the map, and its job until it is ready."""
    try:
        jobs = [_job(shown, metric) for metric in _metrics(look)]  # All jobs start at once.
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return None, None
    for job in jobs:
        if job is None or job.state != "finished":
            return None, job
    results: list[Any] = [job.result for job in jobs if job is not None] or [None]
    first, last = results[0], results[-1]
    if first is None or last is None:
        return None, None
    if look.colour == "ratio":
        first = remembered("run.ratio", first, id(last), lambda: services.relative_updates(first, last))
    return remembered("run.values", first, shown.path, lambda: services.with_averages(shown, first)), None


def _job(shown: Subject, metric: str) -> Job | None:
    """Return the measurement of a metric; a cheap one starts by itself, also after an interruption."""
    path = str(shown.path)
    job = services.sensitivity_job(path, metric)
    if job is None or job.state == "interrupted":
        before = _before(shown, metric)
        cost = services.measuring_cost(shown, metric)
        if before is not None:  # If the run has grown, the new checkpoints are measured.
            cost = cost * len(set(shown.steps) - set(before["tensor"].steps)) // max(1, len(shown.steps))
        if state.was_asked_for() and cost <= ASK_ABOVE_BYTES:
            if job is not None:
                services.forget_job(job)
            job = services.start_sensitivity(path, metric)
    if job is not None and job.state == "finished":
        st.session_state[f"run.before.{metric}"] = (path, job.result)
    return job


def _before(shown: Subject, metric: str) -> Tables | None:
    """Return the last measurement of the same run, from before it grew."""
    path, values = st.session_state.get(f"run.before.{metric}", ("", None))
    return values if path == str(shown.path) else None


def _bits(board: Board) -> Tables:
    """Return the bits of the layers: of the newest archive, else estimated."""
    shown, layers = board.shown, board.layers
    if not board.now.config and board.written is not None:
        return services.archived_bits(shown, board.written.chain)
    known = {}
    if layers is not None:
        known = dict(zip(layers.rates.keys, map(float, layers.predicted.bits), strict=True))
    note = "Estimated of all steps together." if known else ""
    return _stable("bits", services.same_at_all_steps(shown, "bits", known, note), shown)


def _stable(slot: str, made: Tables, shown: Subject) -> Tables:
    """Return equal tables as the same object, so that the map's figure stays cached."""
    table = made["tensor"]
    key = (shown.path, shown.steps, table.note, table.values["mean"].tobytes())
    return remembered(f"run.stable.{slot}", None, key, lambda: made)


def _watched(job: Job, n_known: int) -> None:
    """Draw the progress of a measurement; redraw the map after its first part."""
    now = job_card.current(job)
    if len(now.documents) != n_known:
        st.rerun()
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.progress(now)
        job_card.cancel_button(now)


def _ask(shown: Subject, look: Look) -> None:
    """Offer to measure, with the cost."""
    cost = sum(services.measuring_cost(shown, metric) for metric in _metrics(look))
    with st.container(horizontal=True, vertical_alignment="center"):
        label, key = f"Measure {METRICS[look.metric].word}", f"run.measure.{shown.path}"
        if st.button(label, icon=":material/play_arrow:", key=key):
            state.clicked()
            for metric in _metrics(look):
                services.start_sensitivity(str(shown.path), metric)
            st.rerun()
        n_steps = fmt.counted(len(shown.steps), "checkpoint")
        st.caption(f"Reads up to {fmt.size(cost)} from {n_steps}, once.", width="content")


def _valid(found: Selection | None, tensors: Sensitivity) -> Selection | None:
    """Drop a selection of another run."""
    if found is None or rows.tensors_of(tensors, found.layer):
        return found
    st.caption(f"This run has no layer {fmt.markdown(fmt.elided(found.layer, _NAME_WIDTH))}.")
    chosen.select(None)
    return None


def _panel(view: View, found: Selection | None) -> None:
    """Draw the panel of the selection: details of a tensor, or the tensors of a group."""
    with st.container(border=True, gap="small", key="panel"):
        if found is None:
            st.caption("Click a cell to look inside a tensor; click a module's name to open it. Arrows move.")
            if view.ranked:
                steps = view.table.steps
                st.markdown(f"**Largest share of the total at step {fmt.count(steps[-1])}**")
                rows.show_ranked(view.plain, view.ranked, view.shares, len(steps) - 1, "largest")
            return
        run = str(view.shown.path)
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            name = fmt.markdown(fmt.elided(found.layer, _NAME_WIDTH))
            st.markdown(f"**{name}** :small[step {fmt.count(found.step)}]", width="content")
            is_ticked = found.layer in chosen.ticked(run)
            with st.container(horizontal=True, width="content", gap="small"):
                st.button(
                    "Unpin" if is_ticked else "Pin",
                    icon=":material/keep_off:" if is_ticked else ":material/keep:",
                    type="tertiary",
                    on_click=chosen.tick,
                    args=(run, found.layer),
                    key="panel.pin",
                    help="Draws the row as a line under the map (p).",
                )
                st.button(
                    "Close",
                    icon=":material/close:",
                    type="tertiary",
                    help="Back to the largest rows.",
                    on_click=chosen.select,
                    args=(None,),
                    key="panel.close",
                )
        if any(row.name == found.layer for row in view.tensors.rows):
            tensor.show(view.shown, view.tensors, found.layer, found.step)
        else:
            rows.show_group(view, found)


def _drawer(
    view: View, values: Tables, board: Board | None, found: Selection | None, requests: Requests
) -> None:
    """Draw the open drawer."""
    shown, look = view.shown, view.look
    offered = {key: word for key, word in _DRAWERS.items() if key != "bits" or board is not None}
    look_of: dict[str, Any] = {"label_visibility": "collapsed", "required": True}
    name = one_of_few("run", "Drawer", "drawer", offered, next(iter(offered)), **look_of)
    if name == "bits" and board is not None:
        names = [row.name for row in view.tensors.rows]
        bits.show(board, view.nodes, names, chosen.ticked(str(shown.path)))
    elif name == "table":
        _table(view)
    elif name == "compare":
        which = one_of_few("run", "Compared", "compared", _COMPARED, "steps", **look_of)
        if which == "steps":
            changes.two_steps(shown, values, look.statistic)
        else:
            changes.two_runs(shown, values, look.statistic, functools.partial(_of_other, look))
    else:
        _code(shown, look, board, found, requests)


def _table(view: View) -> None:
    """List the rows of the map, or every tensor of the last checkpoint from its headers."""
    if one_of_few("run", "Table", "table", _LISTED, "rows", label_visibility="collapsed") == "rows":
        rows.show_table(view, chosen.ticked(str(view.shown.path)))
        return
    matches = modules.matching([row.name for row in view.shown.tensors], view.look.pattern)
    table = tables.tensors([row for row in view.shown.tensors if row.name in matches])
    listing.show(table, "tensors", alt="Tensors with role, layer type, dtype, shape and size")
    for title, sizes in tables.sizes(view.shown).items():
        parts = " · ".join(f"{name} {fmt.size(n)}" for name, n, _ in sizes.itertuples(index=False))
        st.caption(fmt.markdown(f"{title}: {parts}"))


def _of_other(look: Look, other: Subject) -> Tables | None:
    """Return the same measurement of another run, or draw its progress."""
    found, job = _measured(other, look)
    if found is None and job is not None:
        job_card.settled(job, f"Measuring {METRICS[look.metric].word} of the second run")
    elif found is None:
        with section("The second run is not measured yet"):
            _ask(other, look)
    return found


def _code(
    shown: Subject, look: Look, board: Board | None, found: Selection | None, requests: Requests
) -> None:
    """Draw the equivalent command line and Python code."""
    metric = look.metric if look.metric in _MEASURED else "magnitude"
    by = modules.TENSOR if look.level.isdigit() else look.level
    asked: list[Any] = [Inspect(str(shown.path)), services.sensitivity_request(shown, metric, by), *requests]
    if board is not None:
        asked += [search.plain(board), board.intent.estimate]
    ending.requests(asked)
    if found is not None:
        tensor.code(shown, found.layer, found.step, metric)


PAGE = Page(
    "Run",
    ":material/grid_on:",
    render,
    former=("overview", "sensitivity", "allocate", "search"),
)
