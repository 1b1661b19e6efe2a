"""Archives against their run: every step as trained and as restored, by each metric of the evaluator."""

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
_OF_PREVIOUS = {
    "restore_cost": "restore cost",
    **{
        f"stale_{name}": f"{name.replace('_', ' ')} of the previous checkpoint"
        for name in ("drop", "divergence", "restore_cost")
    },
}


def show(
    original: Subject, archives: Sequence[ChainReport], measured: Measured, colours: Mapping[str, str]
) -> None:
    """Draw the button that measures, its progress, and what is known."""
    bound = services.chosen(original).bound
    job = services.newest_job("archives", "compare", original.path)
    if job is not None and not {str(one.path) for one in archives} & set(_about(job)):
        job = None
    request = _ask(original, archives, measured, job)
    known = [one for chain in archives for one in measured.get(chain.path, {}).values()]
    if job is not None and job.is_running:
        _live(job, bound, colours)
    else:
        if job is not None and job.state != "finished":
            job_card.stopped(job, primary=False)
        if known:
            _found(known, {str(one.path): one.nbytes for one in archives}, bound, colours)
        else:
            st.caption("Nothing was measured yet. Comparing restores each step and evaluates it.")
    ending.requests([request])


def _about(job: Job) -> list[str]:
    """Return the archives that a comparison is about."""
    return [path for request in job.requests for path in subjects_of(request)]


def follow_link(original: Subject, job_id: str) -> list[str]:
    """Choose the steps of a job that a link names, once; return its archives."""
    job = services.linked_job(job_id, "archives", original.path)
    if job is None or job.work.topic != "compare" or st.session_state.get("compare.followed") == job.job_id:
        return []
    st.session_state["compare.followed"] = job.job_id
    st.session_state["compare.which"] = "chosen"
    asked = {step for request in job.requests for step in getattr(request, "steps", None) or ()}
    st.session_state[_STEPS] = [step for step in original.steps if step in asked]
    return _about(job)


def _ask(
    original: Subject, archives: Sequence[ChainReport], measured: Measured, job: Job | None
) -> CompareArchives:
    """Draw what is compared, and the button; return the request."""
    judge, trusted = services.named_judge(original)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        button = st.container(width="content")
        steps = _steps(original, archives)
        metrics = _metrics(original, measured, judge)
        device = choices.device("compare") if not services.missing_cuda() else choices.AUTO
    problem.show_unreadable(
        original.unreadable, "They are not compared: keep these files, or fetch whole ones."
    )
    again = all(_is_known(one, measured.get(one.path, {}), steps, metrics) for one in archives)
    n = fmt.counted(len(steps), "step")
    tip = f"Restores and evaluates {n} of {fmt.counted(len(archives), 'archive')}."
    if judge is None:
        tip = "Choose an evaluator in the header first."
    elif not trusted:
        tip = "Trust the evaluator in the header first."
    with button:
        if (
            st.button(
                "Measure again" if again else "Compare",
                type="secondary" if again else "primary",
                icon=":material/compare_arrows:",
                disabled=not trusted or not steps or (job is not None and job.is_running),
                help=tip,
            )
            and judge is not None
        ):
            more = {"again": True} if again else {}
            services.start_compare(original, archives, steps, judge, metrics, device=device, **more)
            st.rerun()
    if not trusted:
        st.caption(tip)
    return services.comparison(original, [one.path for one in archives], steps, judge, device=device)


def _metrics(original: Subject, measured: Measured, judge: EvaluatorCode | None) -> list[str]:
    """Draw by which metrics is compared; none is the evaluator's default. A name may be typed."""
    known = [judge.metric if judge is not None else "", *services.metrics_told(original)]
    known += [name for one in measured.values() for name in one]
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
    """Whether an archive as it is was measured at some steps, by some metrics."""
    wanted = set(steps) & set(chain.steps)
    found = [known.get(name) for name in metrics or known]
    return bool(found) and all(
        one is not None and one.is_current and wanted <= {row.step for row in one.comparison.steps}
        for one in found
    )


def _steps(original: Subject, archives: Sequence[ChainReport]) -> tuple[int, ...]:
    """Draw which steps are compared, and return them."""
    common = [step for step in original.steps if any(step in one.steps for one in archives)]
    spread = services.spread_of(common)
    which = one_of_few("compare", "Steps", "which", _WHICH, "some" if len(spread) < len(common) else "all")
    if which == "chosen":
        kept = st.session_state.get(_STEPS, common[-1:])
        st.session_state[_STEPS] = [step for step in kept if step in common]
        return tuple(sorted(pick_several("Which steps", common, key=_STEPS, width=260)))
    return spread if which == "some" else tuple(common)


@st.fragment(run_every=job_card.POLL_SECONDS)
def _live(job: Job, bound: Bound, colours: Mapping[str, str]) -> None:
    """Draw a comparison while it runs, each step as it arrives."""
    now = job_card.current(job)
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.progress(now)
        job_card.cancel_button(now)
    if found := services.compared(now):
        _charts(found, {}, bound, colours)


