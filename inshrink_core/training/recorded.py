"""Names of the parameters that an optimizer numbers, recorded by the training beside a save."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from inshrink_core.execution.files import read_regular
from inshrink_core.formats.assembly import ParsedCheckpoint
from inshrink_core.formats.disk import MAX_JSON_BYTES
from inshrink_core.formats.matching.laws import Matching
from inshrink_core.formats.state_tree import strip_wrappers

PARAMETERS_NAME: Final = "parameters.json"
"""File beside a save in the spool; the archive has its names, not the file."""


def record_of(model: Any, optimizers: Iterable[Any], saved: Mapping[str, str] | None = None) -> bytes:
    """Return the names of every optimizer's parameters by number, and those of the model in its order.

    Parameters
    ----------
    model
        A module, wrapped or not.
    optimizers
        Objects with ``param_groups``, in the order in which their states are saved.
    saved
        Names of parameters in the model's file, where they differ from the model's.
    """
    named = [((saved or {}).get(name, name), parameter) for name, parameter in model.named_parameters()]
    called = {id(parameter): name for name, parameter in named}
    groups = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
    names = [[called.get(id(p), "") for p in params] for params in groups]
    return json.dumps({"optimizers": names, "order": [name for name, _ in named]}).encode()


def as_recorded(parsed: ParsedCheckpoint, folder: Path) -> ParsedCheckpoint:
    """Return a checkpoint with its optimizer state matched by the record in a folder, if that is valid.

    Recorded names that the checkpoint lacks, or has with another shape, are ignored.
    """
    try:
        record = json.loads(read_regular(folder / PARAMETERS_NAME, MAX_JSON_BYTES))
        order = strip_wrappers([str(name) for name in record["order"]])
        stripped = dict(zip(map(str, record["order"]), order, strict=True))
        optimizers = [[stripped.get(name, "") for name in names] for names in record["optimizers"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return parsed
    numbered: dict[int, list[Any]] = {}
    for slot in parsed.slots:
        numbered.setdefault(slot.optimizer, []).append(slot)
    owners: dict[str, str] = {}
    for number, slots in numbered.items():
        names = optimizers[number] if number < len(optimizers) else []
        for slot in slots:
            at = slot.key.rpartition(".")[2]
            is_named = at.isascii() and at.isdigit() and int(at) < len(names)
            name = _known(names[int(at)], parsed.aliases, parsed.free) if is_named else None
            if name is not None and slot.shape in (None, parsed.free[name]):
                owners[slot.key] = name
    taken, listed = set(owners.values()), set(parsed.order)
    rest = {key: name for key, name in parsed.owners.items() if key not in owners and name not in taken}
    found = (_known(name, parsed.aliases, listed) for name in order)
    return parsed.matched(Matching(rest | owners, tuple(name for name in found if name)))


def _known(name: str, aliases: Mapping[str, str], names: Container[str]) -> str | None:
    """Return a checkpoint's name of a parameter that a training may name otherwise: tied, or an adapter."""
    name = aliases.get(name, name)
    if name in names:
        return name
    # peft leaves out the adapter's name: lora_A.default.weight
    parts = name.split(".")
    shorter = (".".join([*parts[:i], *parts[i + 1 :]]) for i in range(len(parts) - 1))
    return next((short for short in shorter if short in names), None)
