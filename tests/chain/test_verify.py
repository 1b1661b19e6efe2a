"""Damage is found and named; a stranger's run is told from the original; hostile names stay inside."""

from __future__ import annotations

from pathlib import Path

import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from tests.runs import write_run


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
