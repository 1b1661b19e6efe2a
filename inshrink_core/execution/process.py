"""Child processes: the one way in which the project starts Python, so that no folder runs code unasked.

Whoever works inside of a downloaded folder has it as working directory, and Python, numba and others look
there for modules and settings. A child therefore starts with ``-P`` (the working directory and the script's
folder are not searched for modules), in a folder that holds nothing of anybody else's, and with

- `minimal_environment`: what this project's own code needs (an allowlist), where nothing else runs; or
- `user_environment`: all the user's variables, where code runs that the user has consented to.

From both, entries of search paths that mean another folder in every working directory are taken out.
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
"""Lists of files and folders. An entry that is empty or relative is searched for in the working directory."""

_FOLDERS = (
    "NUMBA_CACHE_DIR",  # holds pickles, which numba reads
    "PYTHONHOME",
    "PYTHONPYCACHEPREFIX",
    "PYTHONUSERBASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
)
"""Single folders that code is read from; a relative one would be another one for every working directory."""

_NEVER = ("PYTHONBREAKPOINT", "PYTHONEXECUTABLE", "PYTHONINSPECT", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__")
"""Variables that are about a session at a keyboard, or that name what to execute."""

_ALLOWED = frozenset(
    {
        # who and where
        *("HOME", "LOGNAME", "USER", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        # what Windows cannot start a process without
        *("APPDATA", "COMSPEC", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATHEXT", "PROGRAMDATA"),
        *("PROGRAMFILES", "SYSTEMDRIVE", "SYSTEMROOT", "USERNAME", "USERPROFILE", "WINDIR"),
        # places of Python and its libraries, and its encodings
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
"""Who one is to stores of objects, and the way there."""


def minimal_environment(given: Mapping[str, str] | None = None, *, stores: bool = False) -> dict[str, str]:
    """Return the variables that this project's own code needs; no proxy, no key and no password among them.

    Parameters
    ----------
    given
        The variables to choose from; by default those of this process.
    stores
        Also those with which it reaches buckets: keys and proxies.
    """
    return {
        name: value
        for name, value in user_environment(given).items()
        if name in _ALLOWED
        or name.startswith(_ALLOWED_PREFIXES)
        or (stores and name.upper().startswith(_STORES))
    }


def user_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the user's variables, without what would make Python look into the working directory.

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
            entries = [entry for entry in value.split(os.pathsep) if _means_one_place(name, entry)]
            if not entries:
                continue
            value = os.pathsep.join(entries)
        found[name] = value
    return found


def _means_one_place(name: str, entry: str) -> bool:
    """Tell whether an entry of a search path is the same file or folder in every working directory."""
    if name == "LD_PRELOAD":
        # A list by spaces or colons, of paths and of bare names, which are searched for as libraries are.
        return bool(entry) and all(Path(part).is_absolute() or "/" not in part for part in entry.split())
    return Path(entry).is_absolute()


class _Empty:
    """The empty folder of this process; made on first use."""

    lock = threading.Lock()
    path: Path | None = None


def empty_directory() -> Path:
    """Return an empty folder that belongs to this process alone: children work there.

    It lasts as long as the process, and is made again after it was removed.
    """
    with _Empty.lock:
        if _Empty.path is None or not _Empty.path.is_dir():
            _Empty.path = Path(tempfile.mkdtemp(prefix="inshrink-empty-"))
            atexit.register(shutil.rmtree, _Empty.path, ignore_errors=True)
        return _Empty.path


def ignore_numba_file() -> None:
    """Load numba where it finds no settings, and have it look for none in any working directory."""
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
    """Start Python with ``-P`` and pipes for its standard input and output, both UTF-8.

    Parameters
    ----------
    arguments
        What follows ``-P``. Every path among them, and in what is sent, must be absolute.
    errors
        Takes its standard error; `subprocess.PIPE` for a pipe.
    environment
        `minimal_environment`, or `user_environment` for code that the user consented to.
    directory
        Where it works; by default in `empty_directory`.
    new_session
        Its own children are in a group with it, so that they can be killed together (POSIX).
    """
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        env=dict(environment),
        cwd=empty_directory() if directory is None else directory,
        start_new_session=new_session and os.name == "posix",
    )
