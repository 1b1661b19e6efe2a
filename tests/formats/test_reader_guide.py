"""The guide's reader is a package of its own: installed, its runs open, compress and restore."""

import json
import tomllib

import pytest

from inshrink_core.formats.readers import readers
from tests.guides import ROOT, blocks, install, keeps_its_suite, python


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder in which the guide's package is installed, its suite beside it."""
    return install("reader", tmp_path_factory.mktemp("site"), "raw_layout.py", "test_raw_layout.py")


@pytest.mark.documentation
def test_the_guides_reader_keeps_the_suite(site):
    assert "7 passed" in keeps_its_suite(site, "test_raw_layout.py")


@pytest.mark.documentation
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
    done = python(site, "-c", script, *places)
    assert done.stdout.strip() == "raw", done.stderr
    for name in ("weights.raw", "index.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "run" / "step-2" / name).read_bytes()


def test_the_guides_reader_has_forty_lines_of_code():
    code = blocks("reader", "python")[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40


def test_the_built_in_layouts_are_readers_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = sorted(project["entry-points"]["inshrink.readers"])
    assert [reader.name for reader in readers()][-len(names) :] == names
