"""Real commands cut off in the middle, with their explorer or by themselves: what is told, what is left, and
going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import streamlit as st
from inshrink_app import services
from inshrink_app.services import jobs as job_services

import inshrink_core
from inshrink_core.verbs.search import Search
from tests.app.builders import SAMPLE, button, drawer, judged, texts
from tests.app.job_stubs import STEPS, wait, work_of
from tests.processes import until

SECONDS = 120
WRITTEN = (10, 25, 50, 100, 150, 200, 300, 400)
JUDGE = """
import pathlib, time


def evaluate(state):
    while pathlib.Path(__file__).with_name("slow").exists():
        time.sleep(0.02)
    return {"loss": float(len(state))}
"""
SERVER = """
import json, sys, time
import msgspec
from inshrink_app.jobs.work import Work
from inshrink_app.services import jobs as job_services

jobs = [job_services.registry().start(one) for one in msgspec.json.decode(sys.argv[1], type=list[Work])]
while not all(job.process for job in jobs):
    time.sleep(0.01)
print(json.dumps([job.process.pid for job in jobs]), flush=True)
time.sleep(600)
"""


def n_frames(archive: Path) -> int:
    """Count the frames that an archive has so far."""
    return len(list((archive / "frames").glob("*.frame")))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has taken note of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_commands_that_are_cut_off_are_told_leave_whole_files_and_go_on_where_they_were(archived):
    judged(archived, JUDGE)
    (archived / "slow").touch()
    shown = services.load_subject(str(archived))
    judge = services.evaluator_of(shown)
    assert judge is not None
    made = archived.with_name("made.inshrink")
    compress = [
        "compress",
        str(SAMPLE),
        "-o",
        str(made),
        "--steps",
        ",".join(map(str, WRITTEN)),
        "--codec",
        "lossless",
    ]
    fields = {"budget": 1, "steps": STEPS[:1], **judge.fields}
    searching = Search(str(archived), codec="uniform", **fields)
    work = [work_of(compress), work_of(searching, trusted=judge.trusted)]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, msgspec.json.encode(work).decode()], stdout=subprocess.PIPE, text=True
    ) as server:
        pids = json.loads(server.stdout.readline())
        until(lambda: n_frames(made) > 0)
        os.kill(pids[0], signal.SIGSTOP)  # It would be done before anybody looks.
        server.kill()

    # The explorer was killed: its commands end by themselves.
    jobs = {job.verb: job for job in job_services.registry().jobs()}
    assert {job.state for job in jobs.values()} == {"interrupted"}
    app = drawer()
    assert "Interrupted" in texts(app)
    assert button(app, "Resume")
    os.kill(pids[0], signal.SIGCONT)
    (archived / "slow").unlink()
    until(lambda: all(map(is_gone, pids)))
    kept = inshrink_core.open(made).steps
    assert kept == WRITTEN[: len(kept)] != WRITTEN
    assert inshrink_core.verify(made).ok
    for verb in jobs:
        job_services.registry().resume(jobs[verb].job_id)

    # A command is killed: the explorer goes on.
    job = jobs["compress"]
    until(lambda: n_frames(made) > len(kept))
    job.process.kill()
    assert wait(job).state == "failed"
    st.cache_resource.clear()  # As a restart does.
    app = drawer()
    assert "ended before it was done" in texts(app)
    assert inshrink_core.verify(made).ok
    button(app, "Try again").click().run()
    (again,) = (one for one in job_services.registry().jobs() if one.verb == "compress")
    assert wait(again).state == "finished", again.log_text()
    assert inshrink_core.open(made).steps == WRITTEN
    assert inshrink_core.verify(made).ok
    assert wait(jobs["search"]).state == "finished", jobs["search"].log_text()
    assert len(jobs["search"].result["trials"]) == 2, "the default, and one candidate"
