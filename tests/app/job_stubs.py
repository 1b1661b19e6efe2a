"""A registry of jobs whose answers are ready, and a small archived run to put pages in front of."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inshrink_app.jobs.job import Job
from inshrink_app.jobs.registry import JobRegistry, StartJob
from inshrink_app.jobs.work import Work, subject_of
from inshrink_app.model.problem import Problem
from inshrink_app.services import jobs as job_services

from inshrink_core.cli.derived import read_request
from inshrink_core.execution.process import start_python
from inshrink_core.request import Request, request_of
from tests.processes import until

STEPS = (10, 20, 30, 40)


def asked(words: Sequence[str]) -> Request[Any]:
    """Return the request that a command line asks for, its steps as numbers, as the explorer has them."""
    request = request_of(words[0])
    assert request is not None
    found: Any = read_request(request, list(words))
    steps = getattr(found, "steps", None)
    if isinstance(steps, tuple) and ":" not in "".join(map(str, steps)):
        return replace(found, steps=tuple(int(step) for one in steps for step in str(one).split(",")))
    return found  # type: ignore[no-any-return]


_TOPICS = {
    "bench": "run.baselines",
    "compress": "archives.write",
    "estimate": "run.estimates",
    "evaluate": "run.evaluator",
    "export": "archives.pack",
    "search": "run.search",
    "sensitivity": "sensitivity.fisher",
}


def option(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option under any of its names; None where it is not given."""
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word in names), None)


def work_of(
    *commands: Sequence[str] | Request[Any], shown: str | Path = "", topic: str = "", **more: Any
) -> Work:
    """Return the work of some command lines, under the page and topic that its last verb most often has."""
    requests = [one if isinstance(one, Request) else asked(one) for one in commands]
    verb = requests[-1].verb()
    page, _, name = (topic or _TOPICS.get(verb, f"archives.{verb}")).partition(".")
    return Work.asking(requests, shown=shown, page=page, topic=name, **more)


_CHILD = """
import contextlib, io, json, pathlib, sys
script, folder, *requests = sys.argv[1:]
documents = []
for place, words in enumerate(map(json.loads, requests)):
    print(json.dumps({"request": place}), file=sys.stderr, flush=True)
    sys.argv = ["-c", *words]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        exec(script, {})
    documents.append(json.loads(output.getvalue()))
pathlib.Path(folder, "result").write_text(json.dumps(documents))
"""


def scripted(script: str) -> StartJob:
    """Return what runs a few lines of Python for each request of a job; its words are their arguments."""
    environment = dict(os.environ)

    def start(job: Job) -> subprocess.Popen[str]:
        words = [json.dumps(request.words()) for request in job.requests]
        arguments = ["-c", _CHILD, script, str(job.folder), *words]
        return start_python(arguments, errors=subprocess.PIPE, environment=environment)

    return start


class StubJobs:
    """Every job that is started gets the state at once and, if it is finished, the answer for its verb."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.state = "finished"
        self.problem: Problem | None = None
        self.started: list[Work] = []
        self.kept: list[Job] = []
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.folder = Path("/nowhere")

    def put(
        self,
        *commands: Sequence[str] | Request[Any],
        work: Work | None = None,
        state: str = "finished",
        result: Any = None,
        **more: Any,
    ) -> Job:
        """Add a job of some command lines, or of some work."""
        job = Job(
            work or work_of(*commands, **more),
            state=state,
            done=3,
            total=10,
            item="step 30",
            job_id=f"{len(self.kept):016x}",
            result=result,
            documents=[] if result is None else [result],
            started_at=1000.0 + len(self.kept),
            ended_at=None if state in ("queued", "running") else 1060.0 + len(self.kept),
        )
        self.kept.append(job)
        return job

    def start(self, work: Work, *, again: bool = False) -> Job:
        self.started.append(work)
        answer = self.answers.get(str(work.documents[-1]["verb"]))
        job = self.put(work=work, state=self.state, result=answer if self.state == "finished" else None)
        job.problem = self.problem if self.state == "failed" else None
        job.rows = [dict(row) for row in self.rows.get(job.verb, ())]
        return job

    @property
    def last(self) -> list[str]:
        """The words of the last request that was started."""
        return self.words()[-1]

    def words(self, place: int = -1) -> list[list[str]]:
        """Return the words of every request of a job that was started."""
        return [request.words() for request in self.started[place].requests]

    def jobs(self) -> tuple[Job, ...]:
        return tuple(reversed(self.kept))

    def find(self, job_id: str) -> Job | None:
        return next((job for job in self.kept if job.job_id == job_id), None)

    def get(self, work: Work) -> Job | None:
        return next((job for job in reversed(self.kept) if job.work.key == work.key), None)

    def newest(self, page: str, topic: str, shown: str, state: str = "") -> Job | None:
        asked = (page, topic, shown)
        found = [job for job in self.kept if (job.work.page, job.work.topic, job.shown) == asked]
        return next((job for job in reversed(found) if state in ("", job.state)), None)

    def place(self, job: Job) -> int | None:
        queued = [one for one in self.kept if one.state == "queued"]
        return queued.index(job) + 1 if job in queued else None

    def stop(self, job: Job) -> None:
        job.state = "cancelled"

    def resume(self, job_id: str) -> Job | None:
        job = self.find(job_id)
        if job is not None:
            job.state = "running"
        return job

    def remove(self, job_id: str) -> None:
        self.kept = [job for job in self.kept if job.job_id != job_id]


def work(folder: Path, *commands: Sequence[str] | Request[Any], **more: Any) -> Job:
    """Have a registry like the explorer's perform what command lines ask, and wait until it has."""
    return wait(JobRegistry(job_services.start_process, folder).start(work_of(*commands, **more)))


def performed(*commands: Sequence[str] | Request[Any], **more: Any) -> Job:
    """Perform what command lines ask in this process, and return it as a finished job."""
    job = Job(work_of(*commands, **more), state="finished")

    for request in job.requests:

        def note(told: Any, of: str = subject_of(request)) -> None:
            if told.found is not None:
                found = json.loads(json.dumps(told.found))
                job.rows.append({**found, "of": found.get("archive") or of})

        report = replace(request, progress=note).perform()
        job.documents.append(json.loads(json.dumps(report.to_json())))
    job.result = job.documents[-1]
    return job


def wait(job: Job) -> Job:
    """Wait until a job has ended and its record is stored."""
    until(lambda: not job.is_running and job.lock is None)
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
