"""The archive that tests of chains read and go on with."""

from __future__ import annotations

from pathlib import Path

import pytest

import inshrink_core


@pytest.fixture
def archive_path(run_path: Path, tmp_path: Path) -> Path:
    inshrink_core.compress(run_path, tmp_path / "a.inshrink")
    return tmp_path / "a.inshrink"
