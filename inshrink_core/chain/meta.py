"""What a frame says of itself beside its blocks: checked once, where the frame is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from inshrink_core.archive.layout import damaged
from inshrink_core.chain.base import BASE, is_base_record
from inshrink_core.errors import clipped
from inshrink_core.report import Report

if TYPE_CHECKING:
    from inshrink_core.chain.archive import Archive
    from inshrink_core.frame import FrameInfo

__all__ = [
    "ORIGINALS",
    "QUALITY",
    "TAKEN",
    "DamagedOriginal",
    "OriginalChecks",
    "check_meta",
    "original_checks",
]


ORIGINALS: Final = "originals"
"""Key of meta: which checksums vouched for the files of a frame, and what was damaged and stored so."""

QUALITY: Final = "quality"
"""Key of meta: what a restore of the frame costs by some figures, how that is known (``measured``,
``predicted`` or ``exact``), and what was promised."""

TAKEN: Final = "taken"
"""Key of meta: the step that a tensor is of, by its name, where that is before the frame's own."""

_MOST_SHOWN: Final = 3


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 16


def _is_list_of(value: Any, is_sound: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_sound, value))


def _is_quality(value: Any) -> bool:
    """Whether a value holds words and numbers where they belong."""
    if not isinstance(value, dict) or not isinstance(bounds := value.get("bounds", {}), dict):
        return False
    words = all(isinstance(value.get(name, ""), str) for name in ("how", "why"))
    numbers = [item for name, item in value.items() if name not in ("how", "why", "bounds")]
    return words and all(isinstance(item, float) for item in [*numbers, *bounds.values()])


_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "codec": lambda value: isinstance(value, str),
    "config": lambda value: isinstance(value, dict),
    "overrides": lambda value: _is_list_of(value, lambda item: isinstance(item, dict)),
    "optimizer": lambda value: isinstance(value, str),
    "content": _is_id,
    QUALITY: lambda value: _is_quality(value),
    TAKEN: lambda value: isinstance(value, dict) and all(type(step) is int for step in value.values()),
    "restored": _is_id,
    "rekeyed": _is_id,
    BASE: is_base_record,
    "source": lambda value: _is_list_of(value, _is_id) and len(value) == 2,
}
"""The keys that are read (docs/format.md); others may hold anything."""


def check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Refuse a frame whose meta holds what its keys cannot mean.

    Raises
    ------
    DamagedError
        A value is of another type than the format says.
    """
    for key, is_sound in _KINDS.items():
        if key in meta and not is_sound(meta[key]):
            raise damaged(f"the frame's meta '{key}' is malformed", where, found=repr(meta[key])[:80])


class DamagedOriginal(NamedTuple):
    """Bytes of a step that differed from their checksum when they were archived, by the user's leave.

    `entry` is the entry of the zip, ``""`` for the whole file.
    """

    step: int
    file: str
    entry: str
    offset: int
    nbytes: int

    def __str__(self) -> str:
        held = f" entry '{clipped(self.entry)}'" if self.entry else ""
        return f"step {self.step}: '{clipped(self.file)}'{held}, {self.nbytes} bytes at offset {self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalChecks(Report):
    """What vouched for the originals of some steps.

    Parameters
    ----------
    checked
        Steps of whose files all that hold tensors had checksums, and these matched.
    unchecked
        Steps with a file that has none.
    unknown
        Steps of which nothing was recorded: archived from memory, or before this was recorded.
    kinds
        The kinds of the files without checksums: ``safetensors``, ``torch``.
    damaged
        What did not match and was stored all the same.
    """

    checked: tuple[int, ...] = ()
    unchecked: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    damaged: tuple[DamagedOriginal, ...] = ()

    DOCUMENT: ClassVar = "text checked unchecked unknown damaged"

    @property
    def text(self) -> str:
        """One line for a reader."""
        parts = []
        if self.damaged:
            shown = "; ".join(str(one) for one in self.damaged[:_MOST_SHOWN])
            more = len(self.damaged) - _MOST_SHOWN
            parts.append(f"DAMAGED at {shown}" + (f" and {more:,} more" if more > 0 else ""))
        if self.unchecked:
            why = {"safetensors": "safetensors has none", "torch": "torch.save was told to leave them out"}
            reasons = ", ".join(why.get(kind, clipped(kind)) for kind in self.kinds)
            of = "" if not (self.checked or self.unknown) else f" at {len(self.unchecked)} steps"
            parts.append(f"unchecked{of} ({reasons})")
        if self.unknown:
            of = "" if not (self.checked or self.unchecked) else f" at {len(self.unknown)} steps"
            parts.append(f"not recorded{of}")
        return "; ".join(parts) or "checked"


def original_checks(archive: Archive, frames: Iterable[FrameInfo] | None = None) -> OriginalChecks:
    """Return what is recorded of the originals of some frames, by default of every frame.

    Notes
    -----
    Reads the index of every frame.
    """
    checked, unchecked, unknown, kinds = [], [], [], set[str]()
    damaged: list[DamagedOriginal] = []
    for info in archive.reader.frames if frames is None else frames:
        record = archive.frame(info).meta.get(ORIGINALS)
        if not isinstance(record, Mapping):
            unknown.append(info.step)
            continue
        without = record.get("unchecked")
        without = [kind for kind in without if isinstance(kind, str)] if isinstance(without, list) else []
        kinds.update(without)
        rows = _damaged(info.step, record.get("damaged"))
        damaged += rows
        if without:
            unchecked.append(info.step)
        elif not rows:
            checked.append(info.step)
    return OriginalChecks(
        checked=tuple(checked),
        unchecked=tuple(unchecked),
        unknown=tuple(unknown),
        kinds=tuple(sorted(kinds)),
        damaged=tuple(damaged),
    )


def _damaged(step: int, rows: object) -> list[DamagedOriginal]:
    """Read what a frame says was damaged; what is not of the form is told as far as it goes."""
    if rows is None:
        return []
    found = []
    for row in rows if isinstance(rows, list) else [rows]:
        match row:
            case [str(file), str(entry), int(offset), int(nbytes)]:
                found.append(DamagedOriginal(step, file, entry, offset, nbytes))
            case _:
                found.append(DamagedOriginal(step, "a file that is not named", "", 0, 0))
    return found
