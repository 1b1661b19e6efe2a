"""Run lines of the documentation in one process: ``python lines.py JOBS RESULTS``.

Jobs are a JSON list: a folder and either ``words``, a command line of ours, or ``text``, Python between what
``before`` and ``after`` do. Results are a list of exit codes and of what was written.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path


def run(job):
    os.chdir(job["folder"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if "words" in job:
                from inshrink_core.cli import main

                code = main(job["words"])
            else:
                sys.path.insert(0, job["folder"])
                names: dict = {"__name__": "__main__"}
                for part in ("before", "text", "after"):
                    exec(compile(job.get(part, ""), f"<{part}>", "exec"), names)
                code = 0
        except BaseException:
            output.write(traceback.format_exc())
            code = 70
    if "text" in job:
        sys.path.remove(job["folder"])
    return {"code": code, "output": output.getvalue()}


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in json.loads(Path(sys.argv[1]).read_text())]))
