"""One page about a run and its archive, to read anywhere: HTML that asks nobody for anything."""

from __future__ import annotations

import hashlib
import html
import math
import os
import re
import shlex
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from inshrink_core.errors import DamagedError, InputError, InshrinkError
from inshrink_core.execution.progress import OnProgress, Progress
from inshrink_core.report import Report as ReportBase
from inshrink_core.request import Option, Request, Shown, python_call
from inshrink_core.sensitivity import SensitivityMetric
from inshrink_core.text import (
    count,
    described,
    elided,
    exponential,
    nats,
    percent,
    plain,
    printable,
    ratio,
    size,
    spread,
    steps_in_short,
)
from inshrink_core.verbs.compare import newest_comparison
from inshrink_core.verbs.shared.groups import AnyLog, AnyRun, OnDevice, Opening, PathLike, RunOrArchive
from inshrink_core.verbs.shared.showing import show_facts, show_notes

if TYPE_CHECKING:
    from rich.console import Console

    from inshrink_core.analysis.profile import SensitivityTable
    from inshrink_core.chain import Archive, ChainReport
    from inshrink_core.formats import Run, TrainingLog


Document = Annotated[Mapping[str, Any] | PathLike | None, Option(metavar="FILE")]
"""What ``--json`` printed: the document, or the file that has it."""

_MOST_ROWS: Final = 40
_MOST_COLUMNS: Final = 60
"""Cells of a heatmap that nobody can tell apart, and a file grows large."""

_MOST_BYTES: Final = 100_000_000
"""A larger document was not written by us."""

_MOST_POINTS: Final = 400
_MOST_STEPS: Final = 60
_MOST_ARCHIVES: Final = 16
_MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
"""What comes of a document that is not what it says."""
_MOST_CURVES: Final = 6
_WIDTH, _HEIGHT = 720, 220
_NAME_WIDTH: Final = 40

_SEQUENTIAL: Final = (
    *("#440154", "#482878", "#3e4a89", "#31688e", "#26828e"),
    *("#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725"),
)
"""Viridis in ten colours, readable in every form of colour blindness (Smith and van der Walt, 2015)."""

_LINES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c8c8c")
"""Okabe and Ito's palette."""

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#0c1118;--soft:#4e5965;--page:#fff;--card:#f4f6f8;--line:#dde3e9}
@media(prefers-color-scheme:dark){
:root{--ink:#e4e9ee;--soft:#aeb8c2;--page:#0b0f14;--card:#151c24;--line:#2b353f}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);
max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .5rem}p,caption{color:var(--soft)}
dl{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0}
dl div,pre{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .9rem}
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-size:1.3rem;font-weight:600}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}caption{text-align:left}
th,td{text-align:right;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
code{overflow-wrap:anywhere}svg{max-width:100%;height:auto}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}
pre,.wide{overflow-x:auto}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport(ReportBase):
    """What `report` wrote.

    Parameters
    ----------
    output
        The file.
    nbytes, digest
        Its size, and its SHA-256.
    sections
        Its sections: ``size``, ``sensitivity``, ``training``, ``compared``, ``rehearsal``, ``commands`` and
        ``hashes``, those for which there was something.
    notes
        What was left out, and why.
    """

    output: Path
    nbytes: int
    digest: str
    sections: tuple[str, ...]
    notes: tuple[str, ...] = ()

    SAYS: ClassVar = "output bytes=nbytes sha256=digest sections notes"

    def show(self, console: Console) -> None:
        """Print what was made."""
        facts = [
            ("written", f"{printable(str(self.output))}, {size(self.nbytes)}"),
            ("it tells", ", ".join(self.sections)),
            ("sha256", self.digest),
        ]
        show_facts(console, facts)
        show_notes(console, self.notes)


