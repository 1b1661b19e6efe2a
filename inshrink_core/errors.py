"""Exceptions of Inshrink, one class per remedy.

The class determines the exit code of the command line: 1 a check failed, 2 the user's input, 3 damaged data.
A message states the problem, the place (file, frame, tensor, offset), the expected and the found value, and a
remedy; `InshrinkError` assembles these parts in a common form.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

_MAX_SIGNS: Final = {"what": 1600, "where": 1200, "expected": 300, "found": 300, "remedy": 600}
"""Most characters of each part of a message; in all below 4,096, which fits a screen."""

REMOTE_ADDRESSES: Final[dict[str, str]] = {}
"""Addresses of remote data by the local folder that caches it: messages show the address."""

_MAX_NAMES: Final = 12
_MAX_SIGNS_OF_A_NAME: Final = 100


def clipped(text: str, most: int = _MAX_SIGNS_OF_A_NAME) -> str:
    """Return a text of at most `most` characters; the middle of a longer one is replaced by an ellipsis.

    The middle carries least information in dotted parameter names and in paths.

    Examples
    --------
    >>> clipped("transformer.h.11.mlp.weight", 11)
    'trans…eight'
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[len(text) - (most - 1 - half) :]}"


def named(names: Sequence[str], most: int = _MAX_NAMES) -> str:
    """Return the first names for a message, each clipped, and the number of the others.

    Examples
    --------
    >>> named(("a", "b", "c"), 2)
    'a, b and 1 more'
    """
    shown = ", ".join(clipped(name) for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


_RUNS_NOTHING: Final = "Inshrink never runs code from a checkpoint; save the tensors alone and try again"


def spoken(text: str) -> str:
    """Return a text with the local folders of `REMOTE_ADDRESSES` replaced by their addresses."""
    for folder, address in tuple(REMOTE_ADDRESSES.items()):
        text = text.replace(folder, address)
    return text


class InshrinkError(Exception):
    """Base class of all errors of Inshrink; never raised itself.

    Parameters
    ----------
    what
        The problem in one clause, without a final full stop.
    where
        The file, frame or tensor concerned; empty if `what` names it.
    expected, found
        Expected and found value; the message shows those that are given.
    remedy
        What the user can do next.

    Attributes
    ----------
    report
        The verb's report on the work done before the error; None without one.
    """

    exit_code: ClassVar[int] = 2
    report: Any = None

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", found: str = "", remedy: str = ""
    ) -> None:
        # Clipping keeps a message readable, even if a hostile file supplies parts of it.
        parts = {"what": what, "where": where, "expected": expected, "found": found, "remedy": remedy}
        what, where, expected, found, remedy = (
            clipped(spoken(text), _MAX_SIGNS[part]) for part, text in parts.items()
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
        """Pickle the state: the message is not what subclasses take as arguments."""
        return _as_it_was, (type(self), self.args), self.__dict__


def _as_it_was(error: type[InshrinkError], args: tuple[Any, ...]) -> InshrinkError:
    """Return an unpickled error, without a call of its constructor."""
    made = error.__new__(error)
    made.args = args
    return made


class InputError(InshrinkError, ValueError):
    """Fix an argument: the request is not possible as given."""


class ConfigError(InputError):
    """Fix the config: an unknown key or a value out of range."""


class NotFoundError(InputError, KeyError):
    """A path, step or tensor does not exist."""


class NotCheckpointError(InputError):
    """The file is not a checkpoint: its content is of another kind, or holds no tensor."""


class ExistsError(InputError):
    """The target exists already and would be overwritten."""


class BaseModelError(InputError):
    """Provide the base model: a step is encoded relative to it, and it is missing or another one."""


class StepConflictError(InputError):
    """The archive holds the step already, with other values."""


class UnsafePickleError(InputError):
    """A pickle needs imports that are not on the allowlist.

    Parameters
    ----------
    wanted
        The dotted names of these imports, sorted; the message shows the first ones.
    """

    def __init__(
        self, what: str, *, where: str = "", wanted: tuple[str, ...] = (), remedy: str = _RUNS_NOTHING
    ) -> None:
        self.wanted = wanted
        super().__init__(f"{what}: {named(wanted)}" if wanted else what, where=where, remedy=remedy)


class RefusedLinkError(InputError):
    """A link leads out of a run, where tensors or the run itself are expected."""


class UnsafePathError(InputError):
    """A name from an archive leads out of the target directory."""


class UntrustedCodeError(InputError):
    """Code of a run needs the user's consent to be executed."""


class EvaluatorError(InputError):
    """The user's evaluator raised, hung or returned something unusable."""


class NotFiniteError(EvaluatorError):
    """The metric of a state is NaN or infinite."""


class LockedError(InputError):
    """Another process is writing the archive."""


class ConflictError(LockedError):
    """Another writer changed the archive meanwhile; its changes are kept."""


class MissingExtraError(InputError):
    """An optional dependency is not installed.

    Parameters
    ----------
    package
        The import that failed.
    extra
        The extra of Inshrink that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package '{package}', which is not installed",
            remedy=f"run: pip install 'inshrink[{extra}]'",
        )


class IncompatibleError(InputError):
    """Upgrade: the data was written by a newer version, or by a codec that is not installed."""


class EngineError(InputError):
    """Workers died repeatedly, or cannot be reached; finished work is kept."""


class StorageError(InputError):
    """The disk is full, the target read-only, or the file system refused."""


class TooLargeError(InputError):
    """More memory or disk is needed than is available or allowed; raised before any is taken."""


class CheckFailedError(InshrinkError):
    """A check that the user requested failed."""

    exit_code = 1


class UnreadableError(CheckFailedError):
    """Checkpoints of a run cannot be read; the `report` describes everything else, which was done."""


class UnreadableStepError(UnreadableError, InputError):
    """A requested step is one of the checkpoints that cannot be read."""

    exit_code = 2


class DamagedError(InshrinkError):
    """Restore a backup: bytes are missing, changed or contradict each other."""

    exit_code = 3


class ChecksumError(DamagedError):
    """Bytes of a file differ from the checksum that was written with them.

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
        holds = f", which holds {named(tensors)}" if tensors else ""
        super().__init__(
            f"{what}, at offset {offset}{holds}",
            where=str(path),
            expected=expected,
            found=found,
            remedy="restore the file from a backup; --allow-damaged archives it and records the damage",
        )


class MissingFrameError(DamagedError):
    """Fetch the missing files: a frame that others need as their reference is missing."""
