"""The guide's reader is a package of its own: installed, its runs open, compress and restore."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inshrink_core.formats.readers import readers

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "reader.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder in which the guide's package is installed, its suite beside it."""
    site = tmp_path_factory.mktemp("site")
    blocks = re.findall(r"```(\w+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    reader, suite = [text for language, text in blocks if language == "python"]
    points = next(text for language, text in blocks if language == "toml")
    (site / "raw_layout.py").write_text(reader)
    (site / "test_raw_layout.py").write_text(suite)
    info = site / "raw_layout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raw-layout\nVersion: 1.0\n")
    name, value = re.search(r'^(\w+) = "(.+)"$', points, re.MULTILINE).groups()
    assert '[project.entry-points."inshrink.readers"]' in points
    (info / "entry_points.txt").write_text(f"[inshrink.readers]\n{name} = {value}\n")
    return site


def _python(site: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(site), str(GUIDE.parents[2])])
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        cwd=site,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_guides_reader_keeps_the_suite(site):
    told = _python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_raw_layout.py")
    assert "7 passed" in told


def test_the_guides_runs_are_compressed_and_restored(site, tmp_path):
    for step in (1, 2):
        folder = tmp_path / "run" / f"step-{step}"
        folder.mkdir(parents=True)
        values = bytes(range(48)) * step
        (folder / "weights.raw").write_bytes(values[:48])
        (folder / "index.json").write_text(json.dumps({"fc.weight": ["float32", [3, 4], 0]}))
    script = (
        "import sys, inshrink_core\n"
        "run, archive, out = sys.argv[1:]\n"
        "inshrink_core.compress(run, archive, codec='lossless')\n"
        "inshrink_core.restore(archive, out, steps=[2])\n"
        "print(inshrink_core.open(run).format)\n"
    )
    places = [str(tmp_path / name) for name in ("run", "a.inshrink", "out")]
    assert _python(site, "-c", script, *places).strip() == "raw"
    for name in ("weights.raw", "index.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "run" / "step-2" / name).read_bytes()


def test_the_guides_reader_has_forty_lines_of_code():
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40


def test_the_built_in_layouts_are_readers_of_the_project_file():
    import tomllib

    project = tomllib.loads((GUIDE.parents[2] / "pyproject.toml").read_text())["project"]
    names = sorted(project["entry-points"]["inshrink.readers"])
    assert [reader.name for reader in readers()][-len(names) :] == names
