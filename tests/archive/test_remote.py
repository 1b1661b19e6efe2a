"""Packed archives on a web server are read by ranges; what cannot be read there is told."""

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.bucket import Answering
from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive, is_archive
from inshrink_core.archive.maintenance import pack_archive
from inshrink_core.errors import DamagedError, InputError, NotFoundError, StorageError
from inshrink_core.formats import open_run
from tests.archive.building import blocks_of, build, contents

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")

STEPS = (0, 100, 200)


class Handler(Answering):
    """Serves files by ranges, as web servers do; notes what is asked."""

    def do_GET(self):  # noqa: N802 - as http.server calls it
        path = self.path.removeprefix("/")
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        if path == "denied":
            return self.answer(403)
        content = self.server.files.get(path)
        if content is None:
            return self.answer(404)
        return self.answer_range(content)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def server(tmp_path):
    """A web server with a packed archive and another file."""
    path = build(tmp_path / "a", STEPS)
    pack_archive(ArchiveReader.open(path), tmp_path / "p")
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.asked = []
    served.files = {"p": (tmp_path / "p").read_bytes(), "other": b"something else"}
    served.files["a/inshrink-manifest"] = (path / "inshrink-manifest").read_bytes()
    served.url = f"http://127.0.0.1:{served.server_address[1]}"
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


def test_a_packed_archive_on_a_web_server_reads_as_the_folder(server):
    url = f"{server.url}/p"
    assert is_archive(url)
    reader = ArchiveReader.open(url)
    assert {f.step: contents(reader, f.frame_id) for f in reader.frames} == {
        step: blocks_of(step) for step in STEPS
    }
    assert check_archive(url) == ()
    assert reader.path == url


def test_what_is_not_there_or_no_archive_is_told(server):
    for name in ("nothing", "a"):
        with pytest.raises(NotFoundError, match="folders of web servers are not read"):
            ArchiveReader.open(f"{server.url}/{name}")
    with pytest.raises(DamagedError, match="not a packed archive"):
        ArchiveReader.open(f"{server.url}/other")


def test_unknown_store_and_store_that_refuses_are_told(server):
    with pytest.raises(StorageError, match="no object storage of the name 'nowhere'"):
        ArchiveReader.open("nowhere://bucket/a")
    with pytest.raises(StorageError, match="denies it"):
        ArchiveReader.open(f"{server.url}/denied")


def test_runs_are_not_read_from_a_web_server(server):
    with pytest.raises(InputError, match="runs are read from"):
        open_run(f"{server.url}/runs")


@pytest.mark.parametrize("kind", [str, Path])
def test_archive_is_not_written_to_a_web_server(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="local or mounted"):
        ArchiveWriter(kind("http://host/run.inshrink"), create=True)
    assert list(tmp_path.iterdir()) == []
