"""Choices for a run: the bound, the evaluator and its metric, and the bits being edited.

Each run has one file per user, beside the list of recent runs. Every tab and place reads it again, so that
all agree. The last write wins.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import streamlit as st
from inshrink_app.model import ServiceError, Subject, engine_settings, plain
from inshrink_app.server.recent import recent_file
from inshrink_app.services.archives import original_of
from inshrink_app.services.inside import reported

from inshrink_core.chain.defaults import make_configs
from inshrink_core.errors import StorageError
from inshrink_core.execution.results import keep_result, load_result
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE, DEFAULT_MAX_RESTORE_COST

_KIND = "chosen"
_MAX_STORED = 64
_MAX_UNDO = 50

BOUNDS: Final[Mapping[str, str]] = {
    "restore_cost": "Restore cost",
    "drop": "Drop of the metric",
    "divergence": "Divergence",
    "none": "No bound",
}
"""Bounded figures by their names in a request."""

USUAL: Final[Mapping[str, float]] = {
    "restore_cost": DEFAULT_MAX_RESTORE_COST,
    "drop": 0.01,
    "divergence": DEFAULT_MAX_DIVERGENCE,
    "none": 0.0,
}
"""The initial value of each bound."""


class Bound(NamedTuple):
    """The quality bound of every restored step: a key of `BOUNDS` and its largest allowed value."""

    kind: str = "restore_cost"
    value: float = DEFAULT_MAX_RESTORE_COST

    @property
    def fields(self) -> dict[str, float]:
        """Return the request's field for this bound; empty without a bound."""
        return {} if self.kind == "none" else {f"max_{self.kind}": self.value}

    def of(self, figures: Any) -> float | None:
        """Return the bounded figure among some figures; None if unknown."""
        found = None if self.kind == "none" else getattr(figures, self.kind, None)
        return None if found is None else float(found)

    def is_kept(self, value: float | None) -> bool:
        """Return whether a value keeps the bound; an unknown value does."""
        return self.kind == "none" or value is None or value <= self.value

    def check(self, value: float | None) -> str | None:
        """Return ``kept`` or ``broken``; None without a bound or if the value is unknown."""
        if self.kind == "none" or value is None:
            return None
        return "kept" if self.is_kept(value) else "broken"


@dataclass(frozen=True)
class Chosen:
    """The choices for a run.

    Parameters
    ----------
    run
        Path of the run.
    bound
        Quality bound of every restored step.
    evaluator
        ``FILE.py:FUNCTION`` or ``auto``; empty for the evaluator named by the run.
    metric, direction
        The evaluated metric, and ``higher`` or ``lower``; empty for the evaluator's default.
    keep
        Contents of an archive: ``exact``, ``resume`` or ``weights``.
    config
        The configuration being edited; empty for the codec's default.
    origin
        Origin of that configuration, in a few words.
    before
        Earlier configurations with their origins, for *Undo*, the latest last.
    locked
        Tensors whose bits are locked.
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


def chosen(shown: Subject) -> Chosen:
    """Return the choices for a run, or for the run that an archive was made from."""
    run = _run_of(shown)
    path = file_of_run(run)
    found = load_result(path, {"path": str(run)}, _KIND, _parse)
    return found or _unwritten().get(str(run)) or Chosen(str(run))


def file_of_run(run: Path) -> Path:
    """Return the path of the choices for a run: one file per run, beside the recent runs."""
    name = hashlib.sha256(str(run).encode(errors="surrogateescape")).hexdigest()[:32]
    return recent_file().with_name(_KIND) / f"{name}.json"


def choose(shown: Subject, **changes: Any) -> Chosen:
    """Change choices for a run, and return all of them."""
    now = replace(chosen(shown), **changes)
    path = file_of_run(Path(now.run))
    with contextlib.suppress(OSError, StorageError, UnicodeError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_result(path, {"path": now.run}, _KIND, msgspec.to_builtins(now))
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for old in by_age[_MAX_STORED:]:
            old.unlink()
    if path.exists():
        _unwritten().pop(now.run, None)
    else:  # If the disk refuses, the choices last until the explorer ends.
        _unwritten()[now.run] = now
    return now


def change_bits(shown: Subject, config: Mapping[str, Any], origin: str = "") -> Chosen:
    """Replace the configuration being edited. *Undo* restores the previous one."""
    now = chosen(shown)
    if plain(config) == now.config:
        return now
    before = (*now.before, (now.config, now.origin))[-_MAX_UNDO:]
    return choose(shown, config=plain(config), origin=origin, before=before)


def undo_bits(shown: Subject) -> Chosen:
    """Undo the last change of the configuration."""
    now = chosen(shown)
    if not now.before:
        return now
    config, origin = now.before[-1]
    return choose(shown, config=config, origin=origin, before=now.before[:-1])


@st.cache_resource(show_spinner=False)
def _unwritten() -> dict[str, Chosen]:
    """Return choices that could not be written to disk, by run."""
    return {}


def _run_of(shown: Subject) -> Path:
    found = original_of(shown) if shown.kind == "archive" else shown
    return (found or shown).path


def _parse(document: Any) -> Chosen:
    """Rebuild stored choices; raise if the document does not match."""
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
