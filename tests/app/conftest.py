"""Every test of the explorer has its own roots, recent runs and caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import streamlit as st
from inshrink_app import roots


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder the explorer may see."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(roots._Current, "value", None)
    st.cache_resource.clear()
    st.cache_data.clear()
    roots.configure([folder])
    return folder
