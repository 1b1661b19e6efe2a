"""The run of three saves that tests of chains archive, and its archive."""

from __future__ import annotations

from pathlib import Path

import pytest

import inshrink_core
from tests.runs import write_run


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def archive_path(run_path: Path, tmp_path: Path) -> Path:
    inshrink_core.compress(run_path, tmp_path / "a.inshrink")
    return tmp_path / "a.inshrink"
