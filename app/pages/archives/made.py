"""A written archive or file: its figures, the code that loads it, and its download."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, shell_text
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services import Made
from inshrink_app.widgets import fmt, job_card, listing, problem, quality
from inshrink_app.widgets.layout import Fact, facts

from inshrink_core.verbs.restore import Restore

_MOST_NAMED = 10


def job_of(shown: Subject, topic: str) -> Job | None:
    """Return the writing job of a topic that the link names, else the newest."""
    linked = services.linked_job(state.choice_text("job"), "archives", shown.path)
    if linked is not None and linked.work.topic == topic:
        return linked
    return services.newest_job("archives", topic, shown.path)


def show(shown: Subject, job: Job | None) -> None:
    """Draw the latest writing job: its progress, its error, or its result."""
    if job is None or not job_card.settled(job, ""):
        return
    target = services.export_made_at(job)
    st.code(str(target), language=None, wrap_lines=True)
    try:
        made = services.made_by(job)
    except ServiceError as error:
        problem.show(error.problem)
        listing.download(target)
        return
    if made is None:
        st.warning("The file was moved or deleted.", icon=":material/warning:")
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        if made.path.is_file():
            listing.download(made.path)
        elif st.button("Copy as one packed file", icon=":material/folder_zip:"):
            state.publish(job=services.start_pack(shown, made.path).job_id)
            st.rerun()
        elif st.button("Compare with the run", icon=":material/compare_arrows:"):
            state.go_to("archives", panel="compare", **{state.ARCHIVE: str(made.path)})
    facts(_figures(made))
    problem.show_unreadable(made.unreadable, "They are not in the archive: do not delete their files.")
    if made.left_out:
        more = f" and {len(made.left_out) - _MOST_NAMED} more" if len(made.left_out) > _MOST_NAMED else ""
        st.caption(fmt.markdown(f"Left out: {', '.join(made.left_out[:_MOST_NAMED])}{more}."))
    if made.weights_only:
        _code("Load it into a model" + ("" if made.chain else ", without Inshrink"), made.loading)
    if made.chain is not None:
        steps = (made.chain.steps[-1],) if made.kind != "step" else None
        layout = "safetensors" if made.weights_only else "same"
        _code("Restore it", shell_text([Restore(str(made.path), "restored/", steps=steps, layout=layout)]))
    _code(f"SHA-256 of the {'file' if made.path.is_file() else 'manifest'}", made.digest)


def _code(caption: str, text: str) -> None:
    st.caption(caption)
    st.code(text, language=None, wrap_lines=True)


def _figures(made: Made) -> list[Fact]:
    """Return the figures of the written file; all of them are measured."""
    about = "against the archive it copies" if made.kind == "pack" else "of the weights, root mean square"
    error = "none" if made.relative_error == 0 else fmt.percent(made.relative_error)
    relative: Fact = ("Relative error", error, about)
    if made.chain is None:
        tensors = fmt.count(made.n_tensors or 0)
        size = fmt.size(made.nbytes)
        return [("Size", size, "plain safetensors"), ("Tensors", tensors, "weights and buffers"), relative]
    steps: Fact = ("Steps", fmt.count(len(made.chain.steps)), fmt.steps(made.chain.steps))
    return [
        *quality.size_facts(made.chain, made.device),
        steps,
        *quality.archive_facts(made.chain),
        relative,
    ]