@dataclass(frozen=True)
class Report(Opening, OnDevice, Request[PageReport]):
    """Write one HTML file about a run and its archive: no script, and no request to anybody.

    Parameters
    ----------
    path
        A run or an archive. Of a run, the archive ``NAME.inshrink`` beside it is reported, too, if it holds
        steps of this run alone.
    output
        The HTML file to make.
    against
        Of an archive, the original run.
    compared
        What ``inshrink compare --json`` printed; by default what is known of the archive as it is and, with
        its run, of the run's other archives.
    rehearsed
        What ``inshrink rehearse --json`` printed.
    metric
        What the heatmap shows; by default fisher where the run has it, else update.
    log
        Metrics of the training: CSV, JSON lines, or an event file of TensorBoard; by default what the run
        has logged.
    step_column
        With --log, the column of the step; by default the one that is called like a step.
    column
        With --log, a metric; may be repeated. By default all.
    force
        Replace the file if it exists.

    Raises
    ------
    ExistsError
        The file exists and `force` is not set.
    InputError
        `compared` or `rehearsed` is no such document, or `metric` is none.
    StorageError
        The file cannot be written.

    Notes
    -----
    In Python, documents may be given as mappings, and `log` as a `TrainingLog`.

    Names come from strangers: all text is escaped, and signs that could forge what a reader sees are shown
    as what they are. The page forbids itself scripts and requests by its own content security policy.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> page = pathlib.Path(tempfile.mkdtemp()) / "report.html"
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> made = inshrink_core.verbs.report(run, page, metric="magnitude")
    >>> "sensitivity" in made.sections, "<script" in page.read_text()
    (True, False)
    """

    path: RunOrArchive
    output: Annotated[PathLike, Option(("--out", "-o", "--output"), metavar="FILE")]
    _: KW_ONLY
    against: Annotated[AnyRun | None, Option(metavar="RUN")] = None
    compared: Document = None
    rehearsed: Document = None
    metric: Annotated[str | None, Option(metavar="magnitude|taylor|fisher|update")] = None
    log: Annotated[AnyLog | None, Option(metavar="FILE")] = None
    step_column: Annotated[str | None, Option(metavar="NAME")] = None
    column: Annotated[str | Sequence[str] | None, Option(metavar="NAME", many=True)] = None
    force: bool = False

    SHOWN: ClassVar = Shown(in_bytes=False)
    EXAMPLES: ClassVar = (
        "inshrink report runs/digits --out digits.html",
        "inshrink report digits.inshrink --against runs/digits --out compared.html",
    )

    def perform(self) -> PageReport:
        """Write the page."""
        from inshrink_core.archive.storage import storage_errors
        from inshrink_core.chain import chain_report
        from inshrink_core.execution import require_free, write_durably

        target, log = Path(self.output), self._log()
        require_free(target, self.force)
        run, archive = self._sides()
        chain = None if archive is None else chain_report(archive)
        source = run if run is not None else archive
        if source is None or not source.steps:
            raise InputError("there is nothing to report: no step is there", where=str(self.path))
        notes: list[str] = []
        sections: dict[str, str] = {}
        sections["size"] = _sizes(run, chain)
        table = _measured(source, self.metric, self.device, self.progress, notes)
        if table is not None:
            sections["sensitivity"] = _heatmap(table, restored=run is None)
        logged = run.log if log is None and run is not None else log
        if logged:
            sections["training"] = _training(logged)
        sections |= self._documents(run, archive, notes)
        sections["commands"] = _commands(run, chain)
        sections["hashes"] = _hashes(run, chain)
        name = run.name if run is not None else str(chain.name if chain is not None else target.name)
        content = _page(name, source.steps, sections, table).encode()
        with storage_errors("the report cannot be written", target):
            write_durably(target, content)
        return PageReport(
            output=target,
            nbytes=len(content),
            digest=hashlib.sha256(content).hexdigest(),
            sections=tuple(name for name, text in sections.items() if text),
            notes=tuple(notes),
        )

    def _log(self) -> TrainingLog | None:
        """Return the metrics that are given."""
        from inshrink_core.formats import read_metrics

        if isinstance(self.log, str | os.PathLike):
            return read_metrics(self.log).log(self.step_column, self.column)
        if self.step_column is not None or self.column:
            raise InputError(
                "--step-column and --column go with --log", remedy="add --log, or leave them out"
            )
        return self.log

    def _sides(self) -> tuple[Run | None, Archive | None]:
        """Return the run and its archive, as far as they are there."""
        from inshrink_core.chain import Archive

        opened = self.opened(self.path)
        if isinstance(opened, Archive):
            return None if self.against is None else self.opened_run(self.against), opened
        if self.against is not None:
            raise InputError("--against goes with an archive", remedy="give the archive first")
        beside = Path(f"{str(opened.path).rstrip('/')}.inshrink")
        try:
            found = Archive.open(beside) if beside.exists() else None
        except InshrinkError:
            found = None
        is_its_own = found is not None and found.steps and set(found.steps) <= set(opened.steps)
        return opened, found if is_its_own else None

    def _documents(self, run: Run | None, archive: Archive | None, notes: list[str]) -> dict[str, str]:
        """Return the sections of the comparison and the rehearsal, by name."""
        sections: dict[str, str] = {}
        try:
            if self.compared is not None:
                sections["compared"] = _all_compared(_document(self.compared, "steps", "archives"))
            elif found := newest_comparison(archive, run):
                sections["compared"] = _all_compared(found)
            if self.rehearsed is not None:
                sections["rehearsal"] = _rehearsed(_document(self.rehearsed, "curves"))
        except _MALFORMED as error:
            raise InputError(
                "this is no document of `inshrink compare --json` or `inshrink rehearse --json`",
                found=described(error),
            ) from error
        return sections