def _found(
    known: Sequence[Known], sizes: Mapping[str, int], bound: Bound, colours: Mapping[str, str]
) -> None:
    """Draw what is known: charts over steps, size against cost, and a line for every step."""
    if old := sorted({one.name for one in known if not one.is_current}):
        st.warning(
            fmt.markdown(f"{', '.join(old)}: measured before its last change. Measure it again."),
            icon=":material/history:",
        )
    _charts(known, sizes, bound, colours)
    st.caption(_basis(known))
    with st.expander("Every step", icon=":material/table_rows:"):
        _table(known, bound)


def _basis(known: Sequence[Known]) -> str:
    """Return when and where it was measured, and at which steps that proves little."""
    one = max(known, key=lambda one: one.at)
    n = "" if one.n_samples is None else f" on {fmt.counted(one.n_samples, 'sample')}"
    parts = [f"Measured {when(one.at)}{n}, on {one.comparison.device.upper() or 'CPU'}."]
    if one.worst is not None and one.granularity is not None:
        parts.append(f"One sample is {fmt.percent(one.granularity)} of {one.comparison.metric}.")
    pairs = [
        (row.restore_cost, row.stale_restore_cost)
        for one in known
        for row in one.comparison.steps
        if row.restore_cost is not None and row.stale_restore_cost is not None
    ]
    parts.append("Grey, dashed: the previous checkpoint in place of each step, which stores nothing.")
    if as_good := sum(stale <= cost for cost, stale in pairs):
        parts.append(f"At {fmt.counted(as_good, 'step')} it costs no more; those steps prove little.")
    return fmt.markdown(" ".join(parts))


def _charts(
    known: Sequence[Known], sizes: Mapping[str, int], bound: Bound, colours: Mapping[str, str]
) -> None:
    """Draw the bounded figure, size against it, each metric, and the divergence: two in a row."""
    first = {one.archive: one for one in reversed(known)}  # Cost and divergence are equal for all metrics.
    each = [first[path] for path in dict.fromkeys(one.archive for one in known)]
    rows = [row for one in each for row in one.comparison.steps]
    drawn: dict[str, tuple[Callable[[], go.Figure], str]] = {}
    if any(row.restore_cost is not None for row in rows):
        cost = bound.value if bound.kind == "restore_cost" else None
        drawn["cost"] = partial(figures.share_figure, each, "restore_cost", colours, cost), "Restore cost"
    if len(sizes) > 1:
        kind = "restore_cost" if bound.kind == "none" else bound.kind
        drawn["sizes"] = partial(figures.size_figure, each, sizes, colours, kind, bound), "Cost against size"
    metrics = list(dict.fromkeys(one.comparison.metric for one in known))[:_MOST_METRICS]
    for metric in metrics:
        of = [one for one in known if one.comparison.metric == metric]
        drawn[f"metric.{metric}"] = partial(figures.metric_figure, of, colours), f"{metric}, restored"
        if bound.kind == "drop":
            drop = partial(figures.share_figure, of, "drop", colours, bound.value)
            drawn[f"drop.{metric}"] = drop, f"Drop of {metric}"
    if any(row.divergence for row in rows):
        limit = bound.value if bound.kind == "divergence" else None
        drawn["divergence"] = partial(figures.divergence_figure, each, colours, limit), "Divergence"
    names = ", ".join(fmt.html(one.name) for one in each)
    for place, (name, (draw, alt)) in enumerate(drawn.items()):
        if place % 2 == 0:
            columns = st.columns(2, gap="medium")
        with columns[place % 2]:
            chart(draw(), f"compare.{name}", f"{alt} by step, of {names}")


def _table(known: Sequence[Known], bound: Bound) -> None:
    """List every step of every archive, by every metric."""
    rows: list[dict[str, Any]] = []
    for one in known:
        for row in one.comparison.steps:
            judged = bound.of(row)
            word = None if judged is None else "kept" if bound.is_kept(judged) else "broken"
            fields = {name: getattr(row, name) for name in row.__slots__ if name[:9] != "restore_g"}
            del fields["restore_noise"]
            rows.append({"archive": one.name, "metric": one.comparison.metric, **fields, "bound": word})
    table = pd.DataFrame(rows).rename(columns=_OF_PREVIOUS)
    metric = fmt.fixed_format([*table["original"], *table["restored"]])
    small = dict.fromkeys((name for name in table if str(name).startswith("divergence")), listing.SMALL)
    listing.show(
        table,
        "compare",
        alt="Original and restored metric, drop, divergence and restore cost of every step",
        formats={"original": metric, "restored": metric, **small},
        hidden=[name for name in ("archive", "metric") if table[name].nunique() < 2],
        helps=dict.fromkeys(small, quality.NATS),
    )
