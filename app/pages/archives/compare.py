"""Comparison of archives with their run, by step and metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs import Job, subjects_of
from inshrink_app.model import Subject, when
from inshrink_app.pages.archives import figures
from inshrink_app.pages.archives.table import Measured
from inshrink_app.services import Bound, EvaluatorCode
from inshrink_app.widgets import choices, ending, fmt, job_card, listing, problem, quality
from inshrink_app.widgets.choices import one_of_few, pick_several
from inshrink_app.widgets.layout import chart

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.compare import CompareArchives
from inshrink_core.verbs.shared.measured import Known

_WHICH = {"some": "A few steps", "all": "All steps", "chosen": "These steps"}
_STEPS, _METRICS = "compare.steps", "compare.metrics"
_MOST_METRICS = 4
_HEADINGS = {"restore_cost": "restore cost"} | {
    f"stale_{name}": f"{name.replace('_', ' ')} of the previous checkpoint"
    for name in ("drop", "divergence", "restore_cost")
}


def archives_of(job: Job) -> set[str]:
    """Return the paths of the archives that a job compares."""
    return {path for request in job.requests for path in subjects_of(request)}


def show(
    original: Subject, archives: Sequence[ChainReport], measured: Measured, colours: Mapping[str, str]
) -> None:
    """Draw the button that starts a comparison, its progress, and all known results."""
    bound = services.chosen(original).bound
    job = services.newest_job("archives", "compare", original.path)
    if job is not None and not {str(chain.path) for chain in archives} & archives_of(job):
        job = None
    requests = _ask(original, archives, measured, is_running=job is not None and job.is_running)
    known = [found for chain in archives for found in measured.get(chain.path, {}).values()]
    if job is not None and job.is_running:
        _live(job, bound, colours)
    else:
        if job is not None and job.state != "finished":
            job_card.stopped(job, primary=False)
        if known:
            _found(known, {str(chain.path): chain.nbytes for chain in archives}, bound, colours)
        else:
            st.caption("Nothing was measured yet. Comparing restores each step and evaluates it.")
    ending.requests(requests)


def _ask(
    original: Subject, archives: Sequence[ChainReport], measured: Measured, *, is_running: bool
) -> list[CompareArchives]:
    """Draw the options and the button; return the requests."""
    judge, trusted = services.named_judge(original)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        button = st.container(width="content")
        steps = _steps(original, archives)
        metrics = _metrics(original, measured, judge)
        device = choices.device("compare")
    problem.show_unreadable(original.unreadable, "They are not compared.")
    again = all(_is_known(chain, measured.get(chain.path, {}), steps, metrics) for chain in archives)
    tip = f"Restores and evaluates {fmt.counted(len(steps), 'step')} of each archive."
    if not trusted:
        tip = f"{'Choose an' if judge is None else 'Trust the'} evaluator in the header first."
        st.caption(tip)
    requests = services.comparisons(original, archives, steps, judge, metrics, device=device, again=again)
    label, look = ("Measure again", "secondary") if again else ("Compare", "primary")
    pressed = button.button(
        label,
        type=look,  # type: ignore[arg-type]
        icon=":material/compare_arrows:",
        disabled=not trusted or not steps or is_running,
        help=tip,
    )
    if pressed and judge is not None:
        services.start_compare(original, archives, requests, judge)
        st.rerun()
    return requests


def _metrics(original: Subject, measured: Measured, judge: EvaluatorCode | None) -> list[str]:
    """Draw the choice of metrics; return an empty list for the evaluator's default. A name may be typed."""
    known = [judge.metric if judge is not None else "", *services.metrics_told(original)]
    known += [name for by_metric in measured.values() for name in by_metric]
    picked: list[str] = pick_several(
        "Metrics",
        list(dict.fromkeys(filter(None, [*known, *st.session_state.get(_METRICS, ())]))),
        key=_METRICS,
        max_selections=_MOST_METRICS,
        placeholder="The evaluator's default",
        help="Several are measured one after the other and shown side by side. Type the name of another one.",
        accept_new_options=True,
        width=320,
    )
    return picked


