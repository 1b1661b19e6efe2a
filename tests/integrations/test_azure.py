"""Archives and runs in Azure's blobs, by azurite: conditions, blocks, refusals, and answers that fail."""

import base64
import io
import os
import subprocess
import sys
import uuid

import pytest

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")

import torch

import inshrink_core
from inshrink_core import verbs
from inshrink_core.archive import ArchiveReader, check_archive
from inshrink_core.archive.storage import objects, storage_at
from inshrink_core.errors import ConflictError, DamagedError, InshrinkError
from inshrink_core.formats import open_run
from inshrink_core.testing.storages import StorageSuite
from tests.integrations.servers import (
    AZURITE_ACCOUNT,
    Proxy,
    azurite,
    azurite_command,
    connect_azure,
    inshrink,
    make_container,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("waiting"),
    pytest.mark.skipif(
        azurite_command() is None,
        reason="azurite is not installed: npm install azurite, and set AZURITE_BLOB",
    ),
]

WRONG_KEY = base64.b64encode(b"hushhush" * 8).decode()


@pytest.fixture(scope="module")
def azure(tmp_path_factory):
    """The address of a server of Azure's blobs."""
    with azurite(tmp_path_factory.mktemp("azurite")) as address:
        yield address


@pytest.fixture
def url(azure, monkeypatch, tmp_path):
    """The address of an archive to be, in a new container."""
    connect_azure(monkeypatch, azure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"c{uuid.uuid4().hex}"
    make_container(azure, name)
    return f"az://{name}/some runs/é#%25+&~'(1)/a"


def behind(azure, rule):
    """Return a proxy before the server, and the address of the account behind it."""
    proxy = Proxy(azure.removesuffix(f"/{AZURITE_ACCOUNT}"), rule)
    return proxy, f"{proxy.address}/{AZURITE_ACCOUNT}"


class TestAzure(StorageSuite):
    @pytest.fixture(autouse=True)
    def container(self, url):
        self.container_name = url.split("/")[2]

    def place(self, folder):
        return f"az://{self.container_name}/{folder.name}/é#%25+&~'(1)/a"


def test_objects_are_created_if_there_are_none_and_replaced_by_their_tag(url):
    storage = storage_at(url)
    tag = storage.replace("m", b"1", None)
    for expected in (None, storage.replace("other", b"1", None)):
        with pytest.raises(ConflictError):
            storage.replace("m", b"2", expected)
    assert storage.load("m") == (b"1", tag)
    assert storage.replace("m", b"2", tag) != tag
    with pytest.raises(FileExistsError):
        storage.upload("m", io.BytesIO(b"3"))
    assert storage.load("m")[0] == b"2"


@pytest.mark.parametrize("fate", [None, "refuse", "drop", "lose", "cut"])
def test_large_frames_go_up_in_blocks_and_arrive_whole_through_failures(url, azure, monkeypatch, fate):
    monkeypatch.setattr(objects, "LARGE_NBYTES", 6 << 20)
    monkeypatch.setattr(objects, "_PIECE_NBYTES", 5 << 20)
    content = os.urandom(12 << 20)
    proxy, address = behind(azure, lambda n, method, path: fate if n % 11 in (3, 8) else None)
    with proxy:
        connect_azure(monkeypatch, address)
        with storage_at(url).create("frames/large") as creation:
            creation.write(content)
            creation.commit()
        storage_at(url).upload("frames/behind", io.BytesIO(content))
        with pytest.raises(FileExistsError):
            storage_at(url).upload("frames/behind", io.BytesIO(content[::-1]))
        assert sum("comp=blocklist" in path for _, path in proxy.requests) >= 2
        assert sum("comp=block&" in path or path.endswith("comp=block") for _, path in proxy.requests) >= 6
    connect_azure(monkeypatch, azure)
    assert storage_at(url).load("frames/large")[0] == content
    assert storage_at(url).load("frames/behind")[0] == content
    assert storage_at(url).remains("frames") == ()


@pytest.mark.parametrize("fate", ["refuse", "drop", "lose", "cut"])
def test_requests_that_fail_change_nothing_of_what_is_written_and_read(
    url, azure, monkeypatch, tmp_path, fate
):
    run = inshrink_core.sample("digits-cnn")
    proxy, address = behind(azure, lambda n, method, path: fate if n % 3 == 2 else None)
    with proxy:
        connect_azure(monkeypatch, address)
        there = verbs.compress(run, url, steps=[10, 25, 50])
        assert there.appended == (10, 25, 50)
        assert verbs.prune(url, keep_last=2, apply=True).applied
        assert len(proxy.requests) > 10
    connect_azure(monkeypatch, azure)
    assert inshrink_core.open(url).steps == (25, 50)
    assert not verbs.verify(url, deep=True).problems
    assert len(storage_at(url).list("frames")) == 2


KILLED = """
import sys, inshrink_core
from inshrink_core import verbs
verbs.compress(inshrink_core.sample("digits-cnn"), sys.argv[1], steps=[10, 25])
"""


@pytest.mark.parametrize("n", [1, 4, 6, 7, 8])
def test_a_compress_that_is_killed_between_requests_goes_on_when_given_again(url, azure, monkeypatch, n):
    victims = []

    def kill(number, method, path):
        if number == n and victims:
            victims[0].kill()
            return "lose"
        return None

    proxy, address = behind(azure, kill)
    with proxy:
        environment = {**os.environ, "AZURE_STORAGE_ENDPOINT": address}
        command = [sys.executable, "-W", "ignore", "-c", KILLED, url]
        victims.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        assert victims[0].wait(timeout=200) != 0
    if inshrink_core.archive.is_archive(url):
        assert inshrink_core.open(url).steps in ((), (10,), (10, 25))
        assert not [one for one in check_archive(url) if not one.leftover]
    assert inshrink_core.compress(inshrink_core.sample("digits-cnn"), url, steps=[10, 25]).size.nbytes
    assert inshrink_core.open(url).steps == (10, 25)
    assert not verbs.verify(url, deep=True).problems


def test_what_is_refused_is_one_line_on_the_command_line_and_says_no_secret(url, azure, monkeypatch):
    run = inshrink_core.sample("digits-cnn")

    def said(*words):
        lines = inshrink(*words, status=2).stderr.strip().splitlines()
        assert WRONG_KEY not in "".join(lines)
        return lines[-1]

    nowhere = "az://nowhere/a"
    for words in (
        ("compress", run, "-o", nowhere),
        ("inspect", nowhere),
        ("prune", nowhere, "--keep-last", "1"),
        ("estimate", nowhere),
        ("restore", nowhere, "-o", "out"),
    ):
        assert "there is no such bucket" in said(*words), words
    assert "no bucket can have this name" in said("compress", run, "-o", "az://Bad_Name!/a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", WRONG_KEY)
    assert "does not accept the credentials" in said("compress", run, "-o", url)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in said("inspect", url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no base64 hushhush")
    assert "does not accept the credentials" in said("inspect", url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    assert "no credentials were found" in said("inspect", url)
    with pytest.raises(InshrinkError, match="must not hold credentials"):
        ArchiveReader.open("az://c/a?sv=2024&sig=hushhush")


def test_a_run_is_read_there_and_one_that_changed_is_an_error(url, tmp_path):
    for step in (1, 2):
        torch.manual_seed(step)
        state = {"model": {"w": torch.randn(800, 800)}, "step": step}
        torch.save(state, tmp_path / f"step_{step}.pt")
        storage_at(url).store.put(f"{storage_at(url)._root}/step_{step}.pt", tmp_path / f"step_{step}.pt")
    run = open_run(url)
    assert run.steps == (1, 2)
    assert run.requests == 1 + 2 * 2
    assert torch.equal(run[1]["w"], torch.load(tmp_path / "step_1.pt")["model"]["w"])
    storage_at(url).store.put(f"{storage_at(url)._root}/step_2.pt", tmp_path / "step_1.pt")
    with pytest.raises(DamagedError, match="the object changed since it was listed"):
        run[2]["w"]


def test_the_command_line_works_with_a_container(url, tmp_path):
    run, archive = inshrink_core.sample("digits-cnn"), f"{url}.inshrink"
    inshrink("compress", run, "-o", archive, "--steps", "10,25")
    inshrink("compress", run, "-o", archive, "--watch", "--poll", "0.1", "--until", "50")
    assert archive in inshrink("inspect", archive).stdout
    inshrink("verify", archive, "--deep")
    inshrink("prune", archive, "--keep-last", "2", "--apply")
    inshrink("export", archive, "--pack", f"{archive}.packed")
    inshrink("restore", f"{archive}.packed", "--step", "50", "-o", tmp_path / "out")
    assert inshrink_core.open(archive).steps == (25, 50)
    assert any((tmp_path / "out").iterdir())
    with inshrink_core.Saver(archive.replace(".inshrink", ".saved"), torch.nn.Linear(4, 4)) as saver:
        saver.save(1)
        saver.flush(remote=True)
        assert inshrink_core.open(archive.replace(".inshrink", ".saved")).steps == (1,)
