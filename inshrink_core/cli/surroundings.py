"""What the working directory may not do: lend us modules, or settings that lead to code.

Whoever inspects a downloaded folder is most often in it. Standard library only, because this runs before
anything else is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import inshrink_core

_NUMBA_FILE = ".numba_config.yaml"
"""Numba obeys it in whatever folder it is used from; ``cache_dir`` makes it read pickles from there."""


def leave_working_directory() -> None:
    """Take the working directory off the import path of a process that is ours, and say so.

    Python puts it there for ``python -m`` and for an entry of ``PYTHONPATH`` that is empty or relative. What
    Python itself imports before the first line of ours it takes from there all the same; only the command
    `inshrink` and ``python -P``, which never look there, help against that. The same folder named in full
    in ``PYTHONPATH`` stays: whoever wrote that meant it.
    """
    reasons = _reasons()
    found = [place for place, path in enumerate(sys.path) if _is_here(path)][: len(reasons)]
    if found:
        sys.path[:] = [path for place, path in enumerate(sys.path) if place not in found]
        ours = Path(inshrink_core.__file__).parent
        _say(
            f"{' and '.join(reasons)}: inshrink_core is imported from {ours}, and from now on nothing from "
            "the working directory; in folders of others use the command inshrink"
        )
    if Path(_NUMBA_FILE).is_file():
        _without_numba_file()


def _reasons() -> list[str]:
    """Return why the working directory is searched for modules: one for each entry of the import path."""
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    reasons = []
    if getattr(specification, "name", "") == "inshrink_core.cli.__main__" and not sys.flags.safe_path:
        reasons.append("started with python -m")
    paths = os.environ.get("PYTHONPATH")
    if paths and any(not Path(entry).is_absolute() for entry in paths.split(os.pathsep)):
        reasons.append("PYTHONPATH has an entry that is empty or relative")
    return reasons


def _is_here(path: str) -> bool:
    """Tell whether an entry of the import path is the working directory, under whatever name."""
    try:
        return Path(path or os.curdir).samefile(os.curdir)
    except OSError:
        return False


def _without_numba_file() -> None:
    """Say that numba will find no settings here, and see to it."""
    from inshrink_core.execution.process import ignore_numba_file

    _say(f"{_NUMBA_FILE} of the working directory is not obeyed; set NUMBA_… variables instead")
    ignore_numba_file()


def _say(text: str) -> None:
    """Tell the terminal, before there is anything that could do so better."""
    sys.stderr.write(f"note: {text}\n")
