"""The guide to writing a codec is true: its code, as a package of its own, passes the suite and is used."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE = """
import sys, torch, inshrink_core
from inshrink_core.codec import codec_names
assert "cut" in codec_names()
run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
archive = sys.argv[1] + "/run.inshrink"
report = inshrink_core.compress(run, archive, codec="cut", config={"bits": 6}, steps=run.steps[:3])
assert report.config == {"bits": 6}
assert inshrink_core.verify(archive).ok
opened = inshrink_core.open(archive)
weights, restored = run[run.steps[2]]["fc1.weight"], opened[run.steps[2]]["fc1.weight"]
assert 0 < float((weights - restored).abs().max()) <= float(weights.abs().max()) / 64
inshrink_core.restore(archive, sys.argv[1] + "/restored", steps=[run.steps[2]])
"""


def blocks(kind: str) -> list[str]:
    text = (ROOT / "docs" / "guides" / "codec.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the guide, as pip leaves it in a folder."""
    folder = tmp_path_factory.mktemp("installed")
    module, suite = blocks("python")
    (project,) = map(tomllib.loads, blocks("toml"))
    (folder / "inshrink_cut.py").write_text(module)
    (folder / "test_cut.py").write_text(suite)
    named = project["project"]
    info = folder / f"{named['name'].replace('-', '_')}-{named['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {named['name']}\nVersion: {named['version']}\n"
    )
    points = "\n".join(
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
        for group, entries in named["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points + "\n")
    return folder


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(package), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_codec_of_the_guide_has_about_sixty_lines():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 75


def test_the_codec_of_the_guide_writes_verifies_and_restores_an_archive(package: Path, tmp_path: Path):
    done = run(package, "-c", USE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    done = run(package, "-m", "inshrink_core.cli", "verify", str(tmp_path / "run.inshrink"))
    assert done.returncode == 0, done.stderr


def test_an_archive_is_refused_where_its_codec_is_not_installed(package: Path, tmp_path: Path):
    done = run(package, "-c", USE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    code = "import sys, inshrink_core; a = inshrink_core.open(sys.argv[1]); a[a.steps[0]]['fc1.weight']"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.inshrink")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no installed codec reads the bitstream 'cut/1'" in done.stderr


def test_the_codec_of_the_guide_keeps_the_laws(package: Path):
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(package))
    done = run(package, "-m", "pytest", *options, str(package / "test_cut.py"))
    assert done.returncode == 0, done.stdout[-4000:]
