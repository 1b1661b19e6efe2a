"""``inshrink search``: the coarsest precision that keeps the metric within a bound."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inshrink_core.cli.options import (
    BoundOptions,
    Computing,
    Evaluating,
    Output,
    Reading,
    Steps,
    Writing,
    steps_of,
    verb,
)
from inshrink_core.cli.output import as_lines, make_table
from inshrink_core.cli.showing import show_facts, show_notes
from inshrink_core.text import (
    UNKNOWN,
    count,
    duration,
    nats,
    percent,
    plain,
    printable,
    ratio,
    steps_in_short,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from inshrink_core.search.search import OnSearch, SearchProgress, SearchReport

__all__ = ["EXAMPLE", "describe", "search"]

EXAMPLE = (
    "$ inshrink search runs/digits --max-drop 0.01 -o search.json\n"
    "$ inshrink search runs/digits --target-ratio 30 --evaluator judge.py:evaluate"
)

_ROWS = 12
"""Trials shown while the search goes on: the last ones."""


@verb
def search(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run to search on.")],
    *,
    bounds: BoundOptions,
    target_ratio: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="Instead of bounds: the smallest divergence at this ratio."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the result there, for compress --config; trials are kept beside it as they come.",
        ),
    ] = None,
    writing: Writing,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="auto|allocation|bracket|guided|random|grid",
            help="How to look: allocation or bracket for lattice, guided for other codecs.",
        ),
    ] = "auto",
    budget: Annotated[int | None, typer.Option(min=1, help="Most configurations to try.")] = None,
    seed: Annotated[int, typer.Option(help="Of --strategy random.")] = 0,
    replicas: Annotated[int, typer.Option(min=1, help="Evaluators asked side by side.")] = 1,
    gain: Annotated[
        bool, typer.Option("--gain/--no-gain", help="Measure restore gain and noise of each trial too.")
    ] = True,
    evaluating: Evaluating,
    steps: Steps = None,
    computing: Computing,
    reading: Reading,
    out: Output,
) -> None:
    """Find the configuration of largest ratio whose restored steps keep a bound."""
    import inshrink_core

    opened = reading.open(run)
    with _live_table(hidden=out.hidden) as progress:
        report = inshrink_core.search(
            opened,
            **vars(bounds),
            target_ratio=target_ratio,
            strategy=strategy,
            budget=budget,
            seed=seed,
            steps=steps_of(opened, steps),
            **writing.keywords(),
            **vars(evaluating),
            replicas=replicas,
            gain=gain,
            output=output,
            **vars(computing),
            progress=progress,
        )
    out.present(report, lambda console, report: _show(console, report, output))


@contextmanager
def _live_table(*, hidden: bool) -> Iterator[OnSearch | None]:
    """Show the last trials on stderr as they come; nothing where no one watches."""
    lines = as_lines("search", "trials")
    if lines is not None:
        yield lambda now: lines(
            now.evaluations, now.evaluations + now.left, now.trial.step, now.trial.to_json(), now.seconds_left
        )
        return
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    seen: list[SearchProgress] = []
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def progress(now: SearchProgress) -> None:
            seen.append(now)
            live.update(_table(seen), refresh=True)

        yield progress


def _table(seen: list[SearchProgress]) -> RenderableType:
    """Return the last trials, the best chain so far, and how long it may still take."""
    from rich.console import Group
    from rich.text import Text

    table = make_table("trial", "step", "config", "ratio of weights", "drop", "divergence", left=(2,))
    for now in seen[-_ROWS:]:
        trial = now.trial
        table.add_row(
            count(now.evaluations),
            str(trial.step),
            printable(describe(trial.config)),
            ratio(trial.ratio_weights),
            percent(trial.drop),
            nats(trial.divergence),
        )
    last = seen[-1]
    line = (
        f"best so far {ratio(last.best_ratio)} of the weights · about {count(last.left)} evaluations left"
        f" · {duration(last.seconds_left)}"
    )
    return Group(table, Text(line))


def describe(config: Mapping[str, Any]) -> str:
    """Return a configuration in a few words: its settings, and those of layer types.

    Examples
    --------
    >>> describe({"codec": "lattice", "settings": {"coarseness": 2.5}})
    'coarseness 2.5'
    """
    words = [f"{name} {_short(value)}" for name, value in config.get("settings", {}).items()]
    for one in config.get("override", []):
        chosen = one.get("layer_type") or one.get("match", "*")
        values = [_short(value) for name, value in one.items() if name not in ("layer_type", "match")]
        words.append(f"{chosen} {' '.join(values)}")
    return ", ".join(words) or str(config.get("codec", UNKNOWN))


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _show(console: Console, report: SearchReport, output: Path | None) -> None:
    """Print what was found, under what, and what it took."""
    document = report.to_json()
    best = document["best"]
    bounds = document["bounds"]
    asked = [
        f"drop ≤ {bounds['drop'] * 100:g} %" if bounds["drop"] is not None else "",
        f"divergence ≤ {bounds['divergence']:g} nats" if bounds["divergence"] is not None else "",
        f"restore cost ≤ {bounds['restore_cost'] * 100:g} %"
        if bounds.get("restore_cost") is not None
        else "",
        f"ratio ≥ {document['target_ratio']:g}" if document["target_ratio"] is not None else "",
    ]
    n_stale = len(document["uninformative"])
    facts = [
        ("asked", ", ".join(word for word in asked if word)),
        ("best", printable(describe(best["config"])) if best else "none"),
        ("ratio of everything", f"{ratio(best['ratio_total'])}  (estimated)" if best else ""),
        ("ratio of the weights", ratio(best["ratio_weights"]) if best else ""),
        ("largest drop", percent(best["drop"]) if best else ""),
        ("largest divergence", f"{nats(best['divergence'])} nats" if best else ""),
        ("restore gain, noise", _gain(best)),
        ("metric", f"{printable(str(document['metric']))}, {document['direction']} is better"),
        ("steps", steps_in_short(document["steps"])),
        (
            "says nothing",
            f"{n_stale} steps, where the previous checkpoint keeps them too" if n_stale else "",
        ),
        ("evaluations", f"{count(document['evaluations'])}, {len(document['trials'])} trials known"),
        ("predicted order", _correlation(document)),
        ("time", f"{duration(document['seconds'])} on {document['device']}"),
        ("trials", printable(document["log"] or "not kept")),
        ("next", f"inshrink compress RUN -o ARCHIVE --config {output}" if best and output else ""),
    ]
    show_facts(console, facts)
    show_notes(console, document["notes"])


def _correlation(document: Mapping[str, Any]) -> str:
    """Return how far the order of two predictions can be trusted."""
    values = (document["rank_correlation"], document["drop_rank_correlation"])
    if all(value is None for value in values):
        return ""
    figures, drops = (plain(value, 2) for value in values)
    return f"rank correlation {figures}, of drops {drops}"


def _gain(best: Mapping[str, Any] | None) -> str:
    if best is None or best["restore_gain"] is None:
        return ""
    return f"{plain(best['restore_gain'], 3)}, {plain(best['restore_noise'], 3)}"
