"""Archives: the archives of a run as one table, and below it what is done with those that are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Page, ServiceError, Subject, config_words
from inshrink_app.pages.archives import (
    average,
    chain_figure,
    compare,
    pack,
    rehearsals,
    tensors,
    upkeep,
    write,
)
from inshrink_app.pages.archives import table as archive_table
from inshrink_app.pages.archives.table import Measured
from inshrink_app.widgets import choices, fmt, listing, problem, quality, subject, tables
from inshrink_app.widgets.figures import log_figure, log_groups
from inshrink_app.widgets.layout import Fact, answer, chart, facts, section
from inshrink_app.widgets.report import Part, report

from inshrink_core.chain import ChainReport

PANELS = {
    "compare": "Compare",
    "tensors": "Tensors",
    "restore": "Restore",
    "verify": "Verify",
    "pack": "Pack",
    "prune": "Prune",
    "frames": "Frames",
    "write": "New archive",
    "average": "Average",
    "rehearse": "Rehearse",
}
_FORMER = {"archive": "frames", "export": "write"}
"""Panels by the addresses that they had as pages."""

_OF_RUNS = ("pack", "write", "average", "rehearse")
"""Panels that need no archive."""

_ID_WIDTH = 12
_MOST_LISTED = 5
_MOST_PANELS = 12
"""Of training metrics in a report."""

_COLUMNS = {name: name.replace("_", " ") for name in ("step", "kind", "branch", "parent_step")}
_COLUMNS |= {"restored_step": "restored from", "nbytes": "bytes", "ratio_total": "ratio total"}
_COLUMNS |= {"ratio_weights": "ratio weights", "codec": "codec", "frame_id": "frame id"}
_COLUMNS |= {"digest": "SHA-256", "damage": "damage"}
"""Fields of a frame, and what the table calls them."""


def render() -> None:
    """Draw the page."""
    shown = subject.require("Archives", _rescue)
    if shown is None:
        return
    original = _original(shown)
    archives = services.archives_of(shown)
    measured = {one.path: services.known_by_metric(one) for one in archives}
    colours = archive_table.colours_of(archives)
    linked = compare.follow_link(original or shown, state.choice_text("job"))
    there = {str(one.path) for one in archives}
    if found := [path for path in linked if path in there]:
        archive_table.choose_only(found)
    chosen: tuple[ChainReport, ...] = ()
    if archives:
        bound = services.chosen(shown).bound
        chosen = archive_table.choose(archives, measured, colours, bound)
        _below_table(archives, measured, chosen[0], original or shown)
    else:
        _none_yet()
    offered = [name for name in PANELS if chosen or name in _OF_RUNS]
    if shown.kind == "archive":
        offered.remove("write")
    if asked := state.asked("panel"):
        st.session_state["archives.panel"] = asked
    former = state.choice_text("panel")
    if former in _FORMER:
        state.remember(panel=_FORMER[former])
    labels = {name: PANELS[name] for name in offered}
    first = "compare" if chosen else offered[0]
    panel = choices.one_of_few("archives", "Panel", "panel", labels, first, label_visibility="collapsed")
    with st.container(border=True):
        _panel(panel, shown, original, chosen, measured, colours)


def _panel(
    panel: str,
    shown: Subject,
    original: Subject | None,
    chosen: Sequence[ChainReport],
    measured: Measured,
    colours: dict[str, str],
) -> None:
    """Draw one panel; most are about the first of the archives that are chosen."""
    if len(chosen) > 1 and panel not in ("compare", *_OF_RUNS[1:]):
        st.caption(fmt.markdown(f"Of {chosen[0].name}, the first that is ticked."))
    if panel in ("compare", "tensors") and original is None:
        _ask_for_original()
    elif panel == "compare" and original is not None:
        compare.show(original, chosen, measured, colours)
    elif panel == "tensors" and original is not None:
        tensors.errors(original, chosen[0])
    elif panel == "restore":
        tensors.restore(shown, chosen[0])
    elif panel == "verify":
        upkeep.verify(chosen[0])
    elif panel == "prune":
        upkeep.prune(chosen[0])
    elif panel == "frames":
        _frames(chosen[0])
    elif panel == "pack":
        pack.show(shown, chosen[0] if chosen else None)
    elif panel == "write":
        write.show(shown)
    elif panel == "average":
        average.show(shown)
    else:
        rehearsals.rehearse(original or shown)


def _none_yet() -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("**This run has no archive yet.**", width="content")
        st.caption(
            "Archives beside the run, and in the folders that the explorer may see, appear here.",
            width="content",
        )


def _below_table(
    archives: Sequence[ChainReport], measured: Measured, chain: ChainReport, run: Subject
) -> None:
    """Offer the table, and a report of the first archive that is chosen."""

    def made() -> bytes:
        return report(chain.name, report_parts(chain, run))

    bound = services.chosen(run).bound
    listing.table_buttons(
        lambda: archive_table.rows(archives, measured, bound),
        "archives",
        ("Download report", "report.html", made),
    )


def _original(shown: Subject) -> Subject | None:
    """Return the run to compare with: what is on screen, what was typed, or what was found."""
    typed = state.choice_text("original") if shown.kind == "archive" else ""
    if typed:
        try:
            given = services.load_subject(typed)
        except ServiceError as error:
            problem.show(error.problem)
        else:
            if given.kind == "run" and set(given.steps) & set(shown.steps):
                return given
            st.warning("This is no run with steps of this archive.", icon=":material/warning:")
    return services.original_of(shown)


def _ask_for_original() -> None:
    """Ask for the run that the archive was made from."""
    st.write("Comparing needs the original checkpoints. No run with the steps of this archive was found.")
    with st.form("original", border=False):
        typed = st.text_input("Path of the original run", placeholder="runs/my-training")
        if st.form_submit_button("Use this run", type="primary") and typed.strip():
            state.publish(original=typed.strip())
            st.rerun()


def _rescue(path: str) -> bool:
    """Draw what is left of an archive with damaged or missing frames; return whether there is something."""
    try:
        chain = services.chain_of(path)
    except ServiceError:
        return False
    if not chain.frames:
        return False
    with section("Frames"):
        _frames(chain)
    with section("Verify"):
        upkeep.verify(chain)
    with section("Prune"):
        upkeep.prune(chain)
    return True


def _frames(found: ChainReport) -> None:
    """Draw the chain of an archive: figures, settings, warnings, the graph and every frame."""
    chain = answer(lambda: services.chain_of(str(found.path)))
    if chain is None:
        return
    facts(_facts(chain))
    for line in _settings(chain):
        st.caption(fmt.markdown(line))
    _warnings(chain)
    chart(
        chain_figure.chain_figure(chain.frames),
        "chain",
        f"Chain of {len(chain.frames)} frames, {chain.n_keyframes} of them keyframes, on "
        f"{chain.n_branches} branches",
    )
    st.caption(_legend(chain))
    with st.expander(f"Frames ({fmt.count(len(chain.frames))})", icon=":material/table_rows:"):
        table = _frame_table(chain)
        listing.show(
            table,
            "frames",
            alt="Frames with step, kind, branch, parent, size, ratio, codec and digest",
            hidden=[] if table["damage"].any() else ["damage"],
        )


def _facts(chain: ChainReport) -> list[Fact]:
    """Return the figures that every reader wants first."""
    tip = "A branch begins where training was restored and took another course."
    branches: list[Fact] = [("Branches", fmt.count(chain.n_branches), "of the training", tip)]
    tip = "Steps on the newest branch."
    return [
        ("Frames", fmt.count(len(chain.frames)), fmt.counted(chain.n_keyframes, "keyframe")),
        ("Steps", fmt.count(len(chain.steps)), fmt.steps(chain.steps), tip),
        *(branches if chain.n_branches > 1 else ()),
        *quality.size_facts(chain),
        *quality.archive_facts(chain),
    ]


def _settings(chain: ChainReport) -> list[str]:
    """Return lines that say how the archive is encoded. Untrusted text."""
    optimizer = "left out" if chain.optimizer == "drop" else chain.optimizer
    parts = [f"Codec {chain.codec}; optimizer state {optimizer}"]
    parts += [f"first frame relative to the base model {chain.base}"] if chain.base else []
    settings = ", ".join(f"{name}={value}" for name, value in chain.config.items())
    last = "" if chain.is_uniform else "settings differ by step; the last: "
    parts += [f"{last}{settings}"] if settings else []
    lines = [" · ".join(parts)]
    if chain.overrides:
        words = config_words({"override": chain.overrides})
        lines.append(f"{fmt.counted(len(chain.overrides), 'override')}: {words}")
    return lines


def _warnings(chain: ChainReport) -> None:
    """Say which frames are gone or cannot be read, and which checksums the original files had."""
    if "DAMAGED" in chain.originals:
        st.warning(fmt.markdown(f"Originals: {chain.originals}"), icon=":material/warning:")
    elif chain.originals:
        st.caption(fmt.markdown(f"Checksums of the originals: {chain.originals}."))
    if chain.missing:
        st.error(
            f"{_missing(chain)} Fetch the files from where the archive came from.", icon=":material/error:"
        )
    damaged = [frame for frame in chain.frames if frame.damage]
    if damaged:
        with st.container(border=True):
            st.error(f"Not readable: {fmt.counted(len(damaged), 'frame')}.", icon=":material/error:")
            listed = [f"step {frame.step}: {frame.damage}" for frame in damaged[:_MOST_LISTED]]
            if len(damaged) > _MOST_LISTED:
                listed.append(f"… and {fmt.count(len(damaged) - _MOST_LISTED)} more, in the table below")
            st.code("\n".join(listed), language=None, wrap_lines=True)


def _missing(chain: ChainReport) -> str:
    return f"{fmt.counted(len(chain.missing), 'frame')} missing, of {fmt.steps(chain.missing)}."


def _legend(chain: ChainReport) -> str:
    """Return what the signs in the picture of the chain mean."""
    n_steps = len({frame.step for frame in chain.frames})
    parts = ["A larger mark is a larger frame. A delta frame stores the changes since the frame before it."]
    if any(frame.restored_step is not None for frame in chain.frames):
        parts.append("Arrows: training was restored there.")
    if any(not frame.on_line for frame in chain.frames):
        parts.append("Hollow: a branch that was abandoned.")
    if n_steps > chain_figure.MAX_COLUMNS:
        parts.append(f"The newest {chain_figure.MAX_COLUMNS} of {fmt.count(n_steps)} steps are drawn.")
    return " ".join(parts)


def _frame_table(chain: ChainReport) -> pd.DataFrame:
    table = pd.DataFrame(chain.frames)[[*_COLUMNS]].rename(columns=_COLUMNS)
    for name in ("frame id", "SHA-256"):
        table[name] = table[name].str[:_ID_WIDTH]
    for name in ("parent step", "restored from"):
        table[name] = table[name].astype("Int64")
    return table


def report_parts(chain: ChainReport, run: Subject) -> Iterator[Part]:
    """Yield the parts of a report of an archive and its run, in order."""
    figures = pd.DataFrame([fact[:3] for fact in _facts(chain)], columns=["figure", "value", "about"])
    notes = [f"Checksums of the originals: {chain.originals}."] if chain.originals else []
    notes += [_missing(chain)] if chain.missing else []
    yield Part("Figures", figures, (*_settings(chain), *notes))
    yield Part("Chain", chain_figure.chain_figure(chain.frames), (_legend(chain),))
    if run.log:
        groups = log_groups(run.log)
        names, hidden = list(groups)[:_MOST_PANELS], list(groups)[_MOST_PANELS:]
        notes = [f"Not drawn: {', '.join(hidden)}."] if hidden else []
        yield Part("Training", log_figure(run.log, {name: groups[name] for name in names}), tuple(notes))
    step = fmt.count(run.steps[-1])
    for title, sizes in tables.sizes(run).items():
        shares = sizes.assign(share=sizes["share"].map(fmt.share))
        yield Part(title, shares, (f"Uncompressed, in the checkpoint of step {step}.",))
    frames = _frame_table(chain)
    yield Part("Frames", frames if frames["damage"].any() else frames.drop(columns="damage"))
    yield Part(f"Tensors of step {step}", tables.tensors(run.tensors))


PAGE = Page("Archives", ":material/inventory_2:", render, former=("archive", "compare", "export"))
