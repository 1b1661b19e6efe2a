"""The guide to writing a verb is true: its module, as a package of its own, is a command and a function."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inshrink_core

ROOT = Path(__file__).resolve().parents[2]
RUN = str(inshrink_core.sample("digits-cnn"))


def blocks(kind: str) -> list[str]:
    text = (ROOT / "docs" / "guides" / "verb.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the guide, as pip leaves it in a folder."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "inshrink_zeros.py").write_text(blocks("python")[0])
    (project,) = map(tomllib.loads, blocks("toml"))
    named = project["project"]
    info = folder / f"{named['name'].replace('-', '_')}-{named['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {named['name']}\nVersion: {named['version']}\n"
    )
    points = named["entry-points"]["inshrink.verbs"].items()
    listed = "".join(f"{name} = {value}\n" for name, value in points)
    (info / "entry_points.txt").write_text(f"[inshrink.verbs]\n{listed}")
    return folder


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])},
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )


def inshrink(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(package, "-m", "inshrink_core.cli", *words)


def test_the_verb_of_the_guide_has_about_fifty_lines():
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 60


def test_the_verb_of_the_guide_is_one_of_the_command_line(package: Path):
    assert "Show which tensors have zeros." in inshrink(package, "--help").stdout
    shown = " ".join(inshrink(package, "zeros", "--help").stdout.split())
    for reported in ("--least", "--follow-links", "inshrink zeros runs/digits --least 0.5"):
        assert reported in shown
    document = json.loads(inshrink(package, "zeros", RUN, "--json").stdout)
    assert document["step"] == inshrink_core.open(RUN).steps[-1]
    assert all(0 <= share <= 1 for share in document["shares"].values())
    assert inshrink(package, "zeros", RUN, "--least", "2").returncode == 2
    wrong = inshrink(package, "zeros", RUN, "--step", "3", "--json")
    assert (wrong.returncode, json.loads(wrong.stdout)["error"]["remedy"]) == (2, "name one that is there")


def test_the_verb_of_the_guide_is_a_function(package: Path):
    code = blocks("python")[1].replace("runs/digits", RUN)
    done = run(package, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2000 {")
