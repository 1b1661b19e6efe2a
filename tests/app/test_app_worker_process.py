"""The worker as the explorer starts it: nothing of the folder one stands in, and no more than it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from inshrink_app.services import running

from tests.app.builders import write_run
from tests.hostile import executed, lay_traps


def test_a_worker_executes_nothing_of_the_folder_that_the_explorer_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "downloaded")
    lay_traps(run, tmp_path / "traces")
    monkeypatch.chdir(run)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}.{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    request = {
        "task": "sensitivity",
        "path": str(run),
        "metric": "magnitude",
        "output": str(tmp_path / "out"),
    }
    with (tmp_path / "errors").open("wb") as errors:
        worker = running.start_worker(request, errors)
        assert worker.stdin is not None
        assert worker.stdout is not None
        with worker.stdin, worker.stdout:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            told = worker.stdout.read()
            code = worker.wait(120)
    assert (code, executed(tmp_path / "traces")) == (0, []), told + (tmp_path / "errors").read_text()


@pytest.mark.parametrize(("trusted", "is_given"), [("", False), ("digest", True)])
def test_only_a_worker_that_starts_trusted_code_gets_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: str, is_given: bool
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with (tmp_path / "errors").open("wb") as errors:
        worker = running.start_worker({"task": "compare", "trusted": trusted}, errors)
    given = Path(f"/proc/{worker.pid}/environ").read_bytes()
    directory = Path(f"/proc/{worker.pid}/cwd").readlink()
    worker.kill()
    worker.communicate()
    assert (b"AWS_SECRET_ACCESS_KEY" in given) == is_given
    assert list(directory.iterdir()) == []
