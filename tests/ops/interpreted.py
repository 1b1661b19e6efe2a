"""Run checks of kernels: numba's here, Triton's in its interpreter in another process, or on a GPU.

Triton decides on import whether it interprets, so the process of the tests itself cannot.
"""

import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from traceback import format_exc

import numpy as np
import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from tests.processes import ran

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

backend = Backend.CUDA
"""Whose kernels are checked; numba's where a test says so."""


def kernels():
    """Let the kernels that are checked run."""
    return force_backend(backend)


def is_interpreted(device):
    """Whether each step takes milliseconds."""
    return backend is Backend.CUDA and device == "cpu"


def checks_of(module):
    """Return the checks of a module, each a function of a device."""
    found = vars(import_module(f"tests.ops.{module}"))
    return [value for name, value in found.items() if name.startswith("check_")]


def outcomes(*modules):
    """Return what each check of some modules raised, by name; empty where it passed."""
    known = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, "-W", "error", "-m", "tests.ops.interpreted", *modules)
    done = ran(*command, env=known, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main(*modules):
    results = {}
    for check in (check for module in modules for check in checks_of(module)):
        try:
            # Kernels meet infinities on purpose; only NumPy, which interprets them, warns.
            with np.errstate(all="ignore"):
                check("cpu")
        except Exception:
            results[check.__name__] = format_exc()
        else:
            results[check.__name__] = ""
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
