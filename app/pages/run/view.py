"""Run: the map, the selection beside it, the card that writes an archive, and the bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, Requests
from inshrink_app.model import ASK_ABOVE_BYTES, METRICS, Page, Sensitivity, Subject
from inshrink_app.pages.run import bits, changes, picture, rows, shrink, tensor
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.board import Board
from inshrink_app.pages.run.rows import Look, View
from inshrink_app.pages.run.selection import Selection
from inshrink_app.widgets import ending, fmt, header, job_card, listing, modules, problem
from inshrink_app.widgets.choices import one_of_few
from inshrink_app.widgets.layout import answer, remembered, section

from inshrink_core.sensitivity import SensitivityMetric
from inshrink_core.verbs.inspect import Inspect

_DRAWERS = {"bits": "Bits", "table": "Table", "compare": "Compare", "code": "Code"}
_COMPARED = {"steps": "Two steps", "runs": "Two runs"}
_LISTED = {"rows": "Rows of the map", "tensors": "All tensors"}
_NAME_WIDTH = 40


def render() -> None:
    """Draw the place. Each part has its own container, so that a changing part moves no other."""
    head, notices, place = (st.container() for _ in range(3))
    with head:
        shown = header.require("Run", watched=True)
    if shown is None:
        return
    with notices:
        if shown.kind == "archive":
            _archive(shown)
        problem.show_unreadable(shown.unreadable, "Map and archives leave them out. Keep or fetch the files.")
    with place:
        _place(shown)


def _archive(shown: Subject) -> None:
    """Lead from an archive to its panels, and to its run."""
    original = services.original_of(shown)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("This is an archive: the map shows restored weights and their error.", width="content")
        if st.button("Open in Archives", icon=":material/inventory_2:", key="run.archive"):
            state.go_to("archives")
        if original is not None and st.button("Open its run", icon=":material/folder_open:"):
            state.set_run(str(original.path))
            st.rerun()


@st.fragment
def _place(shown: Subject) -> None:
    """Draw everything below the header as a fragment, so that a click redraws only this part."""
    if state.was_clicked():
        services.warm_up()
    left, right = st.columns([5, 2], gap="medium")
    controls, notices, asked, figure, progress, below = (left.container() for _ in range(6))
    card, panel = (right.container() for _ in range(2))
    strip_place, drawer = (st.container() for _ in range(2))
    with controls:
        look = rows.controls(shown)
    gathered = functools.cache(lambda: _gather(shown))
    with notices:
        measured, job = _measured(shown, look)  # It starts before the estimates of sizes.
        values = _stable(measured or _unmeasured(shown, look, gathered, job), shown)
        is_partial = measured is None and bool(_metrics(look))
        found = _valid(chosen.current(values.steps), values)
    ticked = chosen.ticked(str(shown.path))
    view = rows.narrowed(shown, values, look, found)
    with figure:
        picture.show(view, found, ticked, is_partial=is_partial)
    with progress:
        is_settled = job_card.settled(job)
    if is_settled and is_partial and not shown.n_unread:
        with asked:
            _ask(shown, look)
    with below:
        picture.sentence(shown, values, look.level)
        picture.lines(view, ticked)
    with notices:
        board = gathered()  # After the map, since the first call imports the codecs and torch.
    requests: Requests = ()
    if board is not None:
        with card:
            requests = shrink.show(board)
    elif shown.n_unread:
        card.caption("Sizes and bits follow once all checkpoints are read.")
    with panel:
        _panel(view, found)
    chosen.publish(found, ticked)
    with strip_place:
        name = _strip(view, board)
    with drawer:
        _drawer(name, view, board, found, requests)


def _gather(shown: Subject) -> Board | None:
    """Return what the card, the strip and the drawer show; None for an archive or a run not read so far."""
    if shown.kind != "run" or shown.n_unread:
        return None
    return answer(lambda: boards.gather(shown, services.chosen(shown), services.trusted_evaluator(shown)))


def _unmeasured(
    shown: Subject, look: Look, gathered: Callable[[], Board | None], job: Job | None
) -> Sensitivity:
    """Return the table of a map without measurements so far."""
    if look.colour == "bits" and (board := gathered()) is not None:
        return _bits(board)
    if look.colour == "error" and (errors := services.compared_errors(shown)) is not None:
        return errors
    part = services.measured_so_far(shown, job) if job is not None and job.is_running else None
    known = part or (services.earlier_measurement(shown, look.metric) if _metrics(look) else None)
    return known or services.unmeasured(shown, look.metric)


def _metrics(look: Look) -> tuple[str, ...]:
    """Return the metrics that the map needs."""
    return {"sensitivity": (look.metric,), "ratio": ("update", "magnitude")}.get(look.colour, ())


def _measured(shown: Subject, look: Look) -> tuple[Sensitivity | None, Job | None]:
    """Return the measurement for the map, and its job until it is ready."""
    if shown.n_unread:
        measure, metrics = services.latest_measured, _metrics(look) if state.was_asked_for() else ()
        tables: list[Any] = answer(lambda: [measure(shown, metric) for metric in metrics]) or []
    else:
        jobs = answer(lambda: [_job(shown, metric) for metric in _metrics(look)]) or ()  # All start at once.
        for job in jobs:
            if job is None or job.state != "finished":
                return None, job
        tables = [services.read_result(job) for job in jobs if job is not None]
    if not tables or None in tables:
        return None, None
    table = services.relative_updates(*tables) if look.colour == "ratio" else tables[0]
    return services.with_averages(shown, table), None


def _job(shown: Subject, metric: str) -> Job | None:
    """Return the measurement of a metric; a cheap one starts by itself, also after an interruption."""
    work = services.sensitivity_work(shown, metric)
    begins = state.was_asked_for() and services.measuring_cost(shown, metric) <= ASK_ABOVE_BYTES
    return boards.begun(work) if begins else services.job_of(work)


def _bits(board: Board) -> Sensitivity:
    """Return the bits of the layers: of the newest archive, else estimated."""
    if not board.now.config and board.written is not None:
        return services.archived_bits(board.shown, board.written.chain)
    known = {}
    if board.rates is not None and board.predicted is not None:
        known = dict(zip(board.rates.keys, map(float, board.predicted.bits), strict=True))
    return services.estimated_bits(board.shown, known)


def _stable(table: Sensitivity, shown: Subject) -> Sensitivity:
    """Return equal tables as the same object, so that the map's figure stays cached."""
    values = tuple(known.tobytes() for known in table.values.values())
    key = (shown.path, shown.steps, table.metric, table.note, hash(values))
    return remembered("run.stable", None, key, lambda: table)


