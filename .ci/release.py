"""Make a release: check version and changelog, build wheel and sdist, try both, and, if told to, tag.

``python .ci/release.py [--tag]``, called by `make release`. Each distribution is installed into a fresh
environment with the exact versions of requirements.lock, and runs README's first commands there on a run that
torch has just written. Without ``--tag`` nothing outside of ``build/release`` is changed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "release"

TRAINING = """
import torch
from pathlib import Path

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
Path("runs/mine").mkdir(parents=True)
for step in range(1000, 5000, 1000):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(saved, f"runs/mine/step-{step}.pt")
"""


def version(root: Path = ROOT) -> str:
    """Return the version, from where it is said: ``inshrink_core.__version__``."""
    for node in ast.parse((root / "inshrink_core" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("inshrink_core/__init__.py says no __version__")


def problems(number: str, changelog: str, tags: set[str], changed: str) -> list[str]:
    """Return why a version cannot be released."""
    sections = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    newest = sections[0] if sections else "nothing"
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", number):
        found.append(f"'{number}' is no MAJOR.MINOR.PATCH: mend __version__ in inshrink_core/__init__.py")
    if not re.fullmatch(rf"{re.escape(number)} \(\d{{4}}-\d\d-\d\d\)", newest):
        found.append(
            f"CHANGELOG.md begins with '{newest}', expected '{number} (YYYY-MM-DD)': date its section"
        )
    if f"v{number}" in tags:
        found.append(f"the tag v{number} is there: raise __version__ in inshrink_core/__init__.py")
    if changed:
        found.append(f"the working tree has changes:\n{changed}")
    return found


def first_commands(readme: str) -> list[list[str]]:
    """Return the words of README's first block of our commands."""
    block = re.search(r"(?:^    inshrink .+\n)+", readme, re.MULTILINE)
    if block is None:
        raise SystemExit("README.md has no block of commands")
    return [shlex.split(line, comments=True) for line in block[0].splitlines()]


def environment(name: str) -> Path:
    """Make a fresh environment and return its folder of programs."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    return folder / "bin"


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, away from this environment's settings, and return what it says."""
    sys.stderr.write(f"$ {shlex.join(map(str, words))}\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(words, cwd=cwd, env=kept, check=True, stdout=subprocess.PIPE, text=True).stdout


def git(*words: str) -> str:
    """Return what git says."""
    return subprocess.run(("git", *words), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def build() -> list[Path]:
    """Build wheel and sdist from what git has, and return them."""
    shutil.rmtree(BUILD, ignore_errors=True)
    (BUILD / "source").mkdir(parents=True)
    archive = subprocess.run(("git", "archive", "HEAD"), cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(("tar", "-x", "-C", BUILD / "source"), input=archive, check=True)
    run(sys.executable, "-m", "inshrink_core.ops", "--all")
    kernels = Path("inshrink_core", "ops", "machine")
    shutil.copytree(ROOT / kernels, BUILD / "source" / kernels)
    programs = environment("builder")
    run(programs / "python", "-m", "pip", "install", "--quiet", "build")
    run(programs / "python", "-m", "build", "--outdir", BUILD / "dist", BUILD / "source")
    return sorted((BUILD / "dist").iterdir())


def try_out(distribution: Path, number: str) -> None:
    """Install a distribution into a fresh environment, and run README's first commands there."""
    name = "wheel" if distribution.suffix == ".whl" else "sdist"
    programs = environment(name)
    pip = (programs / "python", "-m", "pip", "install", "--quiet")
    run(*pip, "--constraint", ROOT / "requirements.lock", distribution)
    place = BUILD / f"tried-{name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    run(programs / "python", "-P", "-c", TRAINING, cwd=place)
    said = run(programs / "inshrink", "--version", cwd=place).split()
    if said != ["inshrink", number]:
        raise SystemExit(f"{distribution.name} says it is {said}, expected {number}")
    for words in first_commands((ROOT / "README.md").read_text()):
        run(programs / words[0], *words[1:], cwd=place)
    shutil.rmtree(BUILD / name)


def main() -> None:
    """Check, build, try and tag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tag", action="store_true", help="tag the commit; refused where anything is wrong")
    tag = parser.parse_args().tag
    number = version()
    wrong = problems(
        number,
        (ROOT / "CHANGELOG.md").read_text(),
        set(git("tag", "--list").split()),
        git("status", "--porcelain"),
    )
    for one in wrong:
        sys.stderr.write(f"not to be released: {one}\n")
    if tag and wrong:
        raise SystemExit(1)
    built = build()
    for distribution in built:
        try_out(distribution, number)
    if tag:
        git("tag", "--annotate", f"v{number}", "--message", f"Inshrink {number}")
    done = f"tagged v{number}" if tag else "nothing was tagged"
    sys.stderr.write(f"{', '.join(one.name for one in built)} in {BUILD / 'dist'}; {done}\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
