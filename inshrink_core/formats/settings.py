"""What a run says of itself: `inshrink.toml` beside its checkpoints."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inshrink_core.errors import ConfigError, DamagedError
from inshrink_core.formats.disk import Access, is_file

__all__ = ["SETTINGS_NAME", "RunSettings", "read_settings"]

SETTINGS_NAME: Final = "inshrink.toml"
_MAX_BYTES: Final = 1 << 20
_DIRECTIONS: Final = ("lower", "higher")
_KEYS: Final = ("file", "function", "metric", "direction")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run's own evaluator and what it measures; None where the file says nothing.

    Parameters
    ----------
    file
        Python file of the evaluator, relative to the run. Naming it runs nothing: whoever executes it
        must have the user's word.
    function
        The function in it.
    metric
        The metric that counts.
    direction
        ``lower`` or ``higher``: which is better.
    """

    file: str | None = None
    function: str | None = None
    metric: str | None = None
    direction: str | None = None

    def __post_init__(self) -> None:
        for key in _KEYS:
            value = getattr(self, key)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"evaluator.{key} must be text", found=type(value).__name__, expected="str")
        if self.direction is not None and self.direction not in _DIRECTIONS:
            raise ConfigError(
                "evaluator.direction is unknown", expected=" or ".join(_DIRECTIONS), found=self.direction[:40]
            )


def read_settings(directory: Path, access: Access | None = None) -> RunSettings:
    """Return the settings of a run; defaults where there is no file.

    Parameters
    ----------
    directory
        The run.
    access
        Where links may lead; by default into the directory.

    Raises
    ------
    RefusedLinkError
        The file is a link out of the run.
    ConfigError
        The file is no TOML, has an unknown key, or a value of the wrong kind.
    """
    path = directory / SETTINGS_NAME
    if not is_file(path):
        return RunSettings()
    try:
        text = (access or Access.of(directory)).read_text(path, _MAX_BYTES)
    except DamagedError as error:
        raise ConfigError(f"the settings: {error.what}", where=str(path), expected="at most 1 MB") from error
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"no valid TOML: {error}", where=str(path)) from error
    evaluator = table.get("evaluator", {})
    if not isinstance(evaluator, dict):
        raise ConfigError("'evaluator' must be a table", where=str(path))
    unknown = [key for key in table if key != "evaluator"]
    unknown += [f"evaluator.{key}" for key in evaluator if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"unknown key '{unknown[0]}'",
            where=str(path),
            remedy=f"known are evaluator.{{{', '.join(_KEYS)}}}",
        )
    try:
        return RunSettings(**evaluator)
    except ConfigError as error:
        raise ConfigError(error.what, where=str(path), expected=error.expected, found=error.found) from error
