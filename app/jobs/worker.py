"""The process that does long work, so that the explorer's own stays free to answer.

Standard input: one line with the request (``task``, ``output``, and what the task needs), and then nothing
until the explorer ends. Standard output: one JSON object a line, ``{"done", "total", "item"}``,
``{"log"}``, ``{"row"}`` or ``{"problem": [what, where, remedy, detail]}`` (`inshrink_app.jobs.report`). The
result goes into the file ``output``, in a form that each of `inshrink_app.actions` describes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from types import FrameType

from inshrink_app.actions import action
from inshrink_app.jobs.report import Report

from inshrink_core.errors import InshrinkError

_SECONDS_TO_TIDY_UP = 1.5


def main() -> int:
    """Do what the request says; return the exit code."""
    # An ending that runs `finally` and `with`: evaluators' own processes and temporary files go with it.
    signal.signal(signal.SIGTERM, _leave)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = Report()
    try:
        action(request.get("task", "sensitivity"))(request, report)
    except InshrinkError as error:
        detail = f"expected {error.expected}, found {error.found}" if error.expected or error.found else ""
        report.problem(error.what, error.where, error.remedy, detail)
        return error.exit_code
    except OSError as error:
        report.problem(f"the system refused: {error.strerror or error}", str(error.filename or ""))
        return 1
    except MemoryError:
        report.problem("the machine has too little memory for this", str(request.get("path", "")))
        return 1
    return 0


def _leave(signum: int, frame: FrameType | None) -> None:
    """Raise where the work stands."""
    sys.exit(128 + signum)


def _end_with_parent() -> None:
    """Leave when the explorer is gone: its end of our standard input closes with it."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_TIDY_UP)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
