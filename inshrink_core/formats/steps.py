"""Which training step each checkpoint of a run is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from inshrink_core.errors import ConfigError

__all__ = ["StepChoice", "compile_step_pattern", "natural_key", "number_steps", "step_in_name"]

_WORDS: Final = ("global_step", "step", "iteration", "iter", "checkpoint", "ckpt", "epoch")
"""In the order of precedence: of ``epoch=3-step=400`` the step is 400."""

_NAMED: Final = tuple(
    re.compile(rf"(?:^|[^a-z]){word}s?[-_=. ]?(\d{{1,18}})", re.IGNORECASE) for word in _WORDS
)
_NUMBER: Final = re.compile(r"\d{1,18}")
_DIGITS: Final = re.compile(r"(\d+)")


class StepChoice(NamedTuple):
    """Steps of checkpoints in the order given, and where they come from, for the user to read."""

    steps: tuple[int, ...]
    origin: str


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders ``step-9`` before ``step-10``."""
    return tuple(
        (0, int(part[:4000]), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )


def step_in_name(name: str) -> int | None:
    """Return the step a file's name tells, or None.

    Examples
    --------
    >>> step_in_name("epoch=3-step=400.ckpt"), step_in_name("model_0200.pt"), step_in_name("last.pt")
    (400, 200, None)
    """
    for pattern in _NAMED:
        if found := pattern.search(name):
            return int(found.group(1))
    stem = re.sub(r"(-v\d+)?\.[a-z]\w*$", "", name)
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def compile_step_pattern(pattern: str) -> re.Pattern[str]:
    """Return the user's pattern, checked.

    Raises
    ------
    ConfigError
        It is no regular expression, or has not exactly one group.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the step pattern is no regular expression: {error}", found=pattern) from error
    if compiled.groups != 1:
        raise ConfigError(
            "the step pattern must have one group, the number",
            expected=r"such as 'step-(\d+)'",
            found=pattern,
        )
    return compiled


def _from_pattern(names: Sequence[str], pattern: str) -> list[int | None]:
    compiled = compile_step_pattern(pattern)
    found = [compiled.search(name) for name in names]
    texts = [match.group(1) or "" if match else "" for match in found]
    return [int(t) if t.isascii() and t.isdigit() and len(t) < 19 else None for t in texts]


def _from_keys(keys: Sequence[tuple[tuple[str, int], ...]]) -> tuple[list[int | None], str]:
    """Prefer a key that all checkpoints have, so that epochs and steps do not mix."""
    shared = [key for key, _ in keys[0] if all(key in dict(k) for k in keys)] if keys else []
    if shared:
        return [dict(k)[shared[0]] for k in keys], f"the key '{shared[0]}'"
    return [k[0][1] if k else None for k in keys], "keys in the files"


def number_steps(
    names: Sequence[str], keys: Sequence[tuple[tuple[str, int], ...]], pattern: str | None = None
) -> StepChoice:
    """Return the step of every checkpoint.

    Parameters
    ----------
    names
        File or directory names in natural order.
    keys
        For each, the step keys found inside with their values, in order of precedence.
    pattern
        Regular expression with one group that overrides everything for the names it matches.

    Returns
    -------
    StepChoice
        Inside keys first; then names, also where the keys repeat but the names do not (several saves
        in one epoch); else the position in natural order.
    """
    named = [step_in_name(name) for name in names]
    if pattern is not None:
        by_pattern = _from_pattern(names, pattern)
        if all(step is not None for step in by_pattern):
            return StepChoice(tuple(s for s in by_pattern if s is not None), "the pattern given")
        missing = next(n for n, s in zip(names, by_pattern, strict=True) if s is None)
        raise ConfigError("the step pattern matches no number in a name", where=missing, found=pattern)
    inside, origin = _from_keys(keys)
    distinct_names = None not in named and len(set(named)) == len(names)
    if None not in inside and (len(set(inside)) == len(names) or not distinct_names):
        return StepChoice(tuple(s for s in inside if s is not None), origin)
    if distinct_names:
        return StepChoice(tuple(s for s in named if s is not None), "names")
    mixed = [a if a is not None else b for a, b in zip(inside, named, strict=True)]
    if None not in mixed:
        return StepChoice(tuple(s for s in mixed if s is not None), "keys in the files and names")
    return StepChoice(tuple(range(len(names))), "the natural order of names: no number was found")
