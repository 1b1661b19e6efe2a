"""Two steps of a run, or two runs: what differs most, first."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import pandas as pd
import streamlit as st
from inshrink_app import change_figures, figures, services, state
from inshrink_app.changes import Changes, between_runs, between_steps
from inshrink_app.components import download, measurement, problem, snippets
from inshrink_app.components.measurement import ASK_ABOVE_BYTES
from inshrink_app.drill_tables import Moved
from inshrink_app.formatting import bytes_text, count_text, elide, markdown_text, shape_text
from inshrink_app.tables import METRICS, Sensitivity, ServiceError, Subject

__all__ = ["two_runs", "two_steps"]

_FIRST, _SECOND, _OTHER = "a", "b", "other"
_MOST_DRAWN = 30
_NAMES_LISTED = 20


def two_steps(shown: Subject, tables: Mapping[str, Sensitivity], statistic: str) -> None:
    """Compare any two steps of a run: a metric by tensor, and how far the weights moved.

    Parameters
    ----------
    shown
        The run or archive.
    tables
        A metric by grouping.
    statistic
        What of its values counts.
    """
    table = tables["tensor"]
    if len(table.steps) < 2:
        with st.container(border=True):
            st.subheader("There is one checkpoint", anchor=False)
            st.write("A difference needs two steps.")
        return
    first, second = _steps(table.steps)
    if first == second:
        st.info("Choose two different steps.", icon=":material/info:")
        return
    found = between_steps(table, statistic, first, second)
    label = METRICS[table.metric].label
    with st.container(border=True):
        _drawn(found, f"to step {first:,}", f"{label} of tensors, as a multiple of step {first:,}")
        _only(found.only_first, f"Only at step {count_text(first)}")
        _only(found.only_second, f"Only at step {count_text(second)}")
    moved = _moved(shown, first, second)
    _steps_table(found, moved, (first, second), label)
    if moved is not None:
        _only(moved.reshaped, "Of another shape or dtype")
    path = str(shown.path)
    snippets.show(
        f"inshrink diff {shlex.quote(path)} --steps {first} {second}",
        f"import inshrink_core\nfrom inshrink_core.session.diff import diff\n\n"
        f"moved = diff({path!r}, steps=({first}, {second}))\n"
        "for row in moved.rows()[:10]:\n    print(row['key'], row['relative'], row['cosine'])",
    )


def _steps(steps: Sequence[int]) -> tuple[int, int]:
    """Draw the two pickers, beginning with what the link says; the last two by default."""
    defaults = {_FIRST: steps[-2], _SECOND: steps[-1]}
    if len(steps) > 2:
        defaults[_FIRST] = steps[0]
    chosen = {}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        for key, label in ((_FIRST, "From step"), (_SECOND, "To step")):
            widget = f"steps.{key}"
            if st.session_state.get(widget) not in steps:
                known = state.choice(key, [str(step) for step in steps], str(defaults[key]))
                st.session_state[widget] = int(known)
            chosen[key] = st.selectbox(label, steps, key=widget, format_func=count_text, width=170)
        st.button("Swap", icon=":material/swap_horiz:", on_click=_swap)
    state.publish(**{key: str(step) for key, step in chosen.items()})
    return chosen[_FIRST], chosen[_SECOND]


def _swap() -> None:
    keys = (f"steps.{_FIRST}", f"steps.{_SECOND}")
    st.session_state[keys[0]], st.session_state[keys[1]] = (st.session_state[key] for key in reversed(keys))


def _drawn(found: Changes, unit: str, alt: str) -> None:
    """Draw the rows that differ most."""
    if not found.names or not found.steps:
        st.caption("There is nothing to compare.")
        return
    n = min(_MOST_DRAWN, len(found.names))
    st.plotly_chart(
        change_figures.changes_figure(found.names[:n], found.steps, found.values[:n], unit),
        config=dict(figures.CONFIG),
        key="changes",
        alt=alt,
    )
    rest = len(found.names) - n
    said = f"The {count_text(n)} tensors that differ most" + (
        f"; {count_text(rest)} differ less." if rest else "."
    )
    st.caption(said + " Blue: larger than there. Red: smaller. White: the same. Grey: no value.")


def _only(names: Sequence[str], label: str) -> None:
    """List tensors that one side lacks."""
    if not names:
        return
    listed = "\n".join(names[:_NAMES_LISTED])
    more = f"\n… and {count_text(len(names) - _NAMES_LISTED)} more" if len(names) > _NAMES_LISTED else ""
    st.markdown(f"**{label}** ({count_text(len(names))})")
    st.code(listed + more, language=None, wrap_lines=True)


def _moved(shown: Subject, first: int, second: int) -> Moved | None:
    """Measure the movement of the weights; ask first where much must be read."""
    cost = services.diff_cost(shown)
    asked = f"diff.asked.{shown.path}"
    if cost > ASK_ABOVE_BYTES and not st.session_state.get(asked):
        if st.button(f"Measure movement ({bytes_text(cost)} are read)", icon=":material/play_arrow:"):
            st.session_state[asked] = True
            st.rerun()
        return None
    try:
        with st.spinner("Comparing both steps…"):
            return services.moved_between(shown, first, second)
    except ServiceError as error:
        problem.show(error.problem)
        return None


def _steps_table(found: Changes, moved: Moved | None, steps: tuple[int, int], label: str) -> None:
    """List every tensor, the largest change first."""
    rows = {row.name: row for row in moved.rows} if moved is not None else {}
    frame = pd.DataFrame(
        {
            "Tensor": found.names,
            "Layer type": found.layers,
            f"{label} at {count_text(steps[0])}": found.first,
            f"{label} at {count_text(steps[1])}": found.second,
            "Times": found.second / found.first if len(found.names) else [],
        }
    )
    if moved is not None:
        known = [rows.get(name) for name in found.names]
        frame.insert(2, "Shape", [shape_text(row.shape) if row else "" for row in known])
        frame["Moved"] = [row.relative if row else None for row in known]
        frame["Cosine"] = [row.cosine if row else None for row in known]
        frame["Changed"] = [100 * row.changed if row else None for row in known]
    number = st.column_config.NumberColumn
    st.dataframe(
        frame,
        hide_index=True,
        height="content" if len(frame) <= 15 else 560,
        alt=f"Tensors by their change from step {steps[0]} to step {steps[1]}",
        column_config={
            frame.columns[3 if moved is not None else 2]: number(format="%.2e"),
            frame.columns[4 if moved is not None else 3]: number(format="%.2e"),
            "Times": number(format="%.3f"),
            "Moved": number(format="%.4f", help="Norm of the difference over the norm at the first step"),
            "Cosine": number(format="%.4f", help="Between the values at both steps"),
            "Changed": number(format="%.1f %%", help="Share of values of which any bit changed"),
        },
    )
    download.table_buttons(frame, f"difference-{steps[0]}-{steps[1]}")


def two_runs(shown: Subject, tables: Mapping[str, Sensitivity], metric: str, statistic: str) -> None:
    """Lay a second run over this one: the same metric, tensors matched by name.

    Parameters
    ----------
    shown
        The run or archive on screen.
    tables
        A metric of it by grouping.
    metric, statistic
        What is compared.
    """
    other = _other(shown)
    if other is None:
        return
    second = measurement.measured(other, metric, key=".other")
    if second is None:
        return
    mine, theirs = tables["tensor"], second["tensor"]
    found = between_runs(mine, theirs, statistic)
    if not found.names:
        st.info("The two runs have no tensor of the same name.", icon=":material/info:")
    names = (_short(shown), _short(other))
    with st.container(border=True):
        if found.steps:
            _drawn(
                found,
                f"to {names[0]}",
                f"{METRICS[metric].label} of the second run, as a multiple of the first",
            )
        elif found.names:
            st.caption(
                "The two runs have no step in common; their courses can still be laid over each other."
            )
        _only(found.only_first, f"Only in {markdown_text(names[0])}")
        _only(found.only_second, f"Only in {markdown_text(names[1])}")
    if found.names:
        _overlaid(found, (mine, theirs), names, metric, statistic)
    path = str(other.path)
    told = "update" if METRICS[metric].pooled else metric
    snippets.show(
        f"inshrink sensitivity {shlex.quote(path)} --metric {told} --by tensor --statistic {statistic}",
        "import inshrink_core\n\n"
        f"mine, other = (inshrink_core.sensitivity(inshrink_core.open(path), {told!r}).by('tensor')\n"
        f"               for path in ({str(shown.path)!r}, {path!r}))\n"
        "for name in set(mine.rows) & set(other.rows):\n"
        f"    print(name, mine.{statistic}[mine.rows.index(name), -1], "
        f"other.{statistic}[other.rows.index(name), -1])",
    )


def _other(shown: Subject) -> Subject | None:
    """Let the reader choose the second run, from recent ones, neighbours and samples."""
    options = [str(path) for path in services.other_runs(shown)]
    if not options:
        with st.container(border=True):
            st.subheader("There is no second run", anchor=False)
            st.write("Runs that were opened lately, and those in the same folder, can be laid over this one.")
        return None
    widget = f"runs.{_OTHER}"
    if st.session_state.get(widget) not in options:
        linked = state.choice(_OTHER, options, options[0])
        st.session_state[widget] = linked
    chosen = st.selectbox(
        "Second run", options, key=widget, format_func=lambda path: elide(path, 90), width=700
    )
    state.publish(**{_OTHER: chosen})
    try:
        with st.spinner("Reading headers…"):
            return services.load_subject(chosen)
    except ServiceError as error:
        problem.show(error.problem)
        return None


def _short(subject: Subject) -> str:
    return elide(subject.name, 30)


def _overlaid(
    found: Changes,
    tables: tuple[Sensitivity, Sensitivity],
    names: tuple[str, str],
    metric: str,
    statistic: str,
) -> None:
    """Draw one tensor's course in both runs, and list all tensors."""
    tensor = st.selectbox("Tensor", found.names, key="runs.tensor", width=420)
    lines = []
    for table, name in zip(tables, names, strict=True):
        place = [row.name for row in table.rows].index(tensor)
        lines.append(change_figures.Line(name, table.steps, table.values[statistic][place]))
    st.plotly_chart(
        change_figures.overlay_figure(lines, METRICS[metric].symbol, log=METRICS[metric].scale == "log"),
        config=dict(figures.CONFIG),
        key="runs.course",
        alt=f"{METRICS[metric].label} of one tensor in both runs, over the steps",
    )
    frame = pd.DataFrame(
        {
            "Tensor": found.names,
            "Layer type": found.layers,
            "First run": found.first,
            "Second run": found.second,
            "Times": found.second / found.first,
        }
    )
    number = st.column_config.NumberColumn
    st.dataframe(
        frame,
        hide_index=True,
        height="content" if len(frame) <= 15 else 560,
        alt="Tensors by how much they differ between both runs at the last common step",
        column_config={
            "First run": number(format="%.2e"),
            "Second run": number(format="%.2e"),
            "Times": number(format="%.3f"),
        },
    )
    download.table_buttons(frame, "two-runs")
