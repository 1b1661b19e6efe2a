"""Configurations that were changed by hand, kept on disk: a reload shows them again, with the way back.

Kept beside the list of recent runs, one file a run, as the engine keeps results; the newest counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inshrink_app.model import ServiceError, Subject, plain
from inshrink_app.services.headers import file_of_run, keep_for_run
from inshrink_app.services.searching import SearchPoint, check_config

from inshrink_core.execution import load_result

_KIND, _FIELD = "drafts", "draft"
_PLAIN = ("start", "searched", "owner", "at")
"""Of an `Edit`, kept as they are."""

_MOST_KEPT = 64
_MAX_UNDO = 50


@dataclass
class Edit:
    """What is in the editor.

    Parameters
    ----------
    run
        Path of the run it is for.
    config
        The configuration as it stands.
    origin
        The point it was loaded from; None for the default.
    before
        Configurations and origins to go back to.
    version
        Grows with every change that the tables have to show; part of their keys.
    is_estimated
        Whether an estimate was asked for.
    locked
        Keys of the tensors whose bits stay as they are.
    start
        The configuration it began with, where it was loaded from no point.
    searched
        The search whose best was loaded last; empty for none.
    owner, at
        Who changed it last, and when: seconds since 1970.
    """

    run: str
    config: dict[str, Any]
    origin: SearchPoint | None = None
    before: list[tuple[dict[str, Any], SearchPoint | None]] = field(default_factory=list)
    version: int = 0
    is_estimated: bool = False
    locked: set[str] = field(default_factory=set)
    start: dict[str, Any] = field(default_factory=dict)
    searched: str = ""
    owner: str = ""
    at: float = 0.0

    def __post_init__(self) -> None:
        self.start = self.start or self.config

    @property
    def is_by_hand(self) -> bool:
        """Whether the reader changed or locked anything."""
        return bool(self.before or self.locked)

    @property
    def is_changed(self) -> bool:
        """Whether it is another configuration than the one that was loaded, or that it began with."""
        return self.config != (self.start if self.origin is None else self.origin.config)

    def change(self, config: Mapping[str, Any]) -> None:
        """Take in another configuration, and remember this one."""
        if config != self.config:
            self.before = [*self.before, (self.config, self.origin)][-_MAX_UNDO:]
            self.config = plain(config)
            self.version += 1

    def load(self, point: SearchPoint) -> None:
        """Take in the configuration of a point."""
        self.change(point.config)
        self.origin, self.is_estimated = point, False

    def undo(self) -> None:
        """Go back by one change."""
        if self.before:
            self.config, self.origin = self.before.pop()
            self.version += 1

    def reset(self) -> None:
        """Go back to what was loaded, or to the beginning; this can be undone too."""
        self.change(self.start if self.origin is None else self.origin.config)


def keep_draft(edit: Edit, owner: str) -> None:
    """Keep what stands in the editor as somebody's, or forget it where nothing of it was made by hand.

    A disk that refuses costs the memory of the draft, not the draft.
    """
    path = file_of_run(_KIND, Path(edit.run))
    edit.owner, edit.at = owner, time.time()
    if not edit.is_by_hand:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return
    stages = [(edit.config, edit.origin), *edit.before]
    told = [(config, None if origin is None else origin._asdict()) for config, origin in stages]
    document = {"stages": told, "locked": sorted(edit.locked)} | {n: getattr(edit, n) for n in _PLAIN}
    keep_for_run(path, {"path": edit.run}, _FIELD, document, _MOST_KEPT)


def kept_draft(shown: Subject) -> Edit | None:
    """Return what was kept of a run; None where there is nothing, or nothing that can still be used."""
    run = str(shown.path)
    found = load_result(file_of_run(_KIND, shown.path), {"path": run}, _FIELD, lambda told: _edit(run, told))
    try:
        if found is not None:
            check_config(found.config)
    except ServiceError:
        return None
    return found


def _edit(run: str, told: Any) -> Edit:
    """Rebuild what was kept; whatever does not fit raises, and nothing was kept."""
    stages = [
        (dict(config), None if origin is None else SearchPoint(**origin)) for config, origin in told["stages"]
    ]
    (config, origin), *before = stages
    plainly = {name: told[name] for name in _PLAIN}
    return Edit(run, config, origin, before=before, locked=set(map(str, told["locked"])), **plainly)
