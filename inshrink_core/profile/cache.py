"""Step records on disk, one small file per (checkpoint identity, metric, previous identity).

Each file is the SHA-256 of its second line, and that line: a JSON document. A file that is damaged or
of another version is as good as none. A cache that cannot be written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from inshrink_core.profile.table import Grouping, Measured, Row, StepRecord
from inshrink_core.sensitivity import Summary

__all__ = ["ProfileCache"]

_logger = logging.getLogger(__name__)

_VERSION = 1
"""Part of every file's name: raise it when a record or what is measured changes."""

_LARGEST_BYTES = 64 << 20
"""A record of 100,000 tensors takes about 20 MB; a larger file is not ours."""


def _run_cache(directory: Path) -> Path | None:
    """Return the cache inside of a run; None where it may not be written or leads elsewhere."""
    own = directory / ".inshrink"
    cache = own / "cache"
    if own.is_symlink() or cache.is_symlink() or not directory.is_dir():
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return cache if os.access(cache, os.W_OK) else None


def _user_cache() -> Path | None:
    """Return the cache of the user, for runs that are read-only."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = Path(base) / "inshrink"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return cache


class ProfileCache:
    """The cache of one run: in ``.inshrink/cache`` inside of it, else in the user's cache directory.

    Parameters
    ----------
    directory
        The run; None for no cache at all.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = None if directory is None else _run_cache(directory) or _user_cache()

    def _path(self, key: tuple[str, ...]) -> Path | None:
        if self._directory is None:
            return None
        name = hashlib.sha256("\0".join((str(_VERSION), *key)).encode()).hexdigest()[:32]
        return self._directory / f"{name}.json"

    def load(self, key: tuple[str, ...]) -> StepRecord | None:
        """Return the record of a key; None if there is no sound one."""
        path = self._path(key)
        if path is None:
            return None
        try:
            if path.stat().st_size > _LARGEST_BYTES:
                return None
            digest, _, line = path.read_bytes().partition(b"\n")
            if hashlib.sha256(line).hexdigest().encode() != digest:
                _logger.info("ignoring the damaged cache file %s", path)
                return None
            return _unpack(json.loads(line))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _logger.info("ignoring the cache file %s: %s", path, error)
            return None

    def store(self, key: tuple[str, ...], record: StepRecord) -> None:
        """Write a record so that a reader sees all of it or none."""
        path = self._path(key)
        if path is None:
            return
        line = json.dumps(_pack(record)).encode()
        content = hashlib.sha256(line).hexdigest().encode() + b"\n" + line
        temporary = ""
        try:
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(temporary).replace(path)
        except OSError as error:
            _logger.info("the cache file %s was not written: %s", path, error)
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _pack(record: StepRecord) -> dict[str, Any]:
    rows = {
        grouping.value: [[*measured.row, *measured.summary] for measured in measurements]
        for grouping, measurements in record.rows.items()
    }
    return {"source": record.source, "rows": rows}


def _unpack(document: Any) -> StepRecord:
    """Rebuild a record; whatever does not fit raises, and the record is measured anew."""
    return StepRecord(
        document["source"],
        {grouping: tuple(map(_unpack_row, document["rows"][grouping.value])) for grouping in Grouping},
    )


def _unpack_row(values: list[Any]) -> Measured:
    name, block, layer_type, role, n_tensors, numel, shape, mean, p50, p99, n, n_nonfinite = values
    extent = None if shape is None else tuple(map(int, shape))
    row = Row(str(name), str(block), str(layer_type), str(role), int(n_tensors), int(numel), extent)
    return Measured(row, Summary(float(mean), float(p50), float(p99), int(n), int(n_nonfinite)))
