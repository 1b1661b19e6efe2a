"""Results of long work kept as small files, so that the same work goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from inshrink_core.errors import StorageError

__all__ = ["keep_result", "key_digest", "load_result", "write_whole"]

_MAX_NBYTES: Final = 1 << 24
"""A result is a few numbers; one of 16 MB is something else."""

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def key_digest(key: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that tell keys apart; the same for equal JSON values.

    Examples
    --------
    >>> key_digest({"a": 1, "b": 2}) == key_digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def load_result(
    path: Path, key: Mapping[str, Any], field: str, parse: Callable[[Any], _Result]
) -> _Result | None:
    """Return what was kept under a key; None where there is none, or none that can be read.

    Parameters
    ----------
    path
        File of the result.
    key
        Everything the result depends on, as JSON values; a file with another key is none.
    field
        Name of the result in the file.
    parse
        Makes the result from JSON; raises ValueError, TypeError or KeyError where it is none.
    """
    try:
        if path.stat().st_size > _MAX_NBYTES:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["key"] != json.loads(json.dumps(key)):
            return None
        return parse(document[field])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _logger.warning("%s holds no %s (%s): it is made again", path, field, error)
        return None


def keep_result(path: Path, key: Mapping[str, Any], field: str, value: Any) -> None:
    """Write a result, as JSON values, and its key: whole, or not at all.

    Raises
    ------
    StorageError
        The disk is full, or refuses.
    """
    write_whole(path, json.dumps({"key": key, field: value}, indent=1))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that none is ever half there.

    Raises
    ------
    StorageError
        The disk is full, or refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"the results cannot be written: {error.strerror}", where=str(path)) from error
