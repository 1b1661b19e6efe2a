"""Archive: its frames and how they hang together, whether it is sound, and what can go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.model import Page, ServiceError, Subject, config_words
from inshrink_app.pages.archive import cards
from inshrink_app.pages.archive import figure as chain_figure
from inshrink_app.widgets import archive_picker, ending, fmt, listing, quality, subject, tables
from inshrink_app.widgets.figures import log_figure, log_groups
from inshrink_app.widgets.layout import Fact, answer, chart, facts, section
from inshrink_app.widgets.report import Part, report

from inshrink_core.chain import ChainReport
from inshrink_core.verbs.compress import Compress

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
    shown = subject.require("Archive", _rescue)
    if shown is None:
        return
    chosen = archive_picker.choose(shown)
    if chosen is None:
        archive_picker.none_yet("An archive holds the checkpoints as a chain of keyframes and deltas.")
        run = str(shown.path)
        ending.requests([Compress(run, f"{run.rstrip('/')}.inshrink")])
        return
    chain = answer(lambda: services.chain_of(str(chosen.path)))
    if chain is not None:
        _sections(chain, shown)


def _rescue(path: str) -> bool:
    """Draw what is left of an archive with damaged or missing frames; return whether there is something."""
    try:
        chain = services.chain_of(path)
    except ServiceError:
        return False
    if not chain.frames:
        return False
    _sections(chain)
    return True


def _sections(chain: ChainReport, shown: Subject | None = None) -> None:
    """Draw everything about one archive; without a subject, of which only some can be read."""
    facts(_facts(chain))
    for line in _settings(chain):
        st.caption(fmt.markdown(line))
    _warnings(chain)
    _graph(chain)
    cards.verify(chain)
    rules = cards.prune(chain)
    _frames(chain)
    requests = [cards.verifying(chain, deep=True)]
    requests += [rules] if cards.says_something(rules) else []
    if shown is not None:
        run = services.original_of(shown) or shown
        _report(chain, replace(run, log=shown.log or run.log))
    ending.requests(requests)
    ending.offer(
        ending.COMPARE._replace(widgets={"compare.archives": [str(chain.path)]}),
        ending.Next("Hand it on: Export", "export", "One packed file, or one step for transfer."),
    )


def _facts(chain: ChainReport) -> list[Fact]:
    """Return the figures that every reader wants first."""
    branches = [
        (
            "Branches",
            fmt.count(chain.n_branches),
            "lines of training",
            "A branch begins where training was restored and went another way.",
        )
    ]
    return [
        ("Frames", fmt.count(len(chain.frames)), fmt.counted(chain.n_keyframes, "keyframe")),
        (
            "Steps",
            fmt.count(len(chain.steps)),
            fmt.steps(chain.steps),
            "Steps on the newest line of training.",
        ),
        *(branches if chain.n_branches > 1 else ()),
        *quality.size_facts(chain),
        *quality.archive_facts(chain),
    ]


def _settings(chain: ChainReport) -> list[str]:
    """Return lines that say how the archive is encoded. Untrusted text."""
    optimizer = "dropped" if chain.optimizer == "drop" else chain.optimizer
    parts = [f"Codec {chain.codec}; optimizer state: {optimizer}"]
    parts += [f"first frame encoded relative to the base model {chain.base}"] if chain.base else []
    settings = ", ".join(f"{name}={value}" for name, value in chain.config.items())
    whose = "" if chain.is_uniform else "settings by step, of the last: "
    parts += [f"{whose}{settings}"] if settings else []
    lines = [" · ".join(parts)]
    if chain.overrides:
        words = config_words({"override": chain.overrides})
        lines.append(f"Of some tensors instead ({fmt.counted(len(chain.overrides), 'override')}): {words}")
    return lines


def _warnings(chain: ChainReport) -> None:
    """Say which frames are gone or cannot be read, and what vouched for the original files."""
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


def _graph(chain: ChainReport) -> None:
    """Draw the chain."""
    with section("Chain"):
        chart(
            chain_figure.chain_figure(chain.frames),
            "chain",
            f"Chain of {len(chain.frames)} frames, {chain.n_keyframes} of them keyframes, on "
            f"{chain.n_branches} lines of training",
        )
        st.caption(_legend(chain))


def _legend(chain: ChainReport) -> str:
    """Return what the signs in the picture of the chain mean."""
    n_steps = len({frame.step for frame in chain.frames})
    parts = ["A larger mark is a larger frame. A delta frame holds what changed since the one before it."]
    if any(frame.restored_step is not None for frame in chain.frames):
        parts.append("Arrows: training was restored there.")
    if any(not frame.on_line for frame in chain.frames):
        parts.append("Hollow: a line of training that was abandoned.")
    if n_steps > chain_figure.MAX_COLUMNS:
        parts.append(f"The newest {chain_figure.MAX_COLUMNS} of {fmt.count(n_steps)} steps are drawn.")
    return " ".join(parts)


def _frames(chain: ChainReport) -> None:
    """List the frames."""
    with st.expander(f"Frames ({fmt.count(len(chain.frames))})", icon=":material/table_rows:"):
        table = _frame_table(chain)
        listing.show(
            table,
            "frames",
            alt="Frames with step, kind, branch, parent, size, ratio, codec and digest",
            hidden=[] if table["damage"].any() else ["damage"],
        )


def _frame_table(chain: ChainReport) -> pd.DataFrame:
    table = pd.DataFrame(chain.frames)[[*_COLUMNS]].rename(columns=_COLUMNS)
    for name in ("frame id", "SHA-256"):
        table[name] = table[name].str[:_ID_WIDTH]
    for name in ("parent step", "restored from"):
        table[name] = table[name].astype("Int64")
    return table


def _report(chain: ChainReport, run: Subject) -> None:
    """Offer the figures and tables of an archive and its run as one file."""
    with section("Report"):
        st.write("One HTML file for a pull request: figures and tables of this page and of the Overview.")
        listing.buttons(
            ("Download report", "report.html", lambda: report(chain.name, report_parts(chain, run)))
        )


def report_parts(chain: ChainReport, run: Subject) -> Iterator[Part]:
    """Yield what a report of an archive and its run has, in order."""
    told = pd.DataFrame([fact[:3] for fact in _facts(chain)], columns=["figure", "value", "about"])
    notes = [f"Checksums of the originals: {chain.originals}."] if chain.originals else []
    notes += [_missing(chain)] if chain.missing else []
    yield Part("Figures", told, (*_settings(chain), *notes))
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


PAGE = Page("Archive", ":material/inventory_2:", render)
