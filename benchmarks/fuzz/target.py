"""What is attacked, and what an attack may come to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

GOOD: Final = ("refused", "same", "different")
"""By a typed error; the result of the untouched input; a valid input of other content."""

BAD: Final = ("silent", "raw", "crash", "hang", "memory", "long")
"""A wrong result without an error; an exception that is not ours; a signal; no end; more memory or disk
than the bound; an error message longer than a screen can show."""

KINDS: Final = (*GOOD, *BAD)


class Target(Protocol):
    """Something that reads bytes from strangers."""

    name: str

    def seeds(self) -> Sequence[bytes]:
        """Return sound inputs; called once, before the workers are forked."""
        ...

    def mutate(self, rng: random.Random) -> bytes:
        """Return one hostile input: the same for the same state of `rng`, whatever came before."""
        ...

    def execute(self, data: bytes) -> str | None:
        """Read an input as a user's call would.

        Returns
        -------
        str or None
            One of `GOOD`; None is ``same``.

        Raises
        ------
        InshrinkError
            The input was refused.
        BrokenPromiseError
            The result is wrong and nothing said so.
        """
        ...


class BrokenPromiseError(Exception):
    """A wrong result without an error.

    Parameters
    ----------
    promise
        Which promise was broken, in a few words that are the same for every case of it.
    detail
        This case.
    """

    def __init__(self, promise: str, detail: str = "") -> None:
        self.promise = promise
        super().__init__(f"{promise}: {detail}" if detail else promise)


def require(holds: object, promise: str, detail: str = "") -> None:
    """Raise `BrokenPromiseError` unless a promise holds."""
    if not holds:
        raise BrokenPromiseError(promise, detail)


class RawError(Exception):
    """An exception that is not ours, which the command line reported as a bug of its own."""

    def __init__(self, message: str, frames: tuple[str, ...]) -> None:
        self.frames = frames
        super().__init__(message)


class Verdict(NamedTuple):
    """What one input came to.

    Parameters
    ----------
    kind
        One of `KINDS`.
    key
        Equal for what is one finding: the kind, the error and the innermost frame of the project.
    message
        The error's.
    frames
        Frames of the project, innermost first.
    cpu_seconds
        Processor time.
    """

    kind: str
    key: str = ""
    message: str = ""
    frames: tuple[str, ...] = ()
    cpu_seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether it is a defect."""
        return self.kind in BAD


def case_rng(target: str, seed: int, case: int) -> random.Random:
    """Return the source of randomness of one case, which depends on no other case."""
    return random.Random(f"{target}/{seed}/{case}")
