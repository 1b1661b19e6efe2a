"""Archives and runs in buckets of real servers, S3's and Azure's: rivals, lost answers, refusals, deaths."""

import base64
import contextlib
import io
import os
import uuid

import pytest

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
pytest.importorskip("moto", reason="moto[server] is not installed")

import torch

import inshrink_core
from inshrink_core.archive.storage import objects
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.errors import DamagedError
from inshrink_core.formats import open_run
from inshrink_core.testing.storages import StorageSuite
from tests.integrations.servers import (
    AZURITE_ACCOUNT,
    Proxy,
    azurite,
    azurite_command,
    connect,
    connect_azure,
    inshrink,
    make_bucket,
    make_container,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("waiting")]

WRONG_KEY = base64.b64encode(b"hushhush" * 8).decode()


class S3:
    """A new bucket, and how to speak to its server."""

    connect = staticmethod(connect)
    account = ""

    def __init__(self, server):
        self.server, name = server, f"b{uuid.uuid4().hex}"
        make_bucket(server, name)
        self.url = f"s3://{name}/some runs/é?#%25+&*~'(1)/a"


class Azure:
    """The same of a container."""

    connect = staticmethod(connect_azure)
    account = f"/{AZURITE_ACCOUNT}"

    def __init__(self, server):
        self.server, name = server, f"c{uuid.uuid4().hex}"
        make_container(server, name)
        self.url = f"az://{name}/some runs/é#%25+&~'(1)/a"


@pytest.fixture(scope="module")
def azure_server(tmp_path_factory):
    if azurite_command() is None:
        pytest.skip("azurite is not installed: npm install azurite, and set AZURITE_BLOB")
    with azurite(tmp_path_factory.mktemp("azurite")) as address:
        yield address


@pytest.fixture
def azure(azure_server, monkeypatch):
    connect_azure(monkeypatch, azure_server)
    return Azure(azure_server)


@pytest.fixture(params=["s3", "azure"])
def bucket(request, monkeypatch):
    """A new bucket of each kind of server."""
    if request.param == "azure":
        return request.getfixturevalue("azure")
    server = request.getfixturevalue("server")
    connect(monkeypatch, server)
    return S3(server)


@contextlib.contextmanager
def through_proxy(bucket, monkeypatch, rule):
    """Speak to a server by a proxy, and then without it."""
    with Proxy(bucket.server.removesuffix(bucket.account), rule) as proxy:
        bucket.connect(monkeypatch, f"{proxy.address}{bucket.account}")
        yield proxy
    bucket.connect(monkeypatch, bucket.server)


class TestBuckets(StorageSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, bucket):
        self.bucket = bucket

    def place(self, folder):
        return f"{self.bucket.url}/{folder.name}"


@pytest.mark.parametrize("fate", ["refuse", "drop", "lose", "cut"])
def test_large_frames_arrive_whole_through_failures(bucket, monkeypatch, fate):
    monkeypatch.setattr(objects, "LARGE_NBYTES", 6 << 20)
    monkeypatch.setattr(objects, "_PIECE_NBYTES", 5 << 20)
    content, url = os.urandom(12 << 20), bucket.url
    with through_proxy(bucket, monkeypatch, lambda n, *_: fate if n % 11 in (3, 8) else None) as proxy:
        with storage_at(url).create("frames/large") as creation:
            creation.write(content)
            creation.commit()
        storage_at(url).upload("frames/behind", io.BytesIO(content))
        with pytest.raises(FileExistsError):
            storage_at(url).upload("frames/behind", io.BytesIO(content[::-1]))
        assert any("uploadId" in path or "comp=blocklist" in path for _, path in proxy.requests)
    assert storage_at(url).load("frames/large")[0] == content
    assert storage_at(url).load("frames/behind")[0] == content
    assert storage_at(url).remains("frames") == ()


def test_what_azure_refuses_is_one_line_on_the_command_line_and_says_no_secret(azure, monkeypatch):
    run, url = inshrink_core.sample("digits-cnn"), azure.url

    def said(*words):
        lines = inshrink(*words, status=2).stderr.strip().splitlines()
        assert WRONG_KEY not in "".join(lines)
        return lines[-1]

    assert "there is no such bucket" in said("inspect", "az://nowhere/a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", WRONG_KEY)
    assert "does not accept the credentials" in said("compress", run, "-o", url)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in said("inspect", url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no base64 hushhush")
    assert "does not accept the credentials" in said("inspect", url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    assert "no credentials were found" in said("inspect", url)


# Azure signs the conditions of a request, and refuses one that has lost them.
@pytest.mark.parametrize(
    ("bucket", "fate"), [("s3", None), ("s3", "blind"), ("azure", None)], indirect=["bucket"]
)
def test_a_run_is_read_and_one_that_changed_is_an_error_whatever_the_store_compares(
    bucket, tmp_path, monkeypatch, fate
):
    with through_proxy(bucket, monkeypatch, lambda *_: fate):
        storage = storage_at(bucket.url)
        for step in (1, 2):
            state = {"model": {"w": torch.full((800, 800), float(step))}, "step": step}
            torch.save(state, tmp_path / f"step_{step}.pt")
            storage.store.put(f"{storage._root}/step_{step}.pt", tmp_path / f"step_{step}.pt")
        run = open_run(bucket.url)
        assert run.steps == (1, 2)
        assert run.requests == 1 + 2 * 2
        assert torch.equal(run[1]["w"], torch.full((800, 800), 1.0))
        storage.store.put(f"{storage._root}/step_2.pt", tmp_path / "step_1.pt")
        with pytest.raises(DamagedError, match="the object changed since it was listed"):
            run[2]["w"]


def test_the_command_line_works_with_a_bucket(bucket, tmp_path):
    run, url = inshrink_core.sample("digits-cnn"), f"{bucket.url}.inshrink"
    inshrink("compress", run, "-o", url, "--steps", "10,25")
    inshrink("compress", run, "-o", url, "--watch", "--poll", "0.1", "--until", "50")
    assert url in inshrink("inspect", url).stdout
    inshrink("verify", url, "--deep")
    inshrink("prune", url, "--keep-last", "2", "--apply")
    inshrink("export", url, "--pack", f"{url}.packed")
    inshrink("export", f"{url}.packed", "--unpack", f"{url}.again")
    inshrink("restore", f"{url}.again", "--step", "50", "-o", tmp_path / "out")
    inshrink("restore", url, "-o", "s3://bucket/out", status=2)
    assert inshrink_core.open(f"{url}.again").steps == (25, 50)
    assert any((tmp_path / "out").iterdir())
