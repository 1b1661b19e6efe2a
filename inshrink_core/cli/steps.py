"""Steps as they are written on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from inshrink_core.errors import InputError, NotFoundError

__all__ = ["STEPS_HELP", "choose_steps"]

STEPS_HELP = "A step, a list 100,200, or a range FIRST:LAST[:EVERY], both ends included; may be repeated."

_MOST_DIGITS = 19
"""Of the largest step an archive can hold, 2^63 - 1."""


def choose_steps(texts: Sequence[str], available: Sequence[int], where: str) -> tuple[int, ...] | None:
    """Return the steps that some options name, ascending; None where there are no options.

    Parameters
    ----------
    texts
        Values of the option: ``100``, ``100,200``, ``100:500``, ``:500``, ``100:``, ``0:500:5``.
    available
        Every step there is. Steps of a range come from these; a step named by itself is passed on
        even if it is not there, so that whoever reads it can say so.
    where
        The run or archive, for messages.

    Raises
    ------
    InputError
        Not a step, a list or a range.
    NotFoundError
        A range without any step in it.

    Examples
    --------
    >>> choose_steps(["100:300:2", "7"], range(0, 1000, 100), "run")
    (7, 100, 300)
    """
    chosen: set[int] = set()
    for text in texts:
        for part in text.split(","):
            chosen.update(_expand(part.strip(), available, where))
    return tuple(sorted(chosen)) if texts else None


def _expand(text: str, available: Sequence[int], where: str) -> Sequence[int]:
    """Return the steps of one step or range."""
    fields = text.split(":")
    if len(fields) > 3 or (len(fields) == 1 and not text):
        raise _unreadable(text)
    numbers = [_number(field, text) for field in fields]
    if len(fields) == 1:
        return [number for number in numbers if number is not None]
    first, last = numbers[0], numbers[1]
    every = numbers[2] if len(numbers) == 3 and numbers[2] is not None else 1
    if every < 1:
        raise _unreadable(text)
    within = [
        step for step in available if (first is None or step >= first) and (last is None or step <= last)
    ]
    if not within:
        raise NotFoundError(
            f"there is no step in the range {text}",
            where=where,
            remedy=f"it has {available[0]} to {available[-1]}" if available else "it has no steps",
        )
    return within[::every]


def _number(field: str, text: str) -> int | None:
    """Return a number of a range; None where it was left out."""
    if not field:
        return None
    if not field.isascii() or not field.isdigit() or len(field) > _MOST_DIGITS:
        raise _unreadable(text)
    return int(field)


def _unreadable(text: str) -> InputError:
    return InputError(
        f"'{text}' is neither a step nor a range", remedy="write 400, 100,200 or FIRST:LAST[:EVERY]"
    )
