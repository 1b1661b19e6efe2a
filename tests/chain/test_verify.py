"""Damage is found and named; a stranger's run is told from the original; hostile names stay inside."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import Archive, ChainConfig, ChainWriter
from inshrink_core.codec import get_codec
from inshrink_core.errors import InshrinkError, MissingFrameError, UnsafePathError
from tests.runs import write_run


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def archive_path(run_path: Path, tmp_path: Path) -> Path:
    inshrink_core.compress(run_path, tmp_path / "a.inshrink")
    return tmp_path / "a.inshrink"


def frame_file(archive_path: Path, position: int) -> Path:
    return archive_path / Archive.open(archive_path).reader.frames[position].path


def test_a_sound_archive_verifies_deep_and_against_its_run(run_path: Path, archive_path: Path) -> None:
    found = inshrink_core.verify(archive_path, deep=True, against=inshrink_core.open(run_path))
    assert found.ok
    assert found.problems == ()
    assert {row.step for row in found.errors} == {5, 10, 15, 20}
    exact = [row for row in found.errors if row.codec.startswith("lossless")]
    assert exact
    assert all(row.error.bit_exact for row in exact)


def test_a_flipped_byte_in_a_block_is_a_problem_that_names_the_step(archive_path: Path) -> None:
    path = frame_file(archive_path, 2)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    found = inshrink_core.verify(archive_path)
    assert not found.ok
    assert any(path.name in problem.where or "15" in problem.where for problem in found.problems)


def test_earlier_steps_stay_readable_when_a_later_frame_is_damaged(
    run_path: Path, archive_path: Path
) -> None:
    before = Archive.open(archive_path)[10]["0.bias"]
    path = frame_file(archive_path, 2)
    path.write_bytes(path.read_bytes()[:-100])
    archive = Archive.open(archive_path)
    assert torch.equal(archive[10]["0.bias"], before)
    with pytest.raises(InshrinkError):
        archive[20]["0.weight"]


def test_a_missing_frame_is_named_and_has_the_exit_code_of_damage(archive_path: Path) -> None:
    frame_file(archive_path, 1).unlink()
    with pytest.raises(MissingFrameError) as caught:
        Archive.open(archive_path)[20]["0.weight"]
    assert caught.value.exit_code == 3
    assert not inshrink_core.verify(archive_path).ok


def test_another_run_is_not_taken_for_the_original(archive_path: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other")
    state = torch.load(other / "step_20.pt", weights_only=True)
    state["model"]["4.weight"] *= 1.5
    torch.save(state, other / "step_20.pt")
    found = inshrink_core.verify(archive_path, against=inshrink_core.open(other))
    assert any("not the checkpoint that was archived" in problem.what for problem in found.problems)


def test_an_archive_without_frames_is_sound(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "empty.inshrink", create=True):
        pass
    assert inshrink_core.verify(tmp_path / "empty.inshrink", deep=True).ok


@pytest.mark.parametrize(
    "name", ["../evil.pt", "/tmp/evil.pt", "a/../../evil.pt", "C:\\evil.pt", "evil\0.pt"]
)
def test_names_that_leave_the_target_are_refused_before_a_byte_is_written(
    name: str, run_path: Path, tmp_path: Path
) -> None:
    checkpoint = inshrink_core.open(run_path)[5]
    layout = dataclasses.replace(checkpoint.files[0], path=name)

    class Renamed:
        def read(self, spec: object) -> torch.Tensor:
            return checkpoint.source.read(spec)  # type: ignore[arg-type]

        def skeleton(self, _: object) -> bytes:
            return checkpoint.source.skeleton(checkpoint.files[0])

    hostile = dataclasses.replace(checkpoint, files=(layout,), source=Renamed())
    config = ChainConfig(config=get_codec("lossless")())
    target = tmp_path / "deep" / "out"
    with ArchiveWriter(tmp_path / "hostile.inshrink", create=True) as writer:
        ChainWriter(writer, config).append(hostile)
    with pytest.raises((UnsafePathError, InshrinkError)):
        inshrink_core.restore(tmp_path / "hostile.inshrink", target)
    assert not target.exists() or not any(os.scandir(target))
    assert not (tmp_path / "deep" / "evil.pt").exists()
    assert not (tmp_path / "evil.pt").exists()
