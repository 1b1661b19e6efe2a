"""Killing a compress at any moment leaves every committed step readable, and the same call goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import inshrink_core
from inshrink_core.archive import is_archive
from inshrink_core.chain import Archive
from tests.runs import write_run

N_STEPS = 24
ROUNDS = 3


def committed(target: Path) -> int:
    return len(Archive.open(target)) if is_archive(target) else 0


def frame_files(target: Path) -> int:
    """Count frame files: while waiting, opening the archive would take the processor from the child."""
    return len(list(target.glob("frames/*.frame")))


def test_kill_9_in_the_middle_of_a_compress_loses_no_committed_step(tmp_path: Path) -> None:
    run_path, target = write_run(tmp_path / "run", n_steps=N_STEPS, every=1), tmp_path / "a.inshrink"
    script = (
        f"import inshrink_core; inshrink_core.compress({str(run_path)!r}, {str(target)!r}, codec='lossless')"
    )
    for _ in range(ROUNDS):
        before = committed(target)
        process = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 120
        # One file more than is asked for: the last may be there and not committed yet.
        while process.poll() is None and frame_files(target) < before + 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0)
        assert committed(target) >= min(before + 3, N_STEPS)
        assert inshrink_core.verify(target, deep=True).ok
    run = inshrink_core.open(run_path)
    archive = Archive.open(target)
    for step in archive:
        assert all(torch.equal(archive[step][key], run[step][key]) for key in run[step])
    report = inshrink_core.compress(run_path, target)
    assert set(report.skipped) == set(archive.steps)
    assert Archive.open(target).steps == run.steps
    assert inshrink_core.verify(target, deep=True, against=run).ok
