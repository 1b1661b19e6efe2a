"""Performing the requests of a job: what is told on the way, and what becomes of it at their end."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inshrink_app.jobs.job import Job, Load
from inshrink_app.jobs.work import subject_of
from inshrink_app.model import Problem

StartRequest = Callable[[Path, str], "subprocess.Popen[str]"]
"""Starts `inshrink run` with a file; and the SHA-256 of the code that the reader has trusted, if any."""

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_RECORDS = 1.0
_SECONDS_TO_END = 1.5
"""How long a cancelled command may tidy up; after that it is killed, so that cancelling takes two seconds."""

_WHOLE = 10_000
"""Progress of several commands together."""

_LINES_KEPT = 60
_HAS_RESULT = (0, 1)
"""Exit codes of a verb that did its work; with 1 a check failed, and the document says which."""

_DOINGS = {"compress": "encoding", "pack": "packing", "export": "writing"}
_PARTS = {"compress": "Exporting", "verify": "Verifying", "compare": "Comparing"}
"""What each of the requests is called that shrink a run."""

_DIED = Problem(
    "the process that worked on this ended before it was done",
    remedy="try again; if it ends again, the machine may be short of memory",
)


def not_kept(what: str, path: Path, error: OSError) -> Problem:
    """Return the problem that the disk refuses what the explorer keeps of a job."""
    remedy = "free some space, or say with XDG_STATE_HOME where the explorer keeps its jobs, and try again"
    return Problem(f"{what}: {error.strerror or error}", str(path), remedy)


class _FailedError(Exception):
    """A command ended without a result."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)


def end_process(process: subprocess.Popen[str]) -> None:
    """Wait until a process that was told to end has ended, and kill it where it takes too long."""
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def follow(job: Job, start: StartRequest, load: Load) -> None:
    """Have the requests performed one after the other, and take in what comes of them."""
    folder, attempt = job.folder, job.attempt
    folder.output.unlink(missing_ok=True)
    state, result, problem = "failed", None, None
    try:
        n = len(job.requests)
        for place in range(n):
            job.documents.append(_run(job, place, start))
            if n > 1:
                _advance(job, place, 1.0, f"{place + 1} of {n}")
        _keep(folder.output, job.documents)
        result = load(job)
        state = "finished"
        remove_scratch(job)
    except _FailedError as error:
        problem = error.problem
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.warning("a job failed: %s", error)
        problem = _DIED._replace(detail=str(error))
    if job.attempt != attempt:  # It was cancelled and begun again meanwhile.
        return
    if job.state == "running":
        job.ended_at = time.time()
        job.result, job.problem = result, problem
        job.log(state if problem is None else f"{state}: {problem.what}")
        # The state comes last: whoever sees it must find the result, and the record on disk.
        folder.write(job.record()._replace(state=state))
        job.state = state
    else:
        folder.write(job.record())
    folder.release_lock()


def _keep(output: Path, documents: Any) -> None:
    """Write the result.

    Raises
    ------
    _FailedError
        The disk refuses.
    """
    try:
        output.write_text(json.dumps(documents), encoding="utf-8")
    except OSError as error:
        what = "the work is done, but its result cannot be kept"
        raise _FailedError(not_kept(what, output, error)) from error


def remove_scratch(job: Job) -> None:
    """Remove what the requests made for each other."""
    for path in job.work.placed_scratch(job.folder.path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def start_next(job: Job, place: int, start: StartRequest) -> None:
    """Start a request, which goes on by itself where it was cut off.

    Raises
    ------
    OSError
        The system refuses.
    """
    request = job.requests[place]
    job.process = start(job.folder.ask(request), job.work.trusted)
    job.log("inshrink " + " ".join(request.words()))


def _run(job: Job, place: int, start: StartRequest) -> Any:
    """Have one request performed, and return its report.

    Raises
    ------
    _FailedError
        It ended without a result.
    """
    if place:
        if job.state != "running":  # Cancelled between two requests.
            raise _FailedError(_DIED)
        start_next(job, place, start)
    process = job.process
    if process is None or process.stdin is None:
        raise OSError("there is no process")
    process.stdin.close()
    try:
        text, said = _listen(job, process, place)
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    try:
        document = json.loads(text)
        error = document.get("error")
    except (ValueError, AttributeError):
        raise _FailedError(_DIED._replace(detail="\n".join(said))) from None
    if code in _HAS_RESULT and set(document) - {"error"}:
        return document
    raise _FailedError(problem_of(error) if error else _DIED._replace(detail="\n".join(said)))


def _listen(job: Job, process: subprocess.Popen[str], place: int) -> tuple[str, list[str]]:
    """Take in the messages of a command until it ends; return its document, and what else it wrote."""
    stdout, stderr = process.stdout, process.stderr
    if stdout is None or stderr is None:
        raise OSError("the command has no pipes")
    stderr.reconfigure(errors="replace")  # type: ignore[attr-defined]
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(stdout.read()), daemon=True)
    reader.start()
    said: deque[str] = deque(maxlen=_LINES_KEPT)
    written_at = time.monotonic()
    with stderr:
        for line in stderr:
            if not _take_in(job, line, place):
                said.append(line.rstrip())
                job.log(line)
            if time.monotonic() - written_at >= _SECONDS_BETWEEN_RECORDS:
                written_at = time.monotonic()
                job.folder.write(job.record())
    reader.join()
    stdout.close()
    return "".join(texts), list(said)


def _take_in(job: Job, line: str, place: int) -> bool:
    """Take in a message; False for a line that is none."""
    try:
        message = json.loads(line)
        verb, done, total, step = (message[name] for name in ("verb", "done", "total", "step"))
    except (ValueError, TypeError, KeyError):
        return False
    n = len(job.requests)
    item = f"step {int(step):,}"
    if message.get("unit") == "trials":
        item = f"trial {int(done):,}, {item}"
    elif verb in _DOINGS:
        item = f"{_DOINGS[verb]} {item}"
    if n > 1:
        item = f"{_PARTS[verb]}, {item}" if verb in _PARTS and job.work.topic == "shrink" else item
        _advance(job, place, done / max(1, total), item)
    else:
        job.advance(int(done), int(total), item)
    if isinstance(message.get("found"), dict):
        about = message["found"].get("archive") or subject_of(job.requests[place])
        job.tell({**message["found"], "of": about})
        job.log(f"{item} done")
    return True


def _advance(job: Job, place: int, fraction: float, item: str) -> None:
    """Take note of how far one request of several is."""
    shares = job.work.shares
    job.n_later = len(shares) - 1 - place
    job.advance(int(_WHOLE * (sum(shares[:place]) + shares[place] * fraction) + 0.5), _WHOLE, item)


def problem_of(error: dict[str, Any]) -> Problem:
    """Return the problem that an error's document tells, its parts apart again."""
    where, remedy = str(error.get("where", "")), str(error.get("remedy", ""))
    what = str(error.get("message", "")).removeprefix(f"{where}: ")
    what = what.removesuffix(remedy).removesuffix("; ") if remedy else what
    return Problem(what, where, remedy)
