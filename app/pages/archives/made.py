"""Writing of an archive or a file: its target, its progress, its figures, and the code that loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, shell_text
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services import ExportRequest, Made
from inshrink_app.widgets import fmt, job_card, listing, problem, quality
from inshrink_app.widgets.layout import Fact, answer, facts

from inshrink_core.verbs.restore import Restore

_MAX_NAMED = 10


def job_of(shown: Subject, topic: str) -> Job | None:
    """Return the writing job of a topic that the link names, else the newest."""
    linked = services.linked_job(state.choice_text("job"), "archives", shown.path)
    if linked is not None and linked.work.topic == topic:
        return linked
    return services.newest_job("archives", topic, shown.path)


def start_button(
    label: str, shown: Subject, source: Subject, request: ExportRequest, *, disabled: bool, trusted: str = ""
) -> str:
    """Draw the target of an export and the button that writes it; return the target as typed.

    Parameters
    ----------
    label
        Text of the button.
    shown, source
        The run or archive on screen, and the one that is exported.
    request
        The export.
    disabled
        Whether it cannot be written now.
    trusted
        SHA-256 of its evaluator, if that needs consent.
    """
    suggestion = services.suggested_name(source, request)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        typed = st.text_input("Write to", value=suggestion, key=f"export.target.{suggestion}")
        if request.file is not None and Path(typed).is_file() and st.checkbox("Replace this file"):
            request = replace(request, file=replace(request.file, force=True))
        pressed = st.button(label, type="primary", icon=":material/archive:", disabled=disabled)
    if pressed and (target := answer(lambda: services.export_target(typed, request))) is not None:
        state.publish(job=services.start_export(shown, request, target, trusted=trusted).job_id)
        st.rerun()
    return typed


def show(shown: Subject, job: Job | None) -> None:
    """Draw the latest writing job: its progress, its error, or its result."""
    if job is None or not job_card.settled(job):
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
        if target.is_file():
            listing.download(target)
        elif st.button("Compare with the run", icon=":material/compare_arrows:"):
            state.go_to("archives", panel="compare", **{state.ARCHIVE: str(target)})
    facts(_figures(made))
    problem.show_unreadable(made.unreadable, "They are not in the archive: do not delete their files.")
    if left_out := made.reports[-1].get("left_out", ()):
        more = f" and {len(left_out) - _MAX_NAMED} more" if len(left_out) > _MAX_NAMED else ""
        st.caption(fmt.markdown(f"Left out: {', '.join(left_out[:_MAX_NAMED])}{more}."))
    if made.loading:
        _code("Load it into a model" + ("" if made.chain else ", without Inshrink"), made.loading)
    if made.chain is not None:
        steps = None if made.request.kind == "step" else (made.chain.steps[-1],)
        layout = "safetensors" if made.loading else "same"
        _code("Restore it", shell_text([Restore(str(target), "restored/", steps=steps, layout=layout)]))
    _code(f"SHA-256 of the {'file' if target.is_file() else 'manifest'}", made.digest)


def _code(caption: str, text: str) -> None:
    st.caption(caption)
    st.code(text, language=None, wrap_lines=True)


def _figures(made: Made) -> list[Fact]:
    """Return the figures of the written file; all of them are measured."""
    is_copy, error = made.request.kind == "pack", made.relative_error
    about = "against the archive it copies" if is_copy else "of the weights, root mean square"
    relative: Fact = ("Relative error", "none" if error == 0 else fmt.percent(error), about)
    chain, first, last = made.chain, made.reports[0], made.reports[-1]
    if chain is None:
        size = ("Size", fmt.size(last["bytes"]), "plain safetensors")
        return [size, ("Tensors", fmt.count(last["tensors"]), "weights and buffers"), relative]
    steps: Fact = ("Steps", fmt.count(len(chain.steps)), fmt.steps(chain.steps))
    figures = quality.size_facts(chain, first.get("device", ""))
    return [*figures, steps, *quality.archive_facts(chain), relative]
