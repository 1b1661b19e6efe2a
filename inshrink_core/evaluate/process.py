"""The parent's side of the child process: start, speak, notice a death, kill."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from inshrink_core.execution.process import minimal_environment, start_python, user_environment

__all__ = ["ChildProcess"]

_POLL_S = 0.1
"""How often a silent child is checked for being dead; its answer itself wakes the parent at once."""

_CLOSE_S = 2.0
"""How long a child may take to end by itself once its input has ended."""

_OUTPUT_TAIL_BYTES = 2000
"""What of the evaluator's prints an error shows: the end, where the cause usually stands."""

_CHILD = Path(__file__).with_name("child.py")


class ChildProcess:
    """One child process and the directory it exchanges files through; dead after any failure of its own."""

    def __init__(self, path: Path, function: str, *, isolated: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="inshrink-evaluate-"))
        self._output_path = self.directory / "output.txt"
        self._log: IO[bytes] = self._output_path.open("wb")
        self._printed_before = 0
        path = path.absolute()
        # An evaluator of ours needs nothing of the user's. Any other has the user's word, and works where its
        # file lies: what else lies there is what the word was given for, the working directory is not.
        self._process = start_python(
            [str(_CHILD), str(path), function, "isolated" if isolated else "beside"],
            errors=self._log,
            environment=minimal_environment() if isolated else user_environment(),
            directory=None if isolated else path.parent,
            own_session=True,  # so that its own children die with it
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._receive, daemon=True)
        self._reader.start()

    def _receive(self) -> None:
        """Read in a thread: a pipe cannot be waited for with a timeout on every platform."""
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one command; a child that has died is noticed by `receive`."""
        if "state" in message:  # a word within an evaluation is no new one
            self._printed_before = self._output_path.stat().st_size
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next reply; None if the process has ended without one.

        Raises
        ------
        TimeoutError
            Nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply: dict[str, Any] = json.loads(self._lines.get(timeout=_POLL_S))
            except Empty:
                if self._process.poll() is not None and not self._reader.is_alive() and self._lines.empty():
                    return None
                if time.monotonic() > deadline:
                    raise TimeoutError from None
            else:
                return reply

    def died(self) -> str:
        """Say how the process ended."""
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def output(self) -> str:
        """Return the end of what the evaluator printed since the last command, in one line."""
        with self._output_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._printed_before, size - _OUTPUT_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return " | ".join(line.strip() for line in lines if line.strip())

    def close(self, *, kill: bool) -> None:
        """End the process, let it finish by itself unless killed, and remove the directory."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        self._reader.join(_CLOSE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)