def _ask(shown: Subject, look: Look) -> None:
    """Offer to measure, with the cost."""
    cost = sum(services.measuring_cost(shown, metric) for metric in _metrics(look))
    with st.container(horizontal=True, vertical_alignment="center"):
        label, key = f"Measure {METRICS[look.metric].word}", f"run.measure.{shown.path}"
        if st.button(label, icon=":material/play_arrow:", key=key):
            state.clicked()
            for metric in _metrics(look):
                services.start_job(services.sensitivity_work(shown, metric), again=False)
            st.rerun()
        n_steps = fmt.counted(len(shown.steps), "checkpoint")
        st.caption(f"Reads up to {fmt.size(cost)} from {n_steps}, once.", width="content")


def _valid(found: Selection | None, tensors: Sensitivity) -> Selection | None:
    """Drop a selection of another run."""
    if found is None or rows.tensors_of(tensors, found.layer):
        return found
    st.caption(f"This run has no layer {fmt.markdown(fmt.clipped(found.layer, _NAME_WIDTH))}.")
    chosen.select(None)
    return None


def _panel(view: View, found: Selection | None) -> None:
    """Draw the panel of the selection: details of a tensor, or the tensors of a group."""
    with st.container(border=True, gap="small", key="panel"):
        if found is None:
            st.caption("Click a cell to look inside a tensor, or the name of a module to open it.")
            if view.ranked:
                steps = view.table.steps
                st.markdown(f"**Largest share of the total at step {fmt.count(steps[-1])}**")
                rows.show_ranked(view.table, view.ranked, view.shares, len(steps) - 1, "largest")
            return
        run = str(view.shown.path)
        is_pinned = found.layer in chosen.ticked(run)
        label, icon, places = ("Unpin", "keep_off", ()) if is_pinned else ("Pin", "keep", (0,))
        tip = "Draws the row as a line under the map (p)."
        actions = (
            (label, icon, tip, chosen.tick, (run, [found.layer], places)),
            ("Close", "close", "Back to the largest rows.", chosen.select, (None,)),
        )
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            name = fmt.markdown(fmt.clipped(found.layer, _NAME_WIDTH))
            st.markdown(f"**{name}** :small[step {fmt.count(found.step)}]", width="content")
            with st.container(horizontal=True, width="content", gap="small"):
                for label, icon, tip, act, args in actions:
                    look: dict[str, Any] = {"icon": f":material/{icon}:", "type": "tertiary", "help": tip}
                    st.button(label, on_click=act, args=args, **look)
        if found.step not in view.shown.steps:
            st.caption("This checkpoint is not read yet.")
        elif any(row.name == found.layer for row in view.tensors.rows):
            tensor.show(view.shown, view.tensors, found.layer, found.step)
        else:
            rows.show_group(view, found)


