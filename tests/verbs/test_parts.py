"""Compressing in parts: the content is the same whatever their number, and nothing half-written is live."""

import shutil
from pathlib import Path

import pytest

import inshrink_core
from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive, commit_parts
from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError, InputError, LockedError, StepConflictError
from inshrink_core.verbs import commit, compress

SETTINGS = {
    "lattice": {"codec": "lattice"},
    "inshrinkerator": {"codec": "inshrinkerator", "prune": 0.1, "protect": 0.01},
    "lossless": {"codec": "lossless", "optimizer": "exact"},
    "no optimizer": {"codec": "lattice", "optimizer": "drop", "coarseness": 4.0},
    "keyframes": {"codec": "lattice", "keyframe_every": 2},
}
N_STEPS = 4


@pytest.fixture(scope="module")
def run():
    return inshrink_core.open(inshrink_core.sample("digits-cnn"))


def write(run, target: Path, n_parts: int, order=None, **settings) -> Path:
    """Write an archive in parts, one after the other."""
    settings = {"codec": "lattice", "steps": run.steps[:N_STEPS], **settings}
    for part in order or range(n_parts):
        compress(run, target, part=f"{part + 1}/{n_parts}", **settings)
    return target


def content(path: Path) -> dict:
    """Return every block by step and key, with what the archive says of it, and every decoded tensor."""
    archive = Archive.open(path)
    found = {}
    for info in archive.frames:
        frame = archive.frame(info)
        blocks = [(e.key, e.attachment, e.codec, e.attributes, frame.read(e)) for e in frame.entries]
        meta = {key: value for key, value in frame.meta.items() if key != "content"}
        values = {s.key: archive.decode(info, s.key)[0].numpy().tobytes() for s in archive[info.step].specs}
        found[info.step] = (info.kind, blocks, meta, values)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_content_does_not_depend_on_the_number_of_parts(tmp_path, run, name):
    compress(run, tmp_path / "whole", steps=run.steps[:N_STEPS], **SETTINGS[name])
    expected = content(tmp_path / "whole")
    assert len(expected) == N_STEPS
    for n_parts in (1, 2, 3, 8):
        path = write(run, tmp_path / str(n_parts), n_parts, **SETTINGS[name])
        assert content(path) == expected, n_parts
        assert check_archive(path) == ()
        assert {frame.n_parts for frame in Archive.open(path).frames} == {n_parts}
