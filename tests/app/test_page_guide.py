"""The guide to writing a page is true: its folder and its line, in a copy of the explorer, make a page."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).resolve().parents[2]
LIST = 'NAMES = (\n    "open",\n'


@pytest.mark.documentation
def test_the_guides_page_passes_the_guides_test_in_a_copy_of_the_explorer(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "app", folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "inshrink_app").symlink_to("app")
    (folder / "tests" / "app").mkdir(parents=True)
    for name in ("app/conftest.py", "app/builders.py", "app/browser.py", "app/job_stubs.py", "processes.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    text = (ROOT / "docs" / "guides" / "page.md").read_text()
    init, view, line, test = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)
    page = folder / "app" / "pages" / "dtypes"
    page.mkdir()
    (page / "__init__.py").write_text(init)
    (page / "view.py").write_text(view)
    (folder / "tests" / "app" / "test_dtypes.py").write_text(test)
    pages = folder / "app" / "pages" / "__init__.py"
    source = pages.read_text()
    assert LIST in source
    pages.write_text(source.replace(LIST, LIST + f"    {line}"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = (sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "tests")
    done = ran(*command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
