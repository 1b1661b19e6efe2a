"""The runs opened lately and the evaluators that are trusted, in small files that may be lost."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

_KEPT = 8
_MAX_BYTES = 64_000
"""A larger file was not written by us."""

_TRUSTED_KEPT = 100

LAST_TIME = 4_102_444_800
"""The year 2100, which every calendar of a computer can show; NaN is not below it either."""


class Recent(NamedTuple):
    """One remembered run: its real path, ``run`` or ``archive``, and when it was opened (Unix time)."""

    path: str
    kind: str
    opened_at: float


def recent_file() -> Path:
    """Return where the list lies: the user's state directory, as the XDG base directories say."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "inshrink" / "recent.json"


def load_recent() -> tuple[Recent, ...]:
    """Return what was opened, newest first; nothing where the file is missing or damaged."""
    rows = read_json(recent_file(), _MAX_BYTES)
    if not isinstance(rows, list):
        return ()
    valid = [_parse(row) for row in rows]
    return tuple(row for row in valid if row is not None)[:_KEPT]


def _parse(row: object) -> Recent | None:
    """Accept only a row as `remember_recent` writes them."""
    if not isinstance(row, dict):
        return None
    path, kind, opened_at = row.get("path"), row.get("kind"), row.get("opened_at")
    if not isinstance(path, str) or "\0" in path or kind not in ("run", "archive"):
        return None
    return Recent(path, str(kind), float(opened_at)) if is_time(opened_at) else None


def is_time(value: object) -> TypeGuard[float]:
    """Whether a value is a time that a calendar can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LAST_TIME


def remember_recent(path: Path, kind: str) -> None:
    """Put a run first in the list; a disk that refuses is no reason to bother the reader."""
    kept = [row for row in load_recent() if row.path != str(path)]
    rows = [Recent(str(path), kind, time.time()), *kept][:_KEPT]
    _write(recent_file(), [row._asdict() for row in rows])


def forget_recent() -> None:
    """Empty the list."""
    _write(recent_file(), [])


def is_trusted(file: Path, digest: str) -> bool:
    """Return whether the reader has said that a file of code may run, as it is now and where it lies.

    Parameters
    ----------
    file
        Its real path: the same text elsewhere may import something else.
    digest
        SHA-256 of its content.
    """
    return _trusted().get(str(file)) == digest


def trust(file: Path, digest: str | None) -> None:
    """Remember that a file of code may run with this content; None takes the word back."""
    kept = _trusted()
    kept.pop(str(file), None)
    if digest is not None:
        kept[str(file)] = digest
    _write(_trusted_file(), dict(list(kept.items())[-_TRUSTED_KEPT:]))


def _trusted_file() -> Path:
    return recent_file().with_name("trusted.json")


def _trusted() -> dict[str, object]:
    """Return the digest of every trusted file by its path, the last one trusted at the end."""
    rows = read_json(_trusted_file(), _MAX_BYTES)
    return rows if isinstance(rows, dict) else {}


def read_json(path: Path, most: int) -> Any:
    """Return what a file of ours holds; None where it is missing, damaged, or larger than we write them."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        return json.loads(content) if len(content) <= most else None
    except (OSError, ValueError, RecursionError):
        return None


def _write(target: Path, rows: object) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    content = json.dumps(rows, indent=1)
    with contextlib.suppress(OSError, UnicodeError):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.stem}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        Path(name).replace(target)
