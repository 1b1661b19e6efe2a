"""Start Python child processes, for the whole project, so that no folder runs code unasked.

A user may work inside a downloaded folder, and Python, numba and others search the working directory for
modules and settings. A child therefore starts with ``-P`` (the working directory and the script's folder are
not searched for modules), in an empty folder of this process, and with

- `minimal_environment`: the variables that this project's own code needs (an allowlist), if no other code
  runs; or
- `user_environment`: all the user's variables, for code that the user has consented to.

Both omit search path entries that depend on the working directory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LD_PRELOAD")
"""Lists of files and folders. An empty or relative entry is resolved in the working directory."""

_FOLDERS = (
    "NUMBA_CACHE_DIR",  # contains pickles, which numba reads
    "PYTHONHOME",
    "PYTHONPYCACHEPREFIX",
    "PYTHONUSERBASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
)
"""Single folders from which code is read; a relative one would depend on the working directory."""

_NEVER = ("PYTHONBREAKPOINT", "PYTHONEXECUTABLE", "PYTHONINSPECT", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__")
"""Variables of interactive sessions, or that name code to execute."""

_ALLOWED = frozenset(
    {
        # user and locale
        *("HOME", "LOGNAME", "USER", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        # locations of Python and its libraries, and encodings
        *(*SEARCH_PATHS, "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONHOME"),
        *("PYTHONIOENCODING", "PYTHONMALLOC", "PYTHONNOUSERSITE", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE"),
        *("PYTHONUTF8", "PYTHONWARNINGS", "VIRTUAL_ENV"),
        "RAY_ADDRESS",
    }
)
_ALLOWED_PREFIXES = (
    "INSHRINK_",
    *("LC_", "XDG_"),
    # threads and arithmetic
    *("GOMP_", "KMP_", "MKL_", "NUMBA_", "NUMEXPR_", "OMP_", "OPENBLAS_", "VECLIB_"),
    # devices
    *("CUBLAS_", "CUDA_", "CUDNN_", "HIP_", "HSA_", "NVIDIA_", "PYTORCH_", "ROCM_", "ROCR_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_"),
)
_STORES = (
    *("AWS_", "AZURE_", "GOOGLE_", "HF_", "HUGGING_FACE_"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_"),
)
"""Credentials for object stores, and proxies."""


def minimal_environment(given: Mapping[str, str] | None = None, *, stores: bool = False) -> dict[str, str]:
    """Return the variables that this project's own code needs, without proxies, keys or passwords by default.

    Parameters
    ----------
    given
        The variables to choose from; by default those of this process.
    stores
        Include the keys and proxies needed to reach buckets.
    """
    known = user_environment(given)
    allowed = {name for name in known if name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)}
    allowed |= {name for name in known if stores and name.upper().startswith(_STORES)}
    return {name: value for name, value in known.items() if name in allowed}


def user_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the user's variables, without those that make Python search the working directory.

    Parameters
    ----------
    given
        The variables to choose from; by default those of this process.
    """
    found = {}
    for name, value in (os.environ if given is None else given).items():
        if name in _NEVER or (name in _FOLDERS and not Path(value).is_absolute()):
            continue
        if name in SEARCH_PATHS:
            entries = [entry for entry in value.split(os.pathsep) if _is_same_location(name, entry)]
            if not entries:
                continue
            value = os.pathsep.join(entries)
        found[name] = value
    return found


def _is_same_location(name: str, entry: str) -> bool:
    """Return whether a search path entry means the same file or folder in every working directory."""
    if name == "LD_PRELOAD":
        # A list, separated by spaces or colons, of paths and of bare library names, which the loader
        # searches.
        return bool(entry) and all(Path(part).is_absolute() or "/" not in part for part in entry.split())
    return Path(entry).is_absolute()


class _Empty:
    """The empty folder of this process, created on first use."""

    lock = threading.Lock()
    path: Path | None = None


def empty_directory() -> Path:
    """Return an empty folder private to this process, the working directory of children.

    It lasts as long as the process, and is recreated if it was removed.
    """
    with _Empty.lock:
        if _Empty.path is None or not _Empty.path.is_dir():
            _Empty.path = Path(tempfile.mkdtemp(prefix="inshrink-empty-"))
            atexit.register(shutil.rmtree, _Empty.path, ignore_errors=True)
        return _Empty.path


def ignore_numba_file() -> None:
    """Import numba in an empty folder, and disable its search for settings in working directories."""
    with contextlib.chdir(empty_directory()):
        from numba.core import config

    config._config_fname = ""


def start_python(
    arguments: Sequence[str],
    *,
    errors: IO[bytes] | int,
    environment: Mapping[str, str],
    directory: Path | None = None,
    new_session: bool = False,
) -> subprocess.Popen[str]:
    """Start Python with ``-P`` and UTF-8 pipes for standard input and output.

    Parameters
    ----------
    arguments
        Arguments after ``-P``. All paths, here and in the input, must be absolute.
    errors
        Destination of standard error; `subprocess.PIPE` for a pipe.
    environment
        `minimal_environment`, or `user_environment` for code that the user consented to.
    directory
        Working directory; by default `empty_directory`.
    new_session
        Put the child and its own children in one group, so that they can be killed together.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        env=dict(environment),
        cwd=empty_directory() if directory is None else directory,
        start_new_session=new_session,
    )
