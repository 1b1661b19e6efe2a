"""Run checks of Triton kernels in Triton's interpreter, in a process of their own.

Triton decides on import whether it interprets, so the process of the tests itself cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from traceback import format_exc

import numpy as np
import pytest
import torch

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def outcomes(module: str) -> dict[str, str]:
    """Return what each function of a module's `CHECKS` raised, by name; empty where it passed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.ops.interpreted", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main(module: str) -> None:
    results = {}
    for check in import_module(module).CHECKS:
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
    main(sys.argv[1])
