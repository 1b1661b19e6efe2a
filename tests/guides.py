"""Packages that guides to extensions tell one to write, installed in a folder as pip leaves them."""

import os
import re
import sys
import tomllib
from pathlib import Path

from tests.processes import ran

ROOT = Path(__file__).parents[1]


def blocks(page, kind, folder="guides"):
    """Return the code of a page of the documentation in one language."""
    text = (ROOT / "docs" / folder / f"{page}.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def install(guide, folder, *files):
    """Write a guide's modules under these names, and what it registers; return the folder."""
    for name, text in zip(files, blocks(guide, "python"), strict=False):
        (folder / name).write_text(text)
    (toml,) = blocks(guide, "toml")
    info = folder / "guide-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guide\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, points in tomllib.loads(toml)["project"]["entry-points"].items():
            file.write(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))
    return folder


def python(folder, *arguments, installed=True):
    """Run Python in a folder, with the package that lies there or without it."""
    paths = [str(folder)] * installed + [str(ROOT)]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return ran(sys.executable, *arguments, env=known, cwd=folder)


def keeps_its_suite(folder, suite):
    """Run the suite of a guide's package; return what pytest says."""
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(folder))
    done = python(folder, "-m", "pytest", *options, suite)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return done.stdout