def _is_known(
    chain: ChainReport, known: Mapping[str, Known], steps: Sequence[int], metrics: Sequence[str]
) -> bool:
    """Return whether the present archive was measured at the given steps and metrics."""
    wanted = set(steps) & set(chain.steps)
    found = [known.get(name) for name in metrics or known]
    return bool(found) and all(
        row is not None and row.is_current and wanted <= {step.step for step in row.comparison.steps}
        for row in found
    )


def _steps(original: Subject, archives: Sequence[ChainReport]) -> tuple[int, ...]:
    """Draw the choice of steps and return it."""
    common = [step for step in original.steps if any(step in chain.steps for chain in archives)]
    spread = services.spread_of(common)
    which = one_of_few("compare", "Steps", "which", _WHICH, "some" if len(spread) < len(common) else "all")
    if which == "chosen":
        picked = st.session_state.get(_STEPS, common[-1:])
        st.session_state[_STEPS] = [step for step in picked if step in common]
        return tuple(sorted(pick_several("Which steps", common, key=_STEPS, width=260)))
    return spread if which == "some" else tuple(common)


@st.fragment(run_every=job_card.POLL_SECONDS)
def _live(job: Job, bound: Bound, colours: Mapping[str, str]) -> None:
    """Draw a running comparison, each step as it arrives."""
    now = job_card.current(job)
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.progress(now)
        job_card.cancel_button(now)
    if found := services.compared(now):
        _charts(found, {}, bound, colours)


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
    if newest.worst is not None and newest.granularity is not None:
        parts.append(f"One sample is {fmt.percent(newest.granularity)} of {newest.comparison.metric}.")
    parts.append("Grey, dashed: the previous checkpoint in place of each step, which stores nothing.")
    as_good = sum(
        row.stale_restore_cost <= row.restore_cost
        for found in known
        for row in found.comparison.steps
        if row.restore_cost is not None and row.stale_restore_cost is not None
    )
    if as_good:
        parts.append(f"At {fmt.counted(as_good, 'step')} it costs no more; those steps prove little.")
    return fmt.markdown(" ".join(parts))


def _charts(
    known: Sequence[Known], sizes: Mapping[str, int], bound: Bound, colours: Mapping[str, str]
) -> None:
    """Draw the bounded figure, size against it, each metric, and the divergence, in rows of two."""
    first = {found.archive: found for found in reversed(known)}  # Costs are equal for all metrics.
    each = [first[path] for path in dict.fromkeys(found.archive for found in known)]
    rows = [row for found in each for row in found.comparison.steps]
    drawn: dict[str, tuple[Callable[[], go.Figure], str]] = {}

    def add(name: str, of: Sequence[Known], key: str, alt: str) -> None:
        drawn[key] = partial(figures.cost_figure, of, name, colours, bound), alt

    if any(row.restore_cost is not None for row in rows):
        add("restore_cost", each, "cost", "Restore cost")
    if len(sizes) > 1:
        kind = "restore_cost" if bound.kind == "none" else bound.kind
        drawn["sizes"] = partial(figures.size_figure, each, sizes, colours, kind, bound), "Cost against size"
    for metric in list(dict.fromkeys(found.comparison.metric for found in known))[:_MOST_METRICS]:
        of = [found for found in known if found.comparison.metric == metric]
        drawn[f"metric.{metric}"] = partial(figures.metric_figure, of, colours), f"{metric}, restored"
        if bound.kind == "drop":
            add("drop", of, f"drop.{metric}", f"Drop of {metric}")
    if any(row.divergence for row in rows):
        add("divergence", each, "divergence", "Divergence")
    names = ", ".join(fmt.html(found.name) for found in each)
    for place, (name, (draw, alt)) in enumerate(drawn.items()):
        if place % 2 == 0:
            columns = st.columns(2, gap="medium")
        with columns[place % 2]:
            chart(draw(), f"compare.{name}", f"{alt} by step, of {names}")


def _table(known: Sequence[Known], bound: Bound) -> None:
    """List every step of every archive by every metric."""
    rows: list[dict[str, Any]] = []
    for found in known:
        for row in found.comparison.steps:
            fields = {name: getattr(row, name) for name in row.__slots__ if name[:9] != "restore_g"}
            del fields["restore_noise"]
            about = {"archive": found.name, "metric": found.comparison.metric}
            rows.append({**about, **fields, "bound": bound.verdict(bound.of(row))})
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
