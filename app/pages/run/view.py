"""Run: the map first, what is picked beside it, writing an archive, and the bits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job
from inshrink_app.model import ASK_ABOVE_BYTES, METRICS, Page, Sensitivity, ServiceError, Subject
from inshrink_app.pages.run import (
    ahead,
    bits,
    changes,
    picture,
    rows,
    search,
    shrink,
    shrinking,
    strip,
    tensor,
)
from inshrink_app.pages.run import board as boards
from inshrink_app.pages.run import selection as chosen
from inshrink_app.pages.run.board import Board
from inshrink_app.pages.run.rows import Look, View
from inshrink_app.pages.run.selection import Event, Selection
from inshrink_app.widgets import ending, fmt, job_card, listing, modules, problem, subject, tables
from inshrink_app.widgets.choices import AUTO, one_of_few
from inshrink_app.widgets.layout import section

from inshrink_core.verbs.inspect import Inspect

_DRAWERS = {"bits": "Bits", "table": "Table", "compare": "Compare", "code": "Code"}
_COMPARED = {"steps": "Two steps", "runs": "Two runs"}
_NAME_WIDTH = 40

Tables = Mapping[str, Sensitivity]


def render() -> None:
    """Draw the place."""
    shown = subject.require("Run", watched=True)
    if shown is None:
        return
    if shown.kind == "archive":
        _archive(shown)
    problem.show_unreadable(
        shown.unreadable, "The map and archives hold all others: keep these files, or fetch whole ones."
    )
    _place(shown)


def _archive(shown: Subject) -> None:
    """Lead from an archive to what is made of it, and to its run."""
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
    """Draw everything below the header: a click redraws this part alone."""
    if state.was_clicked():
        ahead.warm_up(shown)
    device = str(st.session_state.get("shrink.device", AUTO))
    left, right = st.columns([5, 2], gap="medium")
    with left:
        look = rows.controls(shown)
        asked, job = _measured(shown, look)
        board = _board(shown, device)
        found_tables, is_partial = _tables(shown, look, asked, job, board)
        run = str(shown.path)
        found, ticked = _valid(chosen.current(shown.steps), found_tables["tensor"]), chosen.ticked(run)
        view = rows.narrowed(shown, found_tables, look, found)
        picture.show(view, found, ticked, is_partial=is_partial)
        if job is not None and job.state != "finished":
            _progress(shown, look, job)
        elif job is None and asked is None and look.colour in ("sensitivity", "ratio"):
            _ask(shown, look)
        picture.sentence(shown, found_tables, look.level)
        picture.lines(view, ticked)
    now = None if board is None else boards.figures(board, board.now.config)
    requests: list[Any] = []
    with right:
        if board is not None:
            requests += shrink.show(board, now, device)
        _panel(view, found)
    chosen.publish(found, ticked)
    if board is not None:
        strip.show(board, now)
    _drawer(view, found_tables, look, board, now, found, requests)


def _board(shown: Subject, device: str) -> Board | None:
    """Gather what is known of the bits of a run; None of an archive, and of what cannot be read."""
    if shown.kind != "run":
        return None
    try:
        return boards.gather(shown, services.chosen(shown), services.judge_of(shown), device)
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return None


def _measured(shown: Subject, look: Look) -> tuple[Tables | None, Job | None]:
    """Return the tables of what the map shows, and the job that measures it; begun where that is allowed."""
    metrics = {"sensitivity": (look.metric,), "ratio": ("update", "magnitude")}.get(look.colour, ())
    try:
        jobs = {metric: _job(shown, metric) for metric in metrics}  # All are begun at once.
    except (ServiceError, OSError) as error:
        problem.show(error.problem if isinstance(error, ServiceError) else problem.of_os_error(error))
        return None, None
    found: dict[str, Tables] = {}
    for metric, job in jobs.items():
        if job is None or job.state != "finished":
            return None, job
        found[metric] = job.result
    if look.colour == "ratio":
        key = (shown.path, *map(id, found.values()))
        known = st.session_state.get("run.ratio")
        if known is None or known[0] != key:
            known = (key, services.relative_updates(found["update"], found["magnitude"]), found)
            st.session_state["run.ratio"] = known
        return known[1], None
    return found.get(look.metric), None


def _job(shown: Subject, metric: str) -> Job | None:
    """Return the measurement of a metric; what is small begins by itself, what was cut off begins anew."""
    path = str(shown.path)
    job = services.sensitivity_job(path, metric)
    if job is None or job.state == "interrupted":
        before = _before(shown, metric)
        cost = services.measuring_cost(shown, metric)
        if before is not None:  # Of a run that has grown, the new checkpoints are read.
            cost = cost * len(set(shown.steps) - set(before["tensor"].steps)) // max(1, len(shown.steps))
        if state.was_asked_for() and cost <= ASK_ABOVE_BYTES:
            if job is not None:
                services.forget_job(job)
            job = services.start_sensitivity(path, metric)
    if job is not None and job.state == "finished":
        st.session_state[f"run.before.{metric}"] = (path, job.result)
    return job


def _before(shown: Subject, metric: str) -> Tables | None:
    """Return what the map showed last of the same run, before it has grown."""
    path, tables = st.session_state.get(f"run.before.{metric}", ("", None))
    return tables if path == str(shown.path) else None


def _tables(
    shown: Subject, look: Look, asked: Tables | None, job: Job | None, board: Board | None
) -> tuple[Tables, bool]:
    """Return what the map draws, and whether that is not all yet: what is known, else rows without values."""
    if asked is not None:
        return asked, False
    if look.colour == "bits" and board is not None:
        return _bits(board), False
    if look.colour == "error" and (errors := services.compared_errors(shown)) is not None:
        return _same("error", errors, shown), False
    is_running = job is not None and job.is_running
    running = services.measured_so_far(shown, job) if is_running else None
    known = running or _before(shown, look.metric)
    if known is not None:
        return known, is_running
    return _same(f"empty.{look.metric}", services.unmeasured(shown, look.metric), shown), is_running


def _bits(board: Board) -> Tables:
    """Return the bits of the layers: as the newest archive has them, else as they are estimated."""
    shown = board.shown
    if not board.now.config and board.written is not None:
        return services.archived_bits(shown, board.written.chain)
    told = boards.predicted(shown, board.rates, board.config)
    known = (
        {}
        if told is None or board.rates is None
        else dict(zip(board.rates.keys, map(float, told.bits), strict=True))
    )
    note = "Estimated of all steps together." if known else ""
    return _same("bits", services.same_at_all_steps(shown, "bits", known, note), shown)


def _same(slot: str, made: Tables, shown: Subject) -> Tables:
    """Return the tables of last time where they are the same: the figure of the map is kept by them."""
    known = st.session_state.get(f"run.same.{slot}")
    key = (shown.path, shown.steps, made["tensor"].note, made["tensor"].values["mean"].tobytes())
    if known is not None and known[0] == key:
        tables: Tables = known[1]
        return tables
    st.session_state[f"run.same.{slot}"] = (key, made)
    return made


def _progress(shown: Subject, look: Look, job: Job) -> None:
    """Draw how far the measuring is; where its first part has ended, the map is drawn anew."""
    if not job.is_running:
        job_card.stopped(job, primary=False)
        return
    st.fragment(_watched, run_every=job_card.POLL_SECONDS)(job, len(job.documents))


def _watched(job: Job, n_known: int) -> None:
    now = job_card.current(job)
    if len(now.documents) != n_known:
        st.rerun()
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.progress(now)
        job_card.cancel_button(now)


def _ask(shown: Subject, look: Look) -> None:
    """Say what measuring costs before it is begun."""
    metrics = ("update", "magnitude") if look.colour == "ratio" else (look.metric,)
    cost = sum(services.measuring_cost(shown, metric) for metric in metrics)
    word = METRICS[look.metric].word
    with st.container(horizontal=True, vertical_alignment="center"):
        key = f"run.measure.{shown.path}"
        if st.button(f"Measure {word}", icon=":material/play_arrow:", key=key):
            state.clicked()
            for metric in metrics:
                services.start_sensitivity(str(shown.path), metric)
            st.rerun()
        st.caption(
            f"Reads up to {fmt.size(cost)} from {fmt.counted(len(shown.steps), 'checkpoint')}, once.",
            width="content",
        )


def _valid(found: Selection | None, tensors: Sensitivity) -> Selection | None:
    """Drop a selection that this run knows nothing of, such as that of the run before."""
    if found is None or rows.tensors_of(tensors, found.layer):
        return found
    st.caption(f"This run has no layer {fmt.markdown(fmt.elided(found.layer, _NAME_WIDTH))}.")
    chosen.apply(Event("close"))
    return None


def _panel(view: View, found: Selection | None) -> None:
    """Draw what was picked: a tensor's inside, or a group's tensors."""
    run = str(view.shown.path)
    with st.container(border=True, gap="small", key="panel"):
        if found is None:
            st.caption("Click a cell to look inside a tensor; click a module's name to open it. Arrows move.")
            if view.ranked:
                step = fmt.count(view.table.steps[-1])
                st.markdown(f"**Largest share of the total at step {step}**")
                last = len(view.table.steps) - 1
                rows.show_ranked(view.plain, view.ranked, view.shares, last, "largest")
            return
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
                    on_click=chosen.apply,
                    args=(Event("close"),),
                    key="panel.close",
                )
        if any(row.name == found.layer for row in view.tensors.rows):
            tensor.show(view.shown, view.tensors, found.layer, found.step)
        else:
            rows.show_group(view, found)


def _drawer(
    view: View,
    found_tables: Tables,
    look: Look,
    board: Board | None,
    now: boards.Figures | None,
    found: Selection | None,
    requests: list[Any],
) -> None:
    """Draw the drawer that is open."""
    offered = {key: word for key, word in _DRAWERS.items() if key != "bits" or board is not None}
    name = one_of_few(
        "run", "Drawer", "drawer", offered, next(iter(offered)), label_visibility="collapsed", required=True
    )
    shown = view.shown
    if name == "bits" and board is not None:
        bits.show(board, now, chosen.ticked(str(shown.path)))
    elif name == "table":
        _table(view, found)
    elif name == "compare":
        _compare(shown, found_tables, look)
    else:
        _code(shown, look, board, found, requests)


def _table(view: View, found: Selection | None) -> None:
    """List the rows of the map, or every tensor of the last checkpoint, from its headers."""
    what = one_of_few(
        "run", "Table", "table", {"rows": "Rows of the map", "tensors": "All tensors"}, "rows",
        label_visibility="collapsed",
    )  # fmt: skip
    if what == "rows":
        rows.show_table(view, rows.summary(view), chosen.ticked(str(view.shown.path)))
        return
    names = [row.name for row in view.shown.tensors]
    kept = modules.matching(names, view.look.pattern)
    listed = tables.tensors([row for row in view.shown.tensors if row.name in kept])
    listing.show(listed, "tensors", alt="Tensors with role, layer type, dtype, shape and size")
    for title, table in tables.sizes(view.shown).items():
        told = " · ".join(f"{name} {fmt.size(n)}" for name, n, _ in table.itertuples(index=False))
        st.caption(fmt.markdown(f"{title}: {told}"))


def _compare(shown: Subject, found_tables: Tables, look: Look) -> None:
    """Compare two steps of the run, or two runs."""
    which = one_of_few("run", "Compared", "compared", _COMPARED, "steps", label_visibility="collapsed")
    if which == "steps":
        changes.two_steps(shown, found_tables, look.statistic)
        return
    measured = functools.partial(_of_other, look)
    changes.two_runs(shown, found_tables, look.statistic, measured)


def _of_other(look: Look, other: Subject) -> Tables | None:
    """Return the same measurement of another run, or draw how far it is."""
    found, job = _measured(other, look)
    if found is None and job is not None:
        job_card.settled(job, f"Measuring {METRICS[look.metric].word} of the second run")
    elif found is None:
        with section("The second run is not measured yet"):
            _ask(other, look)
    return found


def _code(
    shown: Subject, look: Look, board: Board | None, found: Selection | None, requests: list[Any]
) -> None:
    """Show the same without the explorer: command line and Python."""
    is_known = look.metric in ("magnitude", "taylor", "fisher", "update")
    metric = look.metric if is_known else "magnitude"
    by = modules.TENSOR if look.level.isdigit() else look.level
    asked: list[Any] = [
        Inspect(str(shown.path)),
        services.sensitivity_request(shown, metric, by),
        *requests,
    ]
    if board is not None:
        asked += [search.plain(board), shrinking.estimate_request(shown, board.now, board.judge)]
    ending.requests(asked)
    if found is not None:
        tensor.code(shown, found.layer, found.step, look.metric)


PAGE = Page(
    "Run",
    ":material/grid_on:",
    render,
    former=("overview", "sensitivity", "allocate", "search"),
)
