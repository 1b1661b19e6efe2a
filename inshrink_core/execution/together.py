"""Processes that torchrun started for one command: their arguments and barriers."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Final, TypeVar, cast

_Value = TypeVar("_Value")

_VERBS: Final = {"compress": True, "restore": True, "verify": False}
"""Verbs that take a part of the work, and whether they work with threads."""

_PATIENCE: Final = timedelta(days=30)
"""A process that ends with an error ends the others, so none waits in vain."""

_is_ours = False
"""Whether the group of processes was made here."""


def is_together(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun started this process, and others beside it."""
    known = os.environ if environment is None else environment
    return "TORCHELASTIC_RUN_ID" in known and known.get("WORLD_SIZE", "1") != "1"


def words_together(words: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the words of a command as this process of torchrun takes them.

    Each process takes its part, and its share of the processors; the first alone shows something.

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


def meet(environment: MutableMapping[str, str] | None = None) -> bool:
    """Wait until every process is here; tell whether this is the one that speaks for all.

    A process that is alone need not wait.
    """
    if not is_together(environment):
        return True
    from torch import distributed

    global _is_ours
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=_PATIENCE)
        _is_ours = True
    distributed.barrier()
    return distributed.get_rank() == 0


def gathered(value: _Value) -> list[_Value]:
    """Return what each process has of something, by its number; where there is one process, its own."""
    if not is_together():
        return [value]
    meet()
    from torch import distributed

    values: list[_Value | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return cast("list[_Value]", values)


def part_ways() -> None:
    """Leave the others, where `meet` joined them; what a training has joined stays as it is."""
    global _is_ours
    if _is_ours:
        from torch import distributed

        _is_ours = False
        distributed.destroy_process_group()
