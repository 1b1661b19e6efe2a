"""The process of a job: it performs the job's requests in order and writes their reports to one file.

Progress goes to standard error as JSON lines, in the format of `inshrink run --progress jsonl`.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from inshrink_app.jobs.job import REQUESTS, RESULT

from inshrink_core.cli import main as inshrink
from inshrink_core.errors import StorageError
from inshrink_core.execution.results import write_atomic


def main(folder: Path, trusted: list[str]) -> None:
    """Perform the requests in a folder; stop after one that ends without a report."""
    words = [word for digest in trusted for word in ("--trust", digest)]
    documents = []
    for place, request in enumerate(sorted(folder.glob(REQUESTS))):
        sys.stderr.write(json.dumps({"request": place}) + "\n")
        output = io.StringIO()
        with redirect_stdout(output):
            inshrink(["run", str(request), *words, "--json", "--progress", "jsonl"])
        documents.append(json.loads(output.getvalue()))
        if not set(documents[-1]) - {"error"}:
            break
    try:
        write_atomic(folder / RESULT, json.dumps(documents))
    except StorageError as error:
        sys.exit(json.dumps({"unwritten": str(error)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
