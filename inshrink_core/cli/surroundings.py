"""Protection against the working directory: no modules, and no settings that lead to code, are used from it.

The working directory is often a downloaded, untrusted folder. The module imports only the standard library,
because it runs before anything else is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import inshrink_core

_NUMBA_FILE = ".numba_config.yaml"
"""Numba reads this file from the working directory; its ``cache_dir`` would make numba load pickles."""


def leave_working_directory() -> None:
    """Remove the working directory from the import path of the command's process, and print a note.

    Python adds it for ``python -m``, and for an empty or relative entry of ``PYTHONPATH``. Modules that
    Python imports before the first line of this code still come from there; only the command `inshrink` and
    ``python -P``, which never search there, prevent that. The same folder as an absolute entry of
    ``PYTHONPATH`` is kept, because the user chose it.
    """
    reasons = _reasons()
    found = [place for place, path in enumerate(sys.path) if _is_here(path)][: len(reasons)]
    if found:
        sys.path[:] = [path for place, path in enumerate(sys.path) if place not in found]
        ours = Path(inshrink_core.__file__).parent
        _say(
            f"{' and '.join(reasons)}: inshrink_core is imported from {ours}, and nothing more is "
            "imported from the working directory; in folders of others use the command inshrink"
        )
    if Path(_NUMBA_FILE).is_file():
        _without_numba_file()


def _reasons() -> list[str]:
    """Return why the working directory is on the import path: one reason per entry."""
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    reasons = []
    if getattr(specification, "name", "") == "inshrink_core.cli.__main__" and not sys.flags.safe_path:
        reasons.append("started with python -m")
    paths = os.environ.get("PYTHONPATH")
    if paths and any(not Path(entry).is_absolute() for entry in paths.split(os.pathsep)):
        reasons.append("PYTHONPATH has an entry that is empty or relative")
    return reasons


def _is_here(path: str) -> bool:
    """Return whether an entry of the import path is the working directory, under any name."""
    try:
        return Path(path or os.curdir).samefile(os.curdir)
    except OSError:
        return False


def _without_numba_file() -> None:
    """Make numba ignore its settings file in the working directory, and print a note."""
    from inshrink_core.execution.process import ignore_numba_file

    _say(f"{_NUMBA_FILE} of the working directory is ignored; set NUMBA_… variables instead")
    ignore_numba_file()


def _say(text: str) -> None:
    """Print a note to stderr, before the console is available."""
    sys.stderr.write(f"note: {text}\n")
