"""The guide's storage is a package of its own: installed, archives are written to its URLs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "storage.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder in which the guide's package is installed, its suite beside it."""
    site = tmp_path_factory.mktemp("site")
    blocks = re.findall(r"```(\w+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    storage, suite = [text for language, text in blocks if language == "python"]
    points = next(text for language, text in blocks if language == "toml")
    (site / "sqlite_storage.py").write_text(storage)
    (site / "test_sqlite_storage.py").write_text(suite)
    info = site / "sqlite_storage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite-storage\nVersion: 1.0\n")
    assert points.startswith('[project.entry-points."inshrink.storages"]\n')
    (line,) = points.splitlines()[1:]
    (info / "entry_points.txt").write_text(f"[inshrink.storages]\n{line.replace(chr(34), '')}\n")
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


def test_the_guides_storage_keeps_the_suite(site: Path):
    output = _python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite_storage.py")
    assert re.search(r"^\d\d passed", output, re.MULTILINE)


def test_every_command_takes_the_guides_urls(site: Path, tmp_path: Path):
    script = """
import sys
import inshrink_core
from inshrink_core.cli import main

def inshrink(*words):
    sys.argv = ["inshrink", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words

archive, out, run = sys.argv[1:]
for steps in ("50", "50,100"):
    inshrink("compress", run, "-o", archive, "--steps", steps, "--codec", "lossless")
inshrink("prune", archive, "--keep-last", "1", "--apply")
inshrink("verify", archive, "--deep")
inshrink("inspect", archive)
inshrink("restore", archive, "-o", out, "--steps", "100")
print(inshrink_core.open(archive).steps)
"""
    import inshrink_core

    run = inshrink_core.sample("digits-cnn")
    output = _python(
        site, "-c", script, f"sqlite://{tmp_path}/runs.db/a.inshrink", str(tmp_path / "out"), str(run)
    )
    assert output.splitlines()[-1] == "(100,)"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["runs.db"]
    (restored,) = (tmp_path / "out").iterdir()
    assert restored.read_bytes() == next(Path(run).glob("*100.pt")).read_bytes()


def test_the_guides_storage_has_seventy_lines_of_code():
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 70
