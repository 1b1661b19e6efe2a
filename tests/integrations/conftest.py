"""Trainings on more than one process; a server of S3."""

import os
import sys
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from tests.integrations.hub import TOKEN, Hub
from tests.integrations.servers import connect, make_bucket, moto
from tests.processes import aborted_at_exit, ran


@pytest.fixture
def on_two_ranks():
    """Return a function that calls one ``module:name`` with texts on two processes, and requires success."""

    def run(called, *arguments):
        launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", "2", Path(__file__).with_name("two_ranks.py"), called]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = ran(*command, *map(str, arguments), timeout=550, env=environment)
        finished = done.stdout.count("nothing is left to do") == 2
        assert finished, (done.stdout[-2000:], done.stderr[-5000:])
        assert done.returncode == 0 or aborted_at_exit(done.stderr), done.stderr[-5000:]

    return run


@pytest.fixture(scope="session")
def server():
    """The address of a server of S3."""
    pytest.importorskip("moto", reason="moto[server] is not installed")
    with moto() as address:
        yield address


@pytest.fixture(scope="module")
def hub():
    """A server of the Hub, which every address ``hf://`` leads to."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra 'hub' is not installed")
    server = Hub()
    with pytest.MonkeyPatch.context() as patch:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        patch.setenv("HF_TOKEN", TOKEN)
        yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(server, monkeypatch):
    """The address of an archive to be, in a new bucket of the server."""
    connect(monkeypatch, server)
    name = f"b{uuid.uuid4().hex}"
    make_bucket(server, name)
    return f"s3://{name}/runs/a.inshrink"


@pytest.fixture
def waiting(monkeypatch, tmp_path):
    """What is uploaded waits in a folder of its own, and what fails is soon tried again."""
    from inshrink_core.archive.storage import objects, uploads

    hasty = {"init_backoff": timedelta(seconds=0.01), "max_backoff": timedelta(seconds=0.1), "base": 2.0}
    monkeypatch.setattr(objects, "_RETRY", {**objects._RETRY, "backoff": hasty})
    monkeypatch.setattr(objects, "_PAUSE_S", 0.01)
    monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "waiting"))
    yield
    objects._store_of.cache_clear()
    objects._PROVEN.clear()