report = python_call(Report)


def _document(given: Mapping[str, Any] | str | os.PathLike[str], *keys: str) -> Mapping[str, Any]:
    """Read a document; of a list, as the explorer keeps of a job, the last one that has one of the keys."""
    from inshrink_core.archive.storage import storage_error
    from inshrink_core.formats.disk import parse_json

    if isinstance(given, Mapping):
        return given
    path = Path(given)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError("this is no document of ours: it is larger than 100 MB", where=str(path))
        found = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise storage_error(error, "the document cannot be read", str(path)) from error
    except DamagedError as error:
        raise InputError(f"this is no document of ours: {error.what}", where=str(path)) from error
    if isinstance(found, list):
        found = next((one for one in reversed(found) if isinstance(one, dict) and {*keys} & {*one}), None)
    if not isinstance(found, dict):
        expected = " or ".join(f"'{key}'" for key in keys)
        raise InputError("this is not what the verb printed", where=str(path), expected=expected)
    return found


def _measured(
    source: Run | Archive, metric: str | None, device: str, progress: OnProgress | None, notes: list[str]
) -> SensitivityTable | None:
    """Measure the heatmap; None where a step cannot be read, which is noted."""
    from inshrink_core.analysis.profile import sensitivity
    from inshrink_core.formats import Run

    roles = {spec.role.value for spec in source[source.steps[-1]].specs}
    default = "fisher" if "exp_avg_sq" in roles else "update" if len(source.steps) > 1 else "magnitude"
    chosen = SensitivityMetric.parse(metric or default)
    steps = spread(source.steps, _MOST_COLUMNS)

    def measured(done: int, total: int, step: int) -> None:
        if progress is not None:
            progress(Progress("report", done, total, step))

    read = source if isinstance(source, Run) else source.sequential()
    try:
        return sensitivity(read, chosen, steps=steps, device=device, progress=measured).by("block")
    except InshrinkError as error:
        notes.append(f"no heatmap: {error}")
        return None


