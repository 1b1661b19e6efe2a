"""Recent runs and trusted evaluators, in small files that may be lost."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from inshrink_core.errors import StorageError
from inshrink_core.execution.results import write_atomic

_MAX_RECENT, _MAX_TRUSTED = 8, 100
_MAX_BYTES = 64_000
"""Size limit of these files; the explorer never writes larger ones."""

LAST_TIME = 4_102_444_800
"""The year 2100 as Unix time, which every computer's calendar can represent."""


class Recent(msgspec.Struct, frozen=True):
    """A recent run: its real path, ``run`` or ``archive``, and the Unix time at which it was opened."""

    path: Annotated[str, msgspec.Meta(pattern=r"^[^\0]*$")]
    kind: Literal["run", "archive"]
    opened_at: Annotated[float, msgspec.Meta(ge=0, le=LAST_TIME)]


def recent_file() -> Path:
    """Return the file of recent runs in the user's state directory (XDG base directory specification)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "inshrink" / "recent.json"


def load_recent() -> tuple[Recent, ...]:
    """Return the recent runs, newest first; empty if the file is missing or damaged."""
    stored, rows = _read(recent_file()), []
    for row in stored if isinstance(stored, list) else ():
        with contextlib.suppress(ValueError):
            rows.append(msgspec.convert(row, Recent))
    return tuple(rows[:_MAX_RECENT])


def remember_recent(path: Path, kind: str) -> None:
    """Put a run first in the list. A failed write is ignored."""
    known = load_recent()
    if [row.path for row in known[:1]] != [str(path)]:
        others = [msgspec.to_builtins(row) for row in known if row.path != str(path)]
        rows = [{"path": str(path), "kind": kind, "opened_at": time.time()}, *others]
        _write(recent_file(), rows[:_MAX_RECENT])


def forget_recent() -> None:
    """Empty the list."""
    _write(recent_file(), [])


def is_trusted(file: Path, digest: str) -> bool:
    """Return whether the user trusts a code file with this content at this path.

    Parameters
    ----------
    file
        Real path of the file. The same content at another path may import other modules.
    digest
        SHA-256 of its content.
    """
    return _trusted().get(str(file)) == digest


def trust(file: Path, digest: str | None) -> None:
    """Trust a code file with this content; None withdraws the trust."""
    trusted = _trusted()
    trusted.pop(str(file), None)
    if digest is not None:
        trusted[str(file)] = digest
    _write(_trusted_file(), dict(list(trusted.items())[-_MAX_TRUSTED:]))


def _trusted_file() -> Path:
    return recent_file().with_name("trusted.json")


def _trusted() -> dict[str, object]:
    """Return the digest of every trusted file by path, newest last."""
    rows = _read(_trusted_file())
    return rows if isinstance(rows, dict) else {}


def _read(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing, damaged or too large."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        return json.loads(content) if len(content) <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _write(target: Path, rows: object) -> None:
    with contextlib.suppress(StorageError, OSError, UnicodeError):
        write_atomic(target, json.dumps(rows, indent=1))
