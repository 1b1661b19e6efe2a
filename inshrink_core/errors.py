"""Every exception Inshrink raises on purpose, chosen by what the caller can do about it.

The class decides the exit code of the command line: 1 a check failed, 2 the user's input, 3 damaged
data. A message says what is wrong, where (file, frame, tensor, offset), what was expected and found,
and what to do; `InshrinkError` puts the parts together so that every message reads alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from pathlib import Path


_MOST_SIGNS: Final = {"what": 1600, "where": 1200, "expected": 300, "found": 300, "remedy": 600}
"""Of each part of a message; of all together below 4,096, a screen."""

STANDS_FOR: Final[dict[str, str]] = {}
"""Local folders that stand for what lies elsewhere, and its address: messages speak of that."""

_MOST_NAMES: Final = 12
_MOST_SIGNS_OF_A_NAME: Final = 100


def clipped(text: str, most: int = _MOST_SIGNS_OF_A_NAME) -> str:
    """Return a text of at most so many signs: the middle of a longer one is left out.

    Examples
    --------
    >>> clipped("a" * 30, 9)
    'aaaa…aaaa'
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[len(text) - half :]}"


def named(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """Return the first of some names for a message, each clipped, and how many more there are.

    Examples
    --------
    >>> named(("a", "b", "c"), 2)
    'a, b and 1 more'
    """
    shown = ", ".join(clipped(name) for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


_RUNS_NOTHING: Final = "Inshrink never runs code from a checkpoint; save the tensors alone and try again"


def spoken(text: str) -> str:
    """Return a text with addresses in the place of the local folders that stand for them."""
    for folder, address in tuple(STANDS_FOR.items()):
        text = text.replace(folder, address)
    return text


class InshrinkError(Exception):
    """Base of every deliberate error; never raised itself.

    Parameters
    ----------
    what
        The problem in one clause, without a final full stop.
    where
        The file, frame or tensor it concerns; empty when `what` says it.
    expected, found
        What should have been there and what was; a message names those that are given.
    remedy
        What the user can do next.

    Attributes
    ----------
    report
        What was done all the same, as the verb returns it otherwise; None where that is nothing.
    """

    exit_code: ClassVar[int] = 2
    report: Any = None

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", found: str = "", remedy: str = ""
    ) -> None:
        # Whatever a hostile file puts into a message, it stays one that can be read.
        parts = {"what": what, "where": where, "expected": expected, "found": found, "remedy": remedy}
        what, where, expected, found, remedy = (
            clipped(spoken(text), _MOST_SIGNS[part]) for part, text in parts.items()
        )
        self.what, self.where, self.expected, self.found, self.remedy = (what, where, expected, found, remedy)
        message = f"{where}: {what}" if where else what
        sides = [f"{name} {value}" for name, value in (("expected", expected), ("found", found)) if value]
        if sides:
            message += f" ({', '.join(sides)})"
        if remedy:
            message += f"; {remedy}"
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show its repr

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it holds: classes are made of other arguments than the message."""
        return _as_it_was, (type(self), self.args), self.__dict__


def _as_it_was(error: type[InshrinkError], args: tuple[Any, ...]) -> InshrinkError:
    """Return an error of another process."""
    made = error.__new__(error)
    made.args = args
    return made


class InputError(InshrinkError, ValueError):
    """Fix an argument: what was asked for cannot be done as asked."""


class ConfigError(InputError):
    """Fix the config: an unknown key or a value out of range."""


class NotFoundError(InputError, KeyError):
    """A path, step or tensor that is not there."""


class NotCheckpointError(InputError):
    """Not a checkpoint, whatever its name says: its content is of another kind, or holds no tensor."""


class ExistsError(InputError):
    """The target exists already and would be overwritten."""


class BaseModelError(InputError):
    """Give the base model: a step is encoded relative to it, and it is not there, or is another one."""


class StepConflictError(InputError):
    """The step is in the archive already, with other values."""


class UnsafePickleError(InputError):
    """A pickle that wants to import more than the allowlist holds.

    Parameters
    ----------
    wanted
        The dotted names it wanted to import, sorted; the message has the first of them.
    """

    def __init__(
        self, what: str, *, where: str = "", wanted: tuple[str, ...] = (), remedy: str = _RUNS_NOTHING
    ) -> None:
        self.wanted = wanted
        super().__init__(f"{what}: {named(wanted)}" if wanted else what, where=where, remedy=remedy)


class RefusedLinkError(InputError):
    """A link of a run that leads out of it, where tensors or the run itself are expected."""


class UnsafePathError(InputError):
    """A name from an archive that would leave the target directory."""


class UntrustedCodeError(InputError):
    """Code of a run that the user has not said to trust."""


class EvaluatorError(InputError):
    """The user's evaluator raised, hung or returned something unusable."""


class NotFiniteError(EvaluatorError):
    """The metric of a state is NaN or infinite."""


class LockedError(InputError):
    """Another process is writing the archive."""


class ConflictError(LockedError):
    """Another writer changed the archive meanwhile; what it wrote stays."""


class MissingExtraError(InputError):
    """An optional dependency is not installed.

    Parameters
    ----------
    package
        The import that failed.
    extra
        The extra of Inshrink that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package '{package}', which is not installed",
            remedy=f"run: pip install 'inshrink[{extra}]'",
        )


class IncompatibleError(InputError):
    """Upgrade: the data was written by a newer version, or by a codec that is not installed."""


class EngineError(InputError):
    """Workers died again and again, or cannot be reached: what they had finished is kept."""


class StorageError(InputError):
    """The disk is full, the target read-only, or the file system refused."""


class TooLargeError(InputError):
    """More memory or disk than there is, or than was allowed; raised before any of it is taken.

    Parameters
    ----------
    needed, limit
        Bytes that it would take, and that it may take.
    """

    def __init__(
        self, what: str, *, where: str = "", needed: int, limit: int, expected: str = "", remedy: str = ""
    ) -> None:
        self.needed, self.limit = needed, limit
        super().__init__(what, where=where, expected=expected, remedy=remedy)


class CheckFailedError(InshrinkError):
    """A check the user asked for did not pass."""

    exit_code = 1


class UnreadableError(CheckFailedError):
    """Checkpoints of a run cannot be read; everything else was done, as its `report` says."""


class UnreadableStepError(UnreadableError, InputError):
    """A step that was asked for is one of the checkpoints that cannot be read."""

    exit_code = 2


class DamagedError(InshrinkError):
    """Restore a backup: bytes are missing, changed or contradict each other."""

    exit_code = 3


class RottenError(DamagedError):
    """Bytes of a finished file differ from the checksum that was written with them.

    Parameters
    ----------
    path
        The file.
    offset
        First byte that the checksum covers.
    tensors
        Keys of the tensors among these bytes.
    """

    def __init__(
        self,
        what: str,
        *,
        path: Path,
        offset: int,
        tensors: tuple[str, ...] = (),
        expected: str = "",
        found: str = "",
    ) -> None:
        self.path, self.offset, self.tensors = path, offset, tensors
        holds = f", which holds {named(tensors)}" if tensors else ""
        super().__init__(
            f"{what}, at offset {offset}{holds}",
            where=str(path),
            expected=expected,
            found=found,
            remedy="restore the file from a backup; --allow-damaged archives it as it is, and says so",
        )


class MissingFrameError(DamagedError):
    """Fetch the rest: a frame that others need as their reference is not there."""
