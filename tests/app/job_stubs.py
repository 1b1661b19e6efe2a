"""A registry of jobs whose answers are ready, and a small archived run to put pages in front of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from inshrink_app.jobs.follow import StartCommand
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.registry import JobRegistry
from inshrink_app.services import running
from inshrink_app.widgets.tables import Problem

from inshrink_core.execution.process import start_python

STEPS = (10, 20, 30, 40)


def scripted(script: str) -> StartCommand:
    """Return what starts a few lines of Python in the place of `inshrink`; its words are their arguments."""
    environment = dict(os.environ)
    return lambda words, is_trusted: start_python(
        ["-c", script, *words], errors=subprocess.PIPE, environment=environment
    )


class StubJobs:
    """Every job that is started gets the state and the document told for its verb, at once."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.state = "finished"
        self.problem: Problem | None = None
        self.started: list[dict[str, Any]] = []
        self.kept: list[Job] = []
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def put(
        self,
        *commands: Sequence[str],
        state: str = "finished",
        key: Any = "",
        result: Any = None,
        shown: str = "",
        **request: Any,
    ) -> Job:
        job = Job(
            state=state,
            done=3,
            total=10,
            item="step 30",
            job_id=f"{len(self.kept):016x}",
            key=json.dumps(key),
            request={"commands": [list(words) for words in commands], "shown": shown, **request},
            result=result,
            documents=[] if result is None else [result],
            started_at=1000.0 + len(self.kept),
            ended_at=None if state in ("queued", "running") else 1060.0 + len(self.kept),
        )
        self.kept.append(job)
        return job

    def start(self, key: Any, request: dict[str, Any], load: Any = None, *, again: bool = False) -> Job:
        self.started.append(request)
        result = self.answers.get(request["commands"][-1][0])
        more = {name: value for name, value in request.items() if name != "commands"}
        job = self.put(*request["commands"], state=self.state, key=key, result=result, **more)
        job.problem = self.problem if self.state == "failed" else None
        job.rows = [dict(row) for row in self.rows.get(job.verb, ())]
        return job

    @property
    def last(self) -> list[str]:
        """The words of the last command that was started."""
        return list(self.started[-1]["commands"][-1])

    def jobs(self) -> tuple[Job, ...]:
        return tuple(reversed(self.kept))

    def find(self, job_id: str) -> Job | None:
        return next((job for job in self.kept if job.job_id == job_id), None)

    def get(self, key: Any, load: Any = None) -> Job | None:
        return self.newest(key)

    def newest(self, key: Any, state: str = "") -> Job | None:
        found = [job for job in self.kept if job.key == json.dumps(key) and state in ("", job.state)]
        return found[-1] if found else None

    def place(self, job: Job) -> int | None:
        queued = [one for one in self.kept if one.state == "queued"]
        return queued.index(job) + 1 if job in queued else None

    def stop(self, job: Job) -> None:
        job.state = "cancelled"

    def resume(self, job_id: str, load: Any = None) -> Job | None:
        job = self.find(job_id)
        if job is not None:
            job.state = "running"
        return job

    def remove(self, job_id: str) -> None:
        self.kept = [job for job in self.kept if job.job_id != job_id]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> StubJobs:
    """Let the services find a registry without processes."""
    stub = StubJobs()
    monkeypatch.setattr(running, "jobs", lambda: stub)
    return stub


def work(folder: Path, *commands: Sequence[str], **request: Any) -> Job:
    """Have a registry like the explorer's run commands, and wait until they have ended."""
    registry = JobRegistry(running.start_command, folder, refuse=running.refusal)
    return wait(registry.start("key", {"commands": [list(words) for words in commands], **request}))


def wait(job: Job) -> Job:
    """Wait until a job has ended."""
    ends = time.monotonic() + 200
    while job.is_running and time.monotonic() < ends:
        time.sleep(0.05)
    return job


def write_slow_run(folder: Path) -> Path:
    """Write a run that moves little from step to step, so that deltas are worth their while."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = {"fc1.weight": torch.randn(64, 48, generator=generator), "fc1.bias": torch.zeros(64)}
    folder.mkdir()
    for position, step in enumerate(STEPS):
        weights["fc1.weight"][0, position] += 0.5
        torch.save({"model": weights, "step": step}, folder / f"step_{step:06}.pt")
    return folder


@pytest.fixture(scope="session")
def archived_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a small run and its archive once; tests work on copies."""
    import inshrink_core

    folder = tmp_path_factory.mktemp("archived")
    inshrink_core.compress(
        write_slow_run(folder / "run"), folder / "run.inshrink", codec="lossless", keyframe_every=2
    )
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def archived(root: Path, archived_template: Path) -> Path:
    """Return a run whose archive lies beside it, inside of the only root."""
    shutil.copytree(archived_template, root, dirs_exist_ok=True)
    return root / "run"
