"""Every verb that writes to an address: killed between requests, answers lost, rivals, stores that lie."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
pytest.importorskip("moto", reason="moto[server] is not installed")

import torch

import inshrink_core
from inshrink_core import verbs
from inshrink_core.archive import ArchiveWriter, is_archive
from inshrink_core.archive.storage import uploads
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError, StorageError
from tests.integrations.servers import Proxy, connect, environment, is_write

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("waiting"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = (1, 2)
EXACT = {"codec": "lossless", "optimizer": "exact"}


def weights(step):
    return {"w": torch.arange(64.0) * step}


def compress(run, archive, url):
    verbs.compress(run, url, **EXACT)


def watch(run, archive, url):
    verbs.compress(run, url, interval=0.05, until=STEPS[-1], **EXACT, watch=True)


def save(run, archive, url):
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(64))
    with inshrink_core.Saver(url, model, codec="lossless") as saver:
        last = saver.restore() or 0  # also what the last one had not uploaded
        for step in STEPS:
            if step > last:
                model.load_state_dict(weights(step))
                saver.save(step)
        saver.flush(remote=True)


def prune(run, archive, url):
    if not is_archive(url):
        put(archive, url)
    verbs.prune(url, keep_last=1, apply=True)


def release(run, archive, url):
    if not is_archive(url):
        put(archive, url)
    verbs.release(run, url, apply=True, keep_newest=1)


VERBS = {item.__name__: item for item in (compress, watch, save, prune, release)} | {"on_the_hub": compress}
WRITING = ["compress", "watch", "save", "prune"]


def put(archive, url):
    """Copy an archive into a bucket, its manifest last."""
    storage = storage_at(url)
    for path in [*sorted(Path(archive).glob("frames/*")), Path(archive) / "inshrink-manifest"]:
        storage.store.put(storage.key(path.relative_to(archive).as_posix()), path)


def act(name, variables, *places):
    """Do what a process does that may be killed."""
    os.environ.update(variables)
    os.setpgrp()
    VERBS[name](*places)


@pytest.fixture
def run(tmp_path):
    """A run of two steps."""
    (tmp_path / "run").mkdir()
    for step in STEPS:
        torch.save({"model": weights(step), "step": step}, tmp_path / f"run/step_{step}.pt")
    return tmp_path / "run"


@pytest.fixture
def archive(run, tmp_path):
    """Its archive, on the disk."""
    verbs.compress(run, tmp_path / "a.inshrink", **EXACT)
    return tmp_path / "a.inshrink"


def expected(name):
    return STEPS[-1:] if name == "prune" else STEPS


def require_complete(url, among=STEPS):
    """What is seen there is whole; return its steps."""
    if not is_archive(url):
        return ()
    seen = Archive.open(url).steps
    assert seen == tuple(step for step in among if step in seen)
    for step in seen:
        assert torch.equal(Archive.open(url)[step]["w"], weights(step)["w"])
    assert not [item for item in verbs.verify(url, deep=True).problems if not item.leftover]
    return seen


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_killed_between_two_requests_loses_nothing_and_the_next_goes_on(
    name, server, url, hub, run, archive, tmp_path, monkeypatch
):
    # The children find this module, and what is installed before what lies beside it.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["inshrink_core.verbs", "inshrink_core.training.saver", "torch"])
    # Between two writes all that is there is as it was after the first of them: reads need not be cut off.
    for n in range(60):
        mine = shutil.copytree(run, tmp_path / f"run-{n}")
        place = f"hf://me/run-{uuid.uuid4().hex}" if name == "on_the_hub" else f"{url}-{n}"
        if name in ("prune", "release"):
            put(archive, place)
        begun, victim, fate = [], [], ("lose", "drop")[n % 2]

        def rule(number, method, path, n=n, fate=fate, begun=begun, victim=victim):
            if not victim or not is_write(method, path):
                return None
            begun.append(path)
            if len(begun) - 1 != n:
                return None
            os.kill(victim[0].pid, signal.SIGKILL)
            return fate

        with Proxy(server, rule if name != "on_the_hub" else lambda *_: None) as proxy:
            monkeypatch.setattr(hub, "rule", rule if name == "on_the_hub" else lambda *_: None)
            variables = environment(proxy.address, hub.url, os.environ[uploads.QUEUE_VARIABLE])
            victim.append(context.Process(target=act, args=(name, variables, mine, archive, place)))
            victim[0].start()
            victim[0].join(200)
            monkeypatch.setattr(hub, "rule", lambda *_: None)
        seen = require_complete(place)
        gone = {step for step in STEPS if not (mine / f"step_{step}.pt").exists()}
        assert gone <= set(seen), "an original is gone that is in no archive"
        if victim[0].exitcode == 0:
            assert seen == expected(name)
            break
        assert victim[0].exitcode == -signal.SIGKILL
        VERBS[name](mine, archive, place)
        assert require_complete(place) == expected(name)
        ArchiveWriter(place).close()
        listed = {path for frame in Archive.open(place).frames for path in frame.paths}
        assert {f"frames/{item}" for item in storage_at(place).names("frames")} == listed
    else:
        pytest.fail("it never came to its end")
    assert n > 3


@pytest.mark.parametrize("fate", ["refuse", "drop", "lose", "cut"])
@pytest.mark.parametrize("name", [*WRITING, "release"])
def test_answers_that_fail_change_nothing_of_what_a_verb_does(
    name, fate, server, url, run, archive, monkeypatch
):
    put(archive, f"{url}-there")
    place = f"{url}-there" if name in ("prune", "release") else url
    with Proxy(server, lambda n, method, path: fate if n % 3 == 2 else None) as proxy:
        connect(monkeypatch, proxy.address)
        VERBS[name](run, archive, place)
        assert len(proxy.requests) > 3
    connect(monkeypatch, server)
    assert require_complete(place) == expected(name)
    assert storage_at(place).remains("frames") == ()


@pytest.mark.parametrize("name", WRITING)
def test_a_verb_that_another_writer_overtakes_stops_and_what_both_wrote_is_whole(
    name, server, url, run, archive, tmp_path, monkeypatch
):
    if name == "prune":
        put(archive, url)
    else:
        verbs.compress(run, url, steps=[1], **EXACT)
    overtaken, rival = [], tmp_path / "step_99.pt"
    torch.save({"model": weights(99), "step": 99}, rival)

    def rule(number, method, path):
        if method == "PUT" and "inshrink-manifest" in path and not overtaken:
            overtaken.append(path)
            monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "other machine"))
            verbs.compress(rival, url, **EXACT)
            monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "this machine"))
        return

    with Proxy(server, rule) as proxy:
        connect(monkeypatch, proxy.address)
        monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "this machine"))
        # A watch looks again, and archives what is not there.
        refused = (
            contextlib.nullcontext() if name == "watch" else pytest.raises((ConflictError, StorageError))
        )
        with refused as raised:
            VERBS[name](run, archive, url)
        assert overtaken
    if name != "watch":
        assert "another writer" in str(raised.value)
        assert "\n" not in str(raised.value)
    connect(monkeypatch, server)
    assert require_complete(url, (*STEPS, 99)) == ((*STEPS, 99) if name in ("prune", "watch") else (1, 99))
