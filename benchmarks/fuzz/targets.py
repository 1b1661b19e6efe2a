"""Everything that is attacked."""

from __future__ import annotations

from benchmarks.fuzz import archive_target, folder_target, input_target, payloads
from benchmarks.fuzz.target import Target


def all_targets() -> list[Target]:
    """Return every target: archives, what people give us, whole runs, and each codec's payloads."""
    return [
        *archive_target.targets(),
        *input_target.targets(),
        folder_target.WholeRunTarget(),
        payloads.PayloadTarget(),
    ]


def named(names: tuple[str, ...]) -> list[Target]:
    """Return the targets of these names; all of them where none is named.

    Raises
    ------
    ValueError
        There is no such target.
    """
    found = {target.name: target for target in all_targets()}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no target is called {', '.join(unknown)}; there are {', '.join(found)}")
    return [found[name] for name in names] if names else list(found.values())