def _text(text: object, width: int = 0) -> str:
    """Return text as HTML shows it; signs without a shape, and those that turn it around, as their names."""
    plain_text = printable(str(text))
    shown = "".join(
        sign if unicodedata.category(sign) not in ("Cf", "Cs", "Co") else f"\\u{ord(sign):04x}"
        for sign in plain_text
    )
    return html.escape(elided(shown, width) if width else shown)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return figures, each with its name."""
    return "<dl>" + "".join(f"<div><dt>{_text(a)}</dt><dd>{_text(b)}</dd></div>" for a, b in facts) + "</dl>"


def _table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of text."""
    head = "".join(f'<th scope="col">{_text(one)}</th>' for one in headings)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table><caption>{_text(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _sizes(run: Run | None, chain: ChainReport | None) -> str:
    """Tell before and after."""
    from inshrink_core.checkpoint import MODEL_ROLES

    if chain is None:
        if run is None:
            return ""
        specs = [spec for spec in run[run.steps[-1]].specs if spec.role in MODEL_ROLES]
        return _facts(
            [
                ("size on disk", size(sum(run.nbytes_of(step) for step in run.steps))),
                ("steps", count(len(run.steps))),
                ("weights", count(sum(spec.numel for spec in specs))),
                ("archive", "none yet"),
            ]
        )
    before, after = max(1, chain.raw_bytes), chain.nbytes
    wide = _WIDTH - 120
    bars = "".join(
        f'<rect x="0" y="{y}" width="{max(1.0, wide * value / max(before, after)):.1f}" height="22" '
        f'fill="{colour}"/><text x="{max(1.0, wide * value / max(before, after)) + 8:.1f}" y="{y + 15}">'
        f"{_text(label)}</text>"
        for y, value, colour, label in (
            (4, before, _LINES[5], f"before: {size(before)}"),
            (34, after, _LINES[0], f"after: {size(after)}"),
        )
    )
    said = f"{size(before)} before, {size(after)} after"
    return _facts(
        [
            ("before, raw", size(chain.raw_bytes)),
            ("after", size(after)),
            ("ratio of everything", ratio(chain.ratio_total)),
            ("ratio of the weights", ratio(chain.ratio_weights)),
            ("bits per weight", plain(chain.bits_per_weight, 3)),
            ("steps", count(len(chain.steps))),
            ("codec", chain.codec),
            ("optimizer state", "dropped" if chain.optimizer == "drop" else chain.optimizer),
        ]
    ) + _svg(_WIDTH, 60, said, bars)


def _svg(width: float, height: float, said: str, content: str) -> str:
    """Return a drawing, with what it is for those who do not see it."""
    return (
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<title>{_text(said)}</title>{content}</svg>"
    )


def _heatmap(table: SensitivityTable, *, restored: bool) -> str:
    """Draw a cell a block and step, coloured by the logarithm of the mean."""
    means = {
        name: [float(value) for value in values]
        for name, values in zip(table.rows, table.mean.tolist(), strict=True)
    }
    worth = {name: max((v for v in values if _is_drawn(v)), default=0.0) for name, values in means.items()}
    kept = set(sorted(worth, key=lambda name: -worth[name])[:_MOST_ROWS])
    names = [name for name in table.rows if name in kept]
    logs = [math.log10(v) for name in names for v in means[name] if _is_drawn(v)]
    low, high = (min(logs), max(logs)) if logs else (0.0, 1.0)
    left, cell, row = 240, (_WIDTH - 250) / max(1, len(table.steps)), 14
    parts = []
    for y, name in enumerate(names):
        label = _text(name, _NAME_WIDTH)
        parts.append(f'<text x="{left - 6}" y="{y * row + 11}" text-anchor="end">{label}</text>')
        for x, (step, value) in enumerate(zip(table.steps, means[name], strict=True)):
            share = (math.log10(value) - low) / (high - low) if _is_drawn(value) and high > low else 0.0
            colour = _SEQUENTIAL[min(9, int(share * 10))] if _is_drawn(value) else "#9aa0a6"
            parts.append(
                f'<rect x="{left + x * cell:.1f}" y="{y * row}" width="{cell + 0.2:.1f}" height="{row - 1}" '
                f'fill="{colour}"><title>{_text(name)}, step {step}: {plain(value, 3)}</title></rect>'
            )
    bottom = len(names) * row + 14
    for x, step in {0: table.steps[0], len(table.steps) - 1: table.steps[-1]}.items():
        anchor = "start" if x == 0 else "end"
        place = left + (x + (x > 0)) * cell
        parts.append(f'<text x="{place:.1f}" y="{bottom}" text-anchor="{anchor}">step {step}</text>')
    hidden = len(table.rows) - len(names)
    shown = SensitivityMetric(table.metric)
    named = (
        f"{shown.quantity} since the checkpoint before" if shown is SensitivityMetric.UPDATE else str(shown)
    )
    what = f"{named}, mean of each block" + (", of the restored weights" if restored else "")
    said = f"{what}; dark is small, bright is large, from {exponential(10**low, 2)} to "
    said += f"{exponential(10**high, 2)}, logarithmic; grey: no value."
    said += f" The {len(names)} blocks of the largest values; {hidden} more are left out." if hidden else ""
    return f"<p>{_text(said)}</p>" + _svg(_WIDTH, bottom + 6, f"Heatmap of {what}", "".join(parts))


def _is_drawn(value: float) -> bool:
    """Whether a value has a place on a logarithmic scale."""
    return math.isfinite(value) and value > 0


def _curves(series: Mapping[str, Sequence[tuple[float, float]]], said: str) -> str:
    """Draw lines over steps; what is not finite is a gap."""
    from inshrink_core.analysis.thinning import thinned

    drawn = {
        name: [(float(x), float(y)) for x, y in points if math.isfinite(y)] for name, points in series.items()
    }
    drawn = {name: thinned(points, _MOST_POINTS // 2) for name, points in drawn.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    left, top, wide, high = 70, 8, _WIDTH - 80, _HEIGHT - 40

    def place(x: float, y: float) -> str:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        # Halves first: the distance of two values near the largest float has no float.
        up = (y / 2 - y0 / 2) / (y1 / 2 - y0 / 2) if y1 > y0 else 0.5
        return f"{left + wide * across:.1f},{top + high * (1 - up):.1f}"

    parts = [
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{plain(y1, 3)}</text>',
        f'<text x="{left - 6}" y="{top + high}" text-anchor="end">{plain(y0, 3)}</text>',
        f'<text x="{left}" y="{_HEIGHT - 18}">step {x0:g}</text>',
        f'<text x="{left + wide}" y="{_HEIGHT - 18}" text-anchor="end">step {x1:g}</text>',
    ]
    for number, (name, points) in enumerate(list(drawn.items())[:_MOST_CURVES]):
        colour = _LINES[number % len(_LINES)]
        line = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        across = left + number * wide / _MOST_CURVES
        parts.append(
            f'<rect x="{across:.0f}" y="{_HEIGHT - 11}" width="10" height="4" fill="{colour}"/>'
            f'<text x="{across + 14:.0f}" y="{_HEIGHT - 4}">{_text(name, 18)}</text>'
        )
    return _svg(_WIDTH, _HEIGHT, said, "".join(parts))


_OF_DATA: Final = re.compile(
    r"^(train(ing)?|val(id(ation)?)?|eval(uation)?|test|dev)[/_.-]|[/_.-](train|val(id)?|eval|test|dev)$"
)
"""Parts of a metric's name that say which data it was measured on."""


def log_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Group metrics that are the same number of different data: their names without the data's.

    Examples
    --------
    >>> log_groups(["loss", "eval_loss", "val/accuracy", "grad_norm"])
    {'loss': ['loss', 'eval_loss'], 'val/accuracy': ['val/accuracy'], 'grad_norm': ['grad_norm']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_OF_DATA.sub("", name) or name, []).append(name)
    return {group if len(same) > 1 else same[0]: same for group, same in groups.items()}


def _training(log: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw the metrics of the run, those of one scale together."""
    shown = list(log_groups(log).items())[:_MOST_CURVES]
    return "".join(
        f"<p>{_text(group)}</p>{_curves({name: log[name] for name in names}, f'{group} by step')}"
        for group, names in shown
    )


def _all_compared(document: Mapping[str, Any]) -> str:
    """Tell a comparison of one archive, or of several."""
    at = document.get("at")
    day = "" if at is None else f"<p>Measured on {time.strftime('%Y-%m-%d', time.localtime(at))}.</p>"
    archives = [document] if "steps" in document else list(document["archives"])
    parts = []
    for one in archives[:_MOST_ARCHIVES]:
        name = _text(Path(str(one["archive"])).name, _NAME_WIDTH) if len(archives) > 1 else ""
        parts.append((f"<h3>{name}</h3>" if name else "") + _compared(one))
    hidden = len(archives) - _MOST_ARCHIVES
    return day + "".join(parts) + (f"<p>{hidden} more archives are not listed.</p>" if hidden > 0 else "")


def _compared(document: Mapping[str, Any]) -> str:
    """Tell every compared step."""
    rows = list(document["steps"])
    shown = spread(rows, _MOST_STEPS)
    facts = [
        ("metric", f"{document['metric']}, {document['direction']} is better"),
        ("largest drop", percent(document["max_drop"])),
        ("largest divergence", f"{nats(document['max_divergence'])} nats"),
        ("largest restore cost", f"{percent(document.get('max_restore_cost'))} of the loss"),
    ]
    cells = [
        (
            count(row["step"]),
            plain(row["original"]),
            plain(row["restored"]),
            percent(row["drop"]),
            nats(row["divergence"]),
            percent(row.get("restore_cost")),
            percent(row.get("stale_drop")),
        )
        for row in shown
    ]
    headings = ("step", "original", "restored", "drop", "divergence, nats", "restore cost", "previous")
    caption = "Measured on restored states. Previous: the checkpoint before this one, in its place."
    left_out = f" {len(rows) - len(shown)} more steps are not listed." if len(shown) < len(rows) else ""
    return _facts(facts) + _table(caption + left_out, headings, cells)


def _rehearsed(document: Mapping[str, Any]) -> str:
    """Tell what training with failures lost."""
    half = document.get("excess_half_width")
    facts = [
        ("task", str(document["task"])),
        ("metric", f"{document['metric']}, {document['direction']} is better"),
        ("excess", percent(document["excess"]) + ("" if half is None else f" ± {percent(half)}")),
        ("seeds alone differ by", percent(document.get("noise"))),
        ("ratio of everything", ratio(document.get("ratio_total"))),
    ]
    series: dict[str, list[tuple[float, float]]] = {}
    for curve in list(document["curves"])[: _MOST_CURVES // 2]:
        for kind in ("uninterrupted", "restored"):
            series[f"{kind}, {curve['seed']}"] = list(zip(curve["steps"], curve[kind], strict=True))
    return _facts(facts) + _curves(series, "Metric of trainings, uninterrupted and restored")


def _commands(run: Run | None, chain: ChainReport | None) -> str:
    """Tell how to do the same."""
    from inshrink_core.verbs.compare import CompareArchives
    from inshrink_core.verbs.compress import Compress
    from inshrink_core.verbs.restore import Restore
    from inshrink_core.verbs.verify import Verify

    there = "RUN" if run is None else run.address
    archive = f"{there}.inshrink" if chain is None else str(chain.path)
    if chain is None:
        made = Compress(there, archive)
    else:
        made = Compress(
            there,
            archive,
            codec=chain.codec,
            settings=chain.config,
            optimizer=chain.optimizer or None,
        )
    requests: tuple[Request[Any], ...] = (
        made,
        Verify(archive, deep=True, against=there),
        CompareArchives((archive,), there),
        Restore(archive, "restored/"),
    )
    lines = (shlex.join(["inshrink", *one.words()]) for one in requests)
    return "<pre><code>" + "\n".join(map(_text, lines)) + "</code></pre>"


def _hashes(run: Run | None, chain: ChainReport | None) -> str:
    """Tell by what a copy of the archive, and the evaluator, are known."""
    from inshrink_core.formats.logs.log import read_settings

    rows = []
    if chain is not None:
        file = chain.path if chain.is_packed else chain.path / "inshrink-manifest"
        what = "archive" if chain.is_packed else "manifest of the archive, which names every frame's SHA-256"
        rows.append((what, _digest(file)))
    if run is not None:
        folder = run.path if run.path.is_dir() else run.path.parent
        try:
            evaluator = read_settings(folder).file
        except InshrinkError:
            evaluator = ""
        if evaluator and (folder / evaluator).resolve().is_relative_to(folder.resolve()):
            rows.append((f"evaluator {evaluator}", _digest(folder / evaluator)))
    known = [(what, digest) for what, digest in rows if digest]
    return _table("SHA-256", ("of", "digest"), known) if known else ""


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file; empty where it cannot be read."""
    from inshrink_core.execution import open_regular
    from inshrink_core.execution.mirror import at_hand

    try:
        with open(open_regular(at_hand(path)), "rb") as file:  # noqa: PTH123 - a descriptor
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, InshrinkError):
        return ""


_OF_THE_HEATMAP: Final = {
    "sensitivity": "Where an error hurts",
    "movement": "How far the weights moved",
    "magnitude": "How large the weights are",
}
"""The heading of the heatmap, by what it shows."""

_HEADINGS: Final = {
    "size": "Before and after",
    "training": "Training",
    "compared": "Restored against original",
    "rehearsal": "Rehearsal of failures",
    "commands": "Do the same",
    "hashes": "Known by",
}


def _page(
    name: str, steps: Sequence[int], sections: Mapping[str, str], table: SensitivityTable | None
) -> str:
    """Return the whole page."""
    headings = dict(_HEADINGS)
    if table is not None:
        headings["sensitivity"] = _OF_THE_HEATMAP[SensitivityMetric(table.metric).quantity]
    body = "".join(f"<h2>{headings[key]}</h2>{text}" for key, text in sections.items() if text)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(name)} · Inshrink</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_text(name)}</h1><p>Steps {_text(steps_in_short(steps))}</p>"
        f"{body}</body></html>\n"
    )
