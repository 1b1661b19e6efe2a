"""The guide to writing a page is true: its folder and its line, in a copy of the explorer, make a page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = 'NAMES = (\n    "open",\n'


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the explorer and of what its tests need, with what the guide adds."""
    folder = tmp_path_factory.mktemp("copy")
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
    return folder


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )


def test_the_guides_page_passes_the_guides_test(copy):
    done = run(copy, "-m", "pytest", "-q", "--import-mode=importlib", "tests")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_the_guides_page_is_in_the_navigation_where_its_line_is(copy):
    program = (
        "from inshrink_app import pages\n"
        "print(pages.__file__, *(pages.page(name).title for name in pages.NAMES[:3]), sep='|')\n"
        "print(pages.page('dtypes').address)"
    )
    done = run(copy, "-c", program)
    assert done.returncode == 0, done.stderr
    file, *titles = done.stdout.splitlines()[0].split("|")
    assert Path(file).resolve().is_relative_to(copy.resolve())
    assert titles == ["Open", "Dtypes", "Run"]
    assert done.stdout.splitlines()[1] == "dtypes"
