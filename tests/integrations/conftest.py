"""Trainings on more than one process."""

import os
import subprocess
import sys

import pytest


@pytest.fixture
def on_two_ranks():
    """Return a function that runs a script with its arguments on two processes, and requires success."""

    def run(*script):
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", *map(str, script)],
            capture_output=True,
            text=True,
            timeout=550,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-5000:]

    return run