_BARE: dict[str, Any] = {"label_visibility": "collapsed"}


def _strip(view: View, board: Board | None) -> str:
    """Draw the strip, with the choice of the drawer and the actions of *Bits*; return the chosen one."""
    offered = dict(_DRAWERS)
    if board is None and not view.shown.n_unread:
        del offered["bits"]
    with st.container(key="strip", gap="xsmall"):
        if board is not None:
            shrink.show_figures(board)
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            name = one_of_few("run", "Drawer", "drawer", offered, next(iter(offered)), **_BARE)
            if name == "bits" and board is not None:
                bits.actions(board, view)
        if board is not None:
            bits.show_result(board)
    return name


def _drawer(name: str, view: View, board: Board | None, found: Selection | None, requests: Requests) -> None:
    """Draw the open drawer."""
    shown, look = view.shown, view.look
    if name == "bits" and board is not None:
        bits.show(board, view)
    elif name == "bits":
        st.caption("The bits of the layers follow once all checkpoints are read.")
    elif name == "table":
        _table(view)
    elif name == "code":
        _code(shown, look, board, found, requests)
    elif one_of_few("run", "Compared", "compared", _COMPARED, "steps", **_BARE) == "steps":
        changes.two_steps(shown, view.tensors, look.statistic)
    else:
        changes.two_runs(shown, view.tensors, look.statistic, functools.partial(_of_other, look))


def _table(view: View) -> None:
    """List the rows of the map, or every tensor of the last checkpoint from its headers."""
    if one_of_few("run", "Table", "table", _LISTED, "rows", label_visibility="collapsed") == "rows":
        rows.show_table(view, chosen.ticked(str(view.shown.path)))
        return
    matches = modules.matching([row.name for row in view.shown.tensors], view.look.pattern)
    table = listing.tensors([row for row in view.shown.tensors if row.name in matches])
    listing.show(table, "tensors", alt="Tensors with role, layer type, dtype, shape and size")
    for title, sizes in listing.sizes(view.shown).items():
        parts = " · ".join(f"{name} {fmt.size(n)}" for name, n, _ in sizes.itertuples(index=False))
        st.caption(fmt.markdown(f"{title}: {parts}"))


def _of_other(look: Look, other: Subject) -> Sensitivity | None:
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
    metric = look.metric if look.metric in list(SensitivityMetric) else "magnitude"
    by = modules.TENSOR if look.level.isdigit() else look.level
    asked: list[Any] = [Inspect(str(shown.path)), services.sensitivity_request(shown, metric, by), *requests]
    if board is not None:
        asked += [bits.plain(board), board.estimate]
    ending.requests(asked)
    if found is not None:
        tensor.code(shown, found.layer, found.step, metric)


PAGE = Page("Run", ":material/grid_on:", render, former=("overview", "sensitivity", "allocate", "search"))
