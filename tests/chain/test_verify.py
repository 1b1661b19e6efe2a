"""Damage is found and named; a stranger's run is told from the original; hostile names stay inside."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import ChainConfig, ChainWriter
from inshrink_core.codec import get_codec
from inshrink_core.errors import InshrinkError, UnsafePathError
from tests.runs import write_run


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def archive_path(run_path: Path, tmp_path: Path) -> Path:
    inshrink_core.compress(run_path, tmp_path / "a.inshrink")
    return tmp_path / "a.inshrink"


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
