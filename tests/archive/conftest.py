"""The suite of the archive runs with frames of one part, and where files are not the point, of three."""

import zlib
from dataclasses import replace

import pytest

from inshrink_core.archive import ArchiveWriter, FrameWriter
from tests.archive.building import build

N_PARTS = 3
_BEGIN = ArchiveWriter.begin


def pytest_configure(config):
    config.addinivalue_line("markers", "single_part: what it checks is of frames that have one part")


def pytest_generate_tests(metafunc):
    module = metafunc.module.__name__.rpartition(".")[2]
    if (
        module in _IN_PARTS
        and metafunc.cls is None
        and metafunc.definition.get_closest_marker("single_part") is None
    ):
        metafunc.parametrize("n_parts", [1, N_PARTS], ids=["one part", "three parts"], indirect=True)


_IN_PARTS = {"test_archive_reader", "test_archive_writer", "test_packed", "test_rewrite"}


@pytest.fixture(autouse=True)
def n_parts(request):
    """Write every frame in so many parts, its tensors spread by their names."""
    n = getattr(request, "param", 1)
    if n > 1:
        request.getfixturevalue("monkeypatch").setattr(ArchiveWriter, "begin", begin_in_parts)
    return n


@pytest.fixture
def path(tmp_path, n_parts):
    """An archive of three frames."""
    return build(tmp_path / "run.inshrink")


def begin_in_parts(writer, **arguments):
    """Begin a frame of three parts, as pruning rewrites one."""
    single = _BEGIN(writer, **arguments)
    single.abort()
    header = single._files[0]._header
    info = replace(header.frame, n_parts=N_PARTS)
    headers = [header._replace(frame=info, part=part) for part in range(N_PARTS)]
    parents = writer.reader.inherited(info.kind, info.parent_id, N_PARTS)
    writer._frame = FrameWriter(writer.storage, headers, parents, writer._publish, route=route)
    return writer._frame


def route(key):
    """Return the part of a tensor."""
    return zlib.crc32(key.encode()) % N_PARTS
