"""An archive or a file that was written: its figures, how it is loaded, and its download."""

from __future__ import annotations

import streamlit as st
from inshrink_app import services, state
from inshrink_app.jobs import Job, shell_text
from inshrink_app.model import ServiceError, Subject
from inshrink_app.services import Made
from inshrink_app.widgets import archive_picker, fmt, job_card, listing, problem, quality
from inshrink_app.widgets.layout import Fact, facts

from inshrink_core.verbs.restore import Restore

_MOST_NAMED = 10


def show(shown: Subject, job: Job | None) -> None:
    """Draw the writing that runs or ran last: its progress, why it stopped, or what it made."""
    if job is None:
        return
    if job.is_running:
        job_card.running(job)
    elif job.state == "finished":
        _result(shown, job)
    else:
        job_card.stopped(job, primary=False)
        job_card.log(job)


def _result(shown: Subject, job: Job) -> None:
    st.code(str(services.export_made_at(job)), language=None, wrap_lines=True)
    try:
        made = services.made_by(job)
    except ServiceError as error:
        problem.show(error.problem)
        listing.download(services.export_made_at(job))
        return
    if made is None:
        st.warning("It is not there any more.", icon=":material/warning:")
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        if made.path.is_dir():
            if st.button("Copy as one packed file", icon=":material/folder_zip:"):
                state.publish(job=services.start_pack(shown, made.path).job_id)
                st.rerun()
            if made.kind == "chain" and st.button("Compare with the run", icon=":material/compare_arrows:"):
                state.go_to("archives", panel="compare", **{archive_picker.ARCHIVE: str(made.path)})
        else:
            listing.download(made.path)
    facts(_figures(made))
    problem.show_unreadable(made.unreadable, "They are not in it: do not delete their files.")
    if made.left_out:
        named = ", ".join(made.left_out[:_MOST_NAMED])
        more = f" and {len(made.left_out) - _MOST_NAMED} more" if len(made.left_out) > _MOST_NAMED else ""
        st.caption(fmt.markdown(f"Left out: {named}{more}."))
    if made.weights_only:
        st.caption("Load it into a model" + ("" if made.chain else ", without Inshrink"))
        st.code(made.loading, language=None, wrap_lines=True)
    if made.chain is not None:
        st.caption("Restore it")
        steps = (made.chain.steps[-1],) if made.kind != "step" else None
        layout = "safetensors" if made.weights_only else "same"
        restore = Restore(str(made.path), "restored/", steps=steps, layout=layout)
        st.code(shell_text([restore]), language=None, wrap_lines=True)
    st.caption(f"SHA-256 of the {'manifest' if made.path.is_dir() else 'file'}")
    st.code(made.digest, language=None, wrap_lines=True)


def _figures(made: Made) -> list[Fact]:
    """Return the figures of what was written; all of them measured."""
    error = "none" if made.relative_error == 0 else fmt.percent(made.relative_error)
    if made.chain is None:
        return [
            ("Size", fmt.size(made.nbytes), "plain safetensors"),
            ("Tensors", fmt.count(made.n_tensors or 0), "weights and buffers"),
            ("Relative error", error, "of the weights, root mean square"),
        ]
    against = "against the archive it copies" if made.kind == "pack" else "of the weights, root mean square"
    return [
        *quality.size_facts(made.chain, made.device),
        ("Steps", fmt.count(len(made.chain.steps)), fmt.steps(made.chain.steps)),
        *quality.archive_facts(made.chain),
        ("Relative error", error, against),
    ]
