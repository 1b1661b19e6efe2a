"""What the reader chose for a run: the bound, the evaluator and its metric, and the bits being edited.

One file a run, for this user, beside the list of recent runs. Every tab and every place reads it anew, so
that all of them agree; the newest write counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import streamlit as st
from inshrink_app.model import ServiceError, Subject, engine_settings, plain
from inshrink_app.services.archives import original_of
from inshrink_app.services.headers import file_of_run, store_for_run
from inshrink_app.services.inside import reported

from inshrink_core.chain.defaults import make_configs
from inshrink_core.execution import load_result
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE, DEFAULT_MAX_RESTORE_COST
from inshrink_core.text import limit_text

_KIND = "chosen"
_MOST_STORED = 64
_MAX_UNDO = 50

BOUNDS: Final[Mapping[str, str]] = {
    "restore_cost": "Restore cost",
    "drop": "Drop of the metric",
    "divergence": "Divergence",
    "none": "No bound",
}
"""What can be bounded, by its name in a request."""

USUAL: Final[Mapping[str, float]] = {
    "restore_cost": DEFAULT_MAX_RESTORE_COST,
    "drop": 0.01,
    "divergence": DEFAULT_MAX_DIVERGENCE,
    "none": 0.0,
}
"""The value of each to begin with."""


class Bound(NamedTuple):
    """What every restored step must keep: a key of `BOUNDS`, and the largest value of that figure."""

    kind: str = "restore_cost"
    value: float = DEFAULT_MAX_RESTORE_COST

    @property
    def fields(self) -> dict[str, float]:
        """The field by which a request asks for it; none without a bound."""
        return {} if self.kind == "none" else {f"max_{self.kind}": self.value}

    @property
    def text(self) -> str:
        """The bound in a few words."""
        if self.kind == "none":
            return "none"
        return f"{self.kind.replace('_', ' ')} {limit_text(self.kind, self.value)}"

    def of(self, figures: Any) -> float | None:
        """Return the bounded figure among some figures; None where it is not known."""
        found = None if self.kind == "none" else getattr(figures, self.kind, None)
        return None if found is None else float(found)

    def is_kept(self, value: float | None) -> bool:
        """Whether a value of the bounded figure keeps it; one that is not known does."""
        return self.kind == "none" or value is None or value <= self.value

    def verdict(self, value: float | None) -> str | None:
        """Return ``kept`` or ``broken``; None if nothing is bounded, or the value is not known."""
        if self.kind == "none" or value is None:
            return None
        return "kept" if value <= self.value else "broken"


@dataclass(frozen=True)
class Chosen:
    """What is chosen for a run.

    Parameters
    ----------
    run
        Path of the run.
    bound
        What every restored step must keep.
    evaluator
        ``FILE.py:FUNCTION`` or ``auto``; empty for the evaluator that the run itself names.
    metric, direction
        The metric that judges, and ``higher`` or ``lower``; empty for the evaluator's default.
    keep
        What an archive keeps: ``exact``, ``resume`` or ``weights``.
    config
        The configuration being edited; empty for the default of the codec.
    origin
        Where that configuration came from, in a few words.
    before
        Configurations and their origins that *Undo* goes back to, the last one last.
    locked
        Tensors whose bits stay as they are.
    searched
        The search whose result was taken last.
    """

    run: str
    bound: Bound = field(default_factory=Bound)
    evaluator: str = ""
    metric: str = ""
    direction: str = ""
    keep: str = "resume"
    config: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    before: tuple[tuple[Mapping[str, Any], str], ...] = ()
    locked: frozenset[str] = frozenset()
    searched: str = ""


def chosen(shown: Subject) -> Chosen:
    """Return what is chosen for a run, or for the run that an archive was made from."""
    run = _run_of(shown)
    path = file_of_run(_KIND, run)
    found = load_result(path, {"path": str(run)}, _KIND, _parse)
    return found or _unwritten().get(str(run)) or Chosen(str(run))


def choose(shown: Subject, **changes: Any) -> Chosen:
    """Change what is chosen for a run, and return it."""
    now = replace(chosen(shown), **changes)
    path = file_of_run(_KIND, Path(now.run))
    store_for_run(path, {"path": now.run}, _KIND, msgspec.to_builtins(now), _MOST_STORED)
    if path.exists():
        _unwritten().pop(now.run, None)
    else:  # A disk that refuses costs what is chosen with the explorer's end, and not at once.
        _unwritten()[now.run] = now
    return now


def change_bits(shown: Subject, config: Mapping[str, Any], origin: str = "", **more: Any) -> Chosen:
    """Edit another configuration from now on; *Undo* goes back to the one before."""
    now = chosen(shown)
    if plain(config) == now.config:
        return choose(shown, **more) if more else now
    before = (*now.before, (now.config, now.origin))[-_MAX_UNDO:]
    return choose(shown, config=plain(config), origin=origin, before=before, **more)


def undo_bits(shown: Subject) -> Chosen:
    """Go back by one change of the configuration."""
    now = chosen(shown)
    if not now.before:
        return now
    config, origin = now.before[-1]
    return choose(shown, config=config, origin=origin, before=now.before[:-1])


@st.cache_resource(show_spinner=False)
def _unwritten() -> dict[str, Chosen]:
    """Return what could not be written to disk, by run."""
    return {}


def _run_of(shown: Subject) -> Path:
    found = original_of(shown) if shown.kind == "archive" else shown
    return (found or shown).path


def _parse(document: Any) -> Chosen:
    """Rebuild what was stored; what does not fit raises, and nothing was stored."""
    found = msgspec.convert(document, Chosen)
    if found.bound.kind not in BOUNDS or not 0 <= found.bound.value < float("inf"):
        raise ValueError("no such bound")
    try:
        with reported():
            if found.config:
                make_configs(str(found.config["codec"]), engine_settings(found.config))
    except ServiceError as error:
        raise ValueError("the configuration can no longer be used") from error
    return found
