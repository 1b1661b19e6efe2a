"""Processes that torchrun started for one command: their arguments and barriers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeVar, cast

_Value = TypeVar("_Value")

_VERBS: Final = {"compress": True, "restore": True, "verify": False}
"""Verbs that split their work between processes, and whether they take a number of threads."""

_PATIENCE: Final = timedelta(days=30)
"""A process that ends with an error ends the others, so no process waits in vain."""

_is_ours = False
"""Whether this module created the process group."""


def is_together(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun started several processes, including this one."""
    known = os.environ if environment is None else environment
    return "TORCHELASTIC_RUN_ID" in known and known.get("WORLD_SIZE", "1") != "1"


def words_together(words: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the arguments of a command for this process of torchrun.

    Each process takes its part, and its share of the processors; only the first prints output.

    Examples
    --------
    >>> world = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    >>> words_together(["verify", "a.inshrink"], world)
    ['verify', 'a.inshrink', '--part', 'auto', '--quiet']
    """
    known = os.environ if environment is None else environment
    line = list(words)
    if not is_together(known) or not line or line[0] not in _VERBS or {"-h", "--help"} & {*line}:
        return line
    given = {word.partition("=")[0] for word in line}
    if "--part" not in given:
        line += ["--part", "auto"]
    if _VERBS[line[0]] and "--threads" not in given:
        beside = int(known.get("LOCAL_WORLD_SIZE", "1"))
        line += ["--threads", str(max(1, (os.cpu_count() or 1) // max(1, beside)))]
    if known.get("RANK") != "0":
        line = [word for word in line if word != "--json"]
        line.append("--quiet")
    return line


def meet() -> bool:
    """Wait for all processes (a barrier); return whether this is the first one, which acts for all.

    A single process does not wait.
    """
    if not is_together():
        return True
    from torch import distributed

    global _is_ours
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=_PATIENCE)
        _is_ours = True
    distributed.barrier()
    return distributed.get_rank() == 0


def gathered(value: _Value) -> list[_Value]:
    """Return the values of all processes, by rank (an all-gather); a single process gets its own value."""
    if not is_together():
        return [value]
    meet()
    from torch import distributed

    values: list[_Value | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return cast("list[_Value]", values)


def leave_group() -> None:
    """Destroy the process group that `meet` created; a group of the training stays."""
    global _is_ours
    if _is_ours:
        from torch import distributed

        _is_ours = False
        distributed.destroy_process_group()
