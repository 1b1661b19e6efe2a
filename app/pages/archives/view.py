"""Archives: the table of a run's archives, and the actions on the chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.model import Page, ServiceError, Subject, config_words, known_by_metric
from inshrink_app.pages.archives import compare, pack, tensors, upkeep, write
from inshrink_app.pages.archives import table as archive_table
from inshrink_app.pages.archives.compare import frames_figure
from inshrink_app.widgets import choices, fmt, header, listing, quality
from inshrink_app.widgets.figures import log_figure
from inshrink_app.widgets.layout import Fact, answer, archive_colours, chart, facts, section
from inshrink_app.widgets.report import Part, report

from inshrink_core.chain.report import ChainReport

_PANELS = {
    "compare": "Compare",
    "tensors": "Tensors",
    "restore": "Restore",
    "verify": "Verify",
    "pack": "Pack",
    "prune": "Prune",
    "frames": "Frames",
    "write": "New archive",
}
_OF_ONE = ("tensors", "restore", "verify", "pack", "prune", "frames")
"""Panels that need a single archive."""

_LEGEND = "A keyframe is stored alone; a delta frame stores the changes since the frame before it."
_FOLLOWED = "archives.followed"
_MAX_LISTED = 5
_MAX_PANELS = 12
"""Largest number of training metrics in a report."""

_COLUMNS = {name: name.replace("_", " ") for name in ("step", "kind", "branch", "parent_step")}
_COLUMNS |= {"restored_step": "restored from", "nbytes": "bytes", "ratio_total": "ratio total"}
_COLUMNS |= {"ratio_weights": "ratio weights", "codec": "codec", "frame_id": "frame id"}
_COLUMNS |= {"digest": "SHA-256", "damage": "damage"}
"""Fields of a frame, and their headings in the table."""


def render() -> None:
    """Draw the page."""
    shown = header.require("Archives", _rescue)
    if shown is None:
        return
    original = _original(shown)
    run = original or shown
    archives = services.archives_of(shown)
    measured = {chain.path: known_by_metric(chain) for chain in archives}
    colours = archive_colours(str(run.path), [str(chain.path) for chain in archives])
    job = services.linked_job(state.choice_text("job"), "archives", run.path)
    if job is not None and job.work.topic == "compare" and job.job_id != st.session_state.get(_FOLLOWED):
        st.session_state[_FOLLOWED] = job.job_id
        archive_table.choose_only([str(c.path) for c in archives if str(c.path) in compare.archives_of(job)])
    panels: dict[str, Callable[[], None]] = {}
    first = None
    if archives:
        now = services.chosen(shown)
        chosen = archive_table.choose(archives, measured, colours, now)
        first = chosen[0]
        listing.table_buttons(
            partial(archive_table.rows, archives, measured, now),
            "archives",
            ("Download report", "report.html", lambda: report(first.name, report_parts(first, run))),
        )
        is_there = original is not None
        compared = partial(compare.show, run, chosen, measured, colours)
        panels |= {
            "compare": compared if is_there else _ask_for_original,
            "tensors": partial(tensors.errors, run, first) if is_there else _ask_for_original,
            "restore": partial(tensors.restore, shown, first),
            "verify": partial(upkeep.verify, first),
            "prune": partial(upkeep.prune, first),
            "frames": partial(_frames, first),
        }
    else:
        st.markdown("**This run has no archive yet.**")
        st.caption("Archives beside the run, and in the folders that the explorer may see, appear here.")
    panels["pack"] = partial(pack.show, shown, first)
    if shown.kind == "run":
        panels["write"] = partial(write.new_archive, shown)
    about = f"For {first.name}, the first ticked archive." if first is not None and len(chosen) > 1 else ""
    _draw({name: panels[name] for name in _PANELS if name in panels}, about)


def _draw(panels: Mapping[str, Callable[[], None]], about: str) -> None:
    """Draw the choice of panel, and the panel."""
    labels = {name: _PANELS[name] for name in panels}
    first = next(iter(labels if "compare" in labels else reversed(labels)))  # Without archives, a new one.
    panel = choices.one_of_few("archives", "Panel", "panel", labels, first, label_visibility="collapsed")
    with st.container(border=True):
        if about and panel in _OF_ONE:
            st.caption(fmt.markdown(about))
        panels[panel]()


def _original(shown: Subject) -> Subject | None:
    """Return the original run: the run on screen, a typed one, or one that was found."""
    typed = state.choice_text("original") if shown.kind == "archive" else ""
    if typed and (given := answer(lambda: services.load_whole(typed))) is not None:
        if given.kind == "run" and set(given.steps) & set(shown.steps):
            return given
        st.warning("This is not a run with steps of this archive.", icon=":material/warning:")
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
    """Draw the readable parts of a damaged or incomplete archive; return whether any exist."""
    try:
        chain = services.chain_of(path)
    except ServiceError:
        return False
    for heading, draw in (("Frames", _frames), ("Verify", upkeep.verify), ("Prune", upkeep.prune)):
        if chain.frames:
            with section(heading):
                draw(chain)
    return bool(chain.frames)


def _frames(chain: ChainReport) -> None:
    """Draw the frames of an archive: figures, settings, warnings, bytes by step, and every frame."""
    facts(_facts(chain))
    for line in _settings(chain):
        st.caption(fmt.markdown(line))
    _warnings(chain)
    alt = f"Bytes of {len(chain.frames)} frames by step, {chain.n_keyframes} of them keyframes"
    chart(frames_figure(chain.frames), "chain", alt)
    st.caption(_LEGEND)
    with st.expander(f"Frames ({fmt.count(len(chain.frames))})", icon=":material/table_rows:"):
        table = _frame_table(chain)
        alt = "Frames with step, kind, branch, parent, size, ratio, codec and digest"
        listing.show(table, "frames", alt=alt)


def _facts(chain: ChainReport) -> list[Fact]:
    """Return the main figures."""
    tip = "A branch begins where training was restored and took another course."
    branches: Fact = ("Branches", fmt.count(chain.n_branches), "of the training", tip)
    return [
        ("Frames", fmt.count(len(chain.frames)), fmt.counted(chain.n_keyframes, "keyframe")),
        ("Steps", fmt.count(len(chain.steps)), fmt.steps(chain.steps), "Steps on the newest branch."),
        *([branches] if chain.n_branches > 1 else []),
        *quality.size_facts(chain),
        *quality.archive_facts(chain),
    ]


def _settings(chain: ChainReport) -> list[str]:
    """Return lines that describe the encoding of the archive. Untrusted text."""
    optimizer = "left out" if chain.optimizer == "drop" else chain.optimizer
    parts = [f"Codec {chain.codec}; optimizer state {optimizer}"]
    parts += [f"first frame relative to the base model {chain.base}"] if chain.base else []
    settings = ", ".join(f"{name}={value}" for name, value in chain.config.items())
    last = "" if chain.is_uniform else "settings differ by step; the last: "
    lines = [" · ".join([*parts, *([f"{last}{settings}"] if settings else [])])]
    if chain.overrides:
        words = config_words({"override": chain.overrides})
        lines.append(f"{fmt.counted(len(chain.overrides), 'override')}: {words}")
    return lines


def _warnings(chain: ChainReport) -> None:
    """Draw which frames are missing or unreadable, and the checksums of the original files."""
    if "DAMAGED" in chain.originals:
        st.warning(fmt.markdown(f"Originals: {chain.originals}"), icon=":material/warning:")
    elif chain.originals:
        st.caption(fmt.markdown(f"Checksums of the originals: {chain.originals}."))
    if chain.missing:
        text = f"{_missing(chain)} Fetch the files from where the archive came from."
        st.error(text, icon=":material/error:")
    damaged = [f"step {frame.step}: {frame.damage}" for frame in chain.frames if frame.damage]
    if damaged:
        st.error(f"Not readable: {fmt.counted(len(damaged), 'frame')}.", icon=":material/error:")
        more = [f"… and {len(damaged) - _MAX_LISTED} more, in the table below"]
        listed = [*damaged[:_MAX_LISTED], *(more if len(damaged) > _MAX_LISTED else [])]
        st.code("\n".join(listed), language=None, wrap_lines=True)


def _missing(chain: ChainReport) -> str:
    return f"{fmt.counted(len(chain.missing), 'frame')} missing, of {fmt.steps(chain.missing)}."


def _frame_table(chain: ChainReport) -> pd.DataFrame:
    table = pd.DataFrame(chain.frames)[[*_COLUMNS]].rename(columns=_COLUMNS)
    for name in ("frame id", "SHA-256"):
        table[name] = table[name].str[:12]
    for name in ("parent step", "restored from"):
        table[name] = table[name].astype("Int64")
    return table if table["damage"].any() else table.drop(columns="damage")


def report_parts(chain: ChainReport, run: Subject) -> Iterator[Part]:
    """Yield the parts of a report of an archive and its run, in order."""
    figures = pd.DataFrame([fact[:3] for fact in _facts(chain)], columns=["figure", "value", "about"])
    notes = [f"Checksums of the originals: {chain.originals}."] if chain.originals else []
    notes += [_missing(chain)] if chain.missing else []
    yield Part("Summary", figures, (*_settings(chain), *notes))
    yield Part("Bytes by step", frames_figure(chain.frames), (_LEGEND,))
    if run.log:
        names, hidden = list(run.log)[:_MAX_PANELS], list(run.log)[_MAX_PANELS:]
        notes = [f"Not drawn: {', '.join(hidden)}."] if hidden else []
        yield Part("Training", log_figure(run.log, {name: [name] for name in names}), tuple(notes))
    step = fmt.count(run.steps[-1])
    for heading, sizes in listing.sizes(run).items():
        shares = sizes.assign(share=sizes["share"].map(fmt.percent))
        yield Part(heading, shares, (f"Uncompressed, in the checkpoint of step {step}.",))
    yield Part("Frames", _frame_table(chain))
    yield Part(f"Tensors of step {step}", listing.tensors(run.tensors))


PAGE = Page("Archives", ":material/inventory_2:", render, former=("archive", "compare", "export"))
