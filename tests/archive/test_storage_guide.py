"""The guide's storage is a package of its own: it keeps the suite; see docs/guides/storage.md."""

import pytest

from tests.guides import install, keeps_its_suite


@pytest.mark.documentation
def test_the_guides_storage_keeps_the_suite(tmp_path):
    site = install("storage", tmp_path, "sqlite_storage.py", "test_sqlite_storage.py")
    assert "passed" in keeps_its_suite(site, "test_sqlite_storage.py")
