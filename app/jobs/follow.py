"""Following a worker: its request goes in, its messages come out, and its end becomes the job's."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from typing import Any

from inshrink_app.jobs.files import JobFolder
from inshrink_app.jobs.job import Job, Load
from inshrink_app.widgets.tables import Problem

__all__ = ["end_process", "follow", "log_line"]

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_RECORDS = 1.0
_SECONDS_TO_END = 1.5
"""How long a cancelled worker may tidy up; after that it is killed, so that cancelling takes two seconds."""

_MAX_ROWS = 20_000
_ERROR_TAIL = 4_000

_DIED = Problem(
    "the process that worked on this ended before it was done",
    remedy="try again; if it ends again, the machine may be short of memory",
)


def end_process(process: subprocess.Popen[str]) -> None:
    """Wait until a process that was told to end has ended, and kill it where it takes too long."""
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_line(job: Job, text: str) -> None:
    """Add a line to what is kept of a job."""
    if job.folder is not None:
        job.folder.log(text)


def follow(job: Job, process: subprocess.Popen[str], load: Load) -> None:
    """Send the request, take in progress until the worker ends, and load what it left."""
    folder = job.folder
    if folder is None:
        return
    folder.output.unlink(missing_ok=True)
    state, result, problem = "failed", None, _DIED
    try:
        told = _converse(job, process, {**job.request, "output": str(folder.output)})
        code = process.wait()
        problem = told or _died(folder)
        if code == 0 and told is None and folder.output.exists():
            result = load(folder.output)
            state = "finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("a job failed: %s", error)
        process.kill()
        process.wait()
    if job.state == "running":
        job.ended_at = time.time()
        job.result, job.problem = result, None if state == "finished" else problem
        log_line(job, state if job.problem is None else f"{state}: {job.problem.what}")
        # The state comes last: whoever sees it must find the result, and the record on disk.
        folder.write(job.record()._replace(state=state))
        job.state = state
    else:
        folder.write(job.record())
    folder.release_lock()


def _died(folder: JobFolder) -> Problem:
    """Return the problem of a worker that ended without a word, with the end of what it wrote instead."""
    try:
        detail = folder.errors.read_bytes()[-_ERROR_TAIL:].decode("utf-8", "replace").strip()
    except OSError:
        detail = ""
    return _DIED._replace(detail=detail)


def _converse(job: Job, process: subprocess.Popen[str], request: dict[str, Any]) -> Problem | None:
    """Exchange messages with the worker until it closes its output; return the problem it reported."""
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise OSError("the worker has no pipes")
    problem, written_at = None, time.monotonic()
    with stdin, stdout:
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        for line in stdout:
            message = json.loads(line)
            if "problem" in message:
                problem = Problem(*message["problem"])
            elif "log" in message:
                log_line(job, str(message["log"]))
            elif "row" in message:
                if len(job.rows) < _MAX_ROWS:
                    job.rows.append(dict(message["row"]))
            else:
                job.done, job.total = int(message["done"]), int(message["total"])
                job.item = str(message.get("item", ""))
            if job.folder is not None and time.monotonic() - written_at >= _SECONDS_BETWEEN_RECORDS:
                written_at = time.monotonic()
                job.folder.write(job.record())
    return problem
