"""Ranks that save into a bucket of a real server: what they write, and what is left when one dies."""

import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
sys.path.insert(0, str(Path(__file__).parent))  # as the ranks have it

import dcp_ranks as ranks
from dcp_ranks import on_ranks

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.chain import Archive
from tests.integrations.servers import Proxy, environment
from tests.runs import payloads_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(500),
    pytest.mark.usefixtures("waiting"),
]


def run(world, folder, address, function, *arguments):
    """Run a function on ranks that speak to a server of S3, or of the Hub."""
    variables = environment(address, address, folder / "ranks-wait")
    on_ranks(world, folder, ranks.with_environment, variables, function, *arguments)


def frames_in(url):
    return set(storage_at(url).list("frames"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    on_ranks(2, folder, ranks.train_on, folder / "a", 3, folder / "whole.pt")
    return torch.load(folder / "whole.pt"), folder / "a"


def require_blocks_of(place, folder):
    """Require that an archive elsewhere has the blocks of one in a folder, and is sound."""
    assert [(item.kind, item.n_parts) for item in Archive.open(place).frames] == [
        ("keyframe", 2),
        ("delta", 2),
        ("delta", 2),
    ]
    assert payloads_of(place) == payloads_of(folder)
    assert not inshrink_core.verify(place, deep=True).problems


@pytest.fixture(params=["s3", "hub, lfs", "hub, git"])
def place(request, monkeypatch):
    """A server, and the address of an archive to be: in a bucket, or a repository that has frames so."""
    if request.param == "s3":
        return request.getfixturevalue("server"), request.getfixturevalue("url")
    hub = request.getfixturevalue("hub")
    if request.param == "hub, git":
        monkeypatch.setattr(hub, "in_git", (*hub.in_git, ".frame"))
    return hub.url, f"hf://me/run-{uuid.uuid4().hex}/a"


def test_ranks_write_into_a_bucket_the_blocks_that_they_write_into_a_folder(
    place, hub, tmp_path, uninterrupted
):
    """Any number of ranks reads them, and writes on; on the Hub all parts of a save are one commit."""
    full, folder = uninterrupted
    server, url = place
    run(2, tmp_path, server, ranks.train_on, url, 2, tmp_path / "none.pt")
    begun = commits_of(hub, url)
    run(2, tmp_path, server, ranks.train_on, url, 3, tmp_path / "whole.pt")
    assert ranks.same(torch.load(tmp_path / "whole.pt"), full)
    require_blocks_of(url, folder)
    if url.startswith("hf"):
        assert sum("manifest" in message for message in begun) == 3  # the archive, and two saves
        assert len(commits_of(hub, url)) == len(begun) + 1
    run(1, tmp_path, server, ranks.train_on, url, 4, tmp_path / "last.pt")
    assert [item.n_parts for item in Archive.open(url).frames] == [2, 2, 2, 1]
    assert not inshrink_core.verify(url, deep=True).problems
    assert not list((tmp_path / "ranks-wait").glob("[!.]*/frames/*"))


def commits_of(hub, address):
    if address.startswith("s3"):
        return []
    return [message for _, message in hub.repository("/".join(address.split("/")[2:4])).commits]


@pytest.mark.parametrize("place", ["s3", "hub, lfs"], indirect=True)
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        *(("before its part has its name", 1), ("after its part has its name", 0)),
        *(("before the frame is listed", 0), ("after the frame is listed", 0)),
    ],
)
def test_after_a_kill_training_goes_on_from_the_last_frame_that_is_listed(
    place, tmp_path, uninterrupted, point, rank
):
    server, url = place
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run(2, tmp_path, server, ranks.train_on, url, 3, tmp_path / "none.pt", (point, rank))
    assert Archive.open(url).steps == ((1, 2) if point.startswith("after the frame") else (1,))
    assert not inshrink_core.verify(url, deep=True).problems
    run(2, tmp_path, server, ranks.train_on, url, 3, tmp_path / "whole.pt")
    assert ranks.same(torch.load(tmp_path / "whole.pt"), uninterrupted[0])
    assert Archive.open(url).steps == (1, 2, 3)
    ArchiveWriter(url).close()  # the next writer deletes what can never be listed
    listed = {file.path for frame in Archive.open(url).frames for file in frame.files}
    assert {f"frames/{name}" for name in frames_in(url)} == listed
    assert not inshrink_core.verify(url, deep=True).problems


@pytest.mark.parametrize("place", ["s3", "hub, lfs"], indirect=True)
def test_of_two_trainings_only_one_lists_its_frame_and_the_other_is_told(place, tmp_path):
    server, url = place
    run(2, tmp_path, server, ranks.overtaken, url)
    assert Archive.open(url).steps == (1, 2)
    assert not inshrink_core.verify(url, deep=True).problems


def test_a_store_that_fails_fails_the_save_on_every_rank_and_the_next_one_goes_on(server, url, tmp_path):
    def refuses(number, method, path):
        return "refuse" if method == "PUT" and "-2.00001.frame" in path else None

    with Proxy(server, refuses) as proxy:
        run(2, tmp_path, proxy.address, ranks.fail_once, url)
    assert Archive.open(url).steps == (1, 3)
    assert not inshrink_core.verify(url, deep=True).problems


def test_training_goes_on_while_the_parts_of_an_async_save_are_uploaded(server, url, tmp_path):
    """What is saved is what the model held then, and it is in the archive when the future has its result."""
    gate = tmp_path / "gate"

    def wait(number, method, path):
        until = time.monotonic() + 120
        while method == "PUT" and ".frame" in path and gate.exists() and time.monotonic() < until:
            time.sleep(0.02)

    with Proxy(server, wait) as proxy:
        run(2, tmp_path, proxy.address, ranks.save_behind, url, gate, tmp_path / "whole.pt")
    assert Archive.open(url).steps == (1, 2)
    assert not inshrink_core.verify(url, deep=True).problems
