"""The library versions that an adapter works with."""

from __future__ import annotations

import importlib
import logging
import re
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from inshrink_core.errors import InputError, MissingExtraError

_logger = logging.getLogger(__name__)


def require(package: str, *, extra: str, oldest: str, tested: str) -> ModuleType:
    """Import the library of an adapter.

    Parameters
    ----------
    package
        Its name.
    extra
        The extra of Inshrink that installs it.
    oldest
        The first version that works.
    tested
        The newest version that is tested; a later minor version logs a warning.

    Raises
    ------
    MissingExtraError
        It is not installed.
    InputError
        It is too old.
    """
    try:
        module = importlib.import_module(package)
        # The distribution may have another name, such as mlflow-skinny.
        found = getattr(module, "__version__", None) or version(package)
    except (PackageNotFoundError, ImportError) as error:
        raise MissingExtraError(package, extra) from error
    if _numbers(found) < _numbers(oldest):
        raise InputError(
            f"this version of {package} is too old",
            expected=f"{oldest} or newer",
            found=found,
            remedy=f"pip install --upgrade 'inshrink[{extra}]'",
        )
    if _numbers(found)[:2] > _numbers(tested)[:2]:
        _logger.warning("%s %s is newer than %s, the last one tested", package, found, tested)
    return module


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
