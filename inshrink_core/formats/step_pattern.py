"""Step patterns, with which the user specifies how names contain the step."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.errors import ConfigError, clipped

_DECIMAL: Final = re.compile(r"\d+(\.\d+)*")

_STEP_PART: Final = "{step}"
_LONGEST_PATTERN: Final = 255
"""Maximum length of a file name."""


class NamedStep(NamedTuple):
    """The step in a checkpoint's name, or the reason why it has none: either `step` or `reason` is set."""

    name: str
    step: int | None
    reason: str = ""


def name_shape(name: str) -> str:
    """Return a name with its numbers replaced by ``*``; checkpoints of one series share it.

    Examples
    --------
    >>> name_shape("epoch=3-step=400.ckpt"), name_shape("last.ckpt")
    ('epoch=*-step=*.ckpt', 'last.ckpt')
    """
    return _DECIMAL.sub("*", name)


def suggest_step_pattern(names: Sequence[str]) -> str:
    """Return the step pattern that matches most names, preferably in ascending order; empty if none.

    Parameters
    ----------
    names
        File or directory names in natural order.

    Examples
    --------
    >>> suggest_step_pattern(["model_ep07_acc0.91.pt", "model_ep08_acc0.9.pt"])
    'model_ep{step}_acc*.pt'
    """
    first = next((name for name in names if _DECIMAL.search(name)), "")
    numbers = [found for found in _DECIMAL.finditer(first) if found.group().isdigit()]
    sides = [(first[: found.start()], first[found.end() :]) for found in numbers]
    patterns = [_STEP_PART.join(_DECIMAL.sub("*", part) for part in both) for both in sides]

    def merit(pattern: str) -> tuple[int, bool]:
        steps = [row.step for row in steps_by_pattern(names, pattern) if row.step is not None]
        return len(steps), steps == sorted(steps)

    return max(reversed(patterns), key=merit, default="")


def split_step_pattern(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return a path and its step pattern, if its last part is one; otherwise the path and None.

    The name of an existing file is no pattern.

    Examples
    --------
    >>> split_step_pattern("runs/a/model_ep{step}_*.pt")
    (PosixPath('runs/a'), 'model_ep{step}_*.pt')
    """
    named = Path(path)
    if _STEP_PART not in named.name or os.path.lexists(named):
        return named, None
    return named.parent, named.name


def compile_step_pattern(pattern: str) -> re.Pattern[str]:
    """Return a step pattern as a regular expression with one group.

    Parameters
    ----------
    pattern
        A full name in which ``{step}`` matches the number and ``*`` matches anything.

    Raises
    ------
    ConfigError
        The pattern is invalid.

    Notes
    -----
    Patterns are untrusted: matching takes time proportional to the name's length times the pattern's.

    Examples
    --------
    >>> compile_step_pattern("model_ep{step}_*.pt").search("model_ep07_acc0.91.pt").group(1)
    '07'
    """
    if pattern.count(_STEP_PART) != 1 or len(pattern) > _LONGEST_PATTERN:
        what, expected = "a step pattern is a name with one {step}", "such as 'model_ep{step}_*.pt'"
        raise ConfigError(what, expected=expected, found=clipped(pattern))

    def literal(text: str) -> str:
        number = r"(\d{1,18})(?!\d)"
        at_start = r"(?<!\d)" if text.startswith(_STEP_PART) else ""
        return at_start + number.join(map(re.escape, text.split(_STEP_PART)))

    first, *others = pattern.split("*")
    # Parts between two stars match at their first position: backtracking would find no further matches.
    middle = "".join(f"(?>.*?{literal(text)})" for text in others[:-1] if text)
    end = f".*{literal(others[-1])}" if others else ""
    return re.compile(rf"\A{literal(first)}{middle}{end}\Z", re.DOTALL | re.ASCII)


def steps_by_pattern(names: Sequence[str], pattern: str) -> tuple[NamedStep, ...]:
    """Return the steps that a pattern finds in names, and the reason for each name without one.

    Parameters
    ----------
    names
        File or directory names in natural order.
    pattern
        As for `compile_step_pattern`.

    Raises
    ------
    ConfigError
        The pattern is invalid.

    Examples
    --------
    >>> for row in steps_by_pattern(["a_1.pt", "b_1.pt", "best.pt"], "*_{step}.pt"):
    ...     print(row.step or row.reason)
    1
    step 1 is in a_1.pt already
    its name does not match the step pattern '*_{step}.pt'
    """
    search = compile_step_pattern(pattern).search
    holders: dict[int, str] = {}
    rows = []
    for name in names:
        found, reason = search(name), ""
        step = int(found[1]) if found else None
        if step is None:
            reason = f"its name does not match the step pattern '{pattern}'"
        elif step in holders:
            reason = f"step {step} is in {holders[step]} already"
        else:
            holders[step] = name
        rows.append(NamedStep(name, None if reason else step, reason))
    return tuple(rows)
