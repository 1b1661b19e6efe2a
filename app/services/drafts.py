"""Configurations that were changed by hand, kept on disk: a reload shows them again, with the way back.

Kept beside the list of recent runs, one file a run, as the engine keeps results; the newest counts.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from inshrink_app.pages.allocate.config import Edit
from inshrink_app.server.recent import recent_file
from inshrink_app.services.searching import SearchPoint, check_config
from inshrink_app.widgets.tables import ServiceError, Subject

__all__ = ["keep_draft", "kept_draft"]

_FIELD = "draft"
_MOST_KEPT = 64


def _file(run: str) -> Path:
    name = hashlib.sha256(run.encode(errors="surrogateescape")).hexdigest()[:32]
    return recent_file().with_name("drafts") / f"{name}.json"


def keep_draft(edit: Edit) -> None:
    """Keep what stands in the editor, or forget it where nothing of it was made by hand.

    A disk that refuses costs the memory of the draft, not the draft.
    """
    from inshrink_core.errors import StorageError
    from inshrink_core.execution import keep_result

    path = _file(edit.run)
    with contextlib.suppress(OSError, StorageError, UnicodeError, ValueError):
        if not edit.is_by_hand:
            path.unlink(missing_ok=True)
            return
        stages = [(edit.config, edit.origin), *edit.before]
        told = [(config, None if origin is None else origin._asdict()) for config, origin in stages]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        document = {"stages": told, "locked": sorted(edit.locked)}
        keep_result(path, {"path": edit.run}, _FIELD, document)
        by_age = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns, reverse=True)
        for old in by_age[_MOST_KEPT:]:
            old.unlink()


def kept_draft(shown: Subject) -> Edit | None:
    """Return what was kept of a run; None where there is nothing, or nothing that can still be used."""
    from inshrink_core.execution import load_result

    run = str(shown.path)
    found = load_result(_file(run), {"path": run}, _FIELD, lambda told: _edit(run, told))
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
    return Edit(run, config, origin, before=before, locked=set(map(str, told["locked"])))
