"""The tutorial's programs and commands run as they stand, in order, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text()
PROGRAMS = dict(re.findall(r'```python title="([a-z.]+)"\n(.*?)```', TUTORIAL, re.DOTALL))
COMMANDS = re.findall(r"^    ((?:inshrink|python) .*)$", TUTORIAL, re.MULTILINE)


@pytest.mark.documentation
@pytest.mark.timeout(600)
def test_every_command_of_the_tutorial_runs_in_order(tmp_path: Path):
    assert {"train.py", "evaluator.py", "script.py"} == set(PROGRAMS)
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    said = {}
    for command in COMMANDS:
        words = shlex.split(command)
        if words[:2] == ["inshrink", "ui"]:
            continue  # does not end; tests/app starts it
        if words[0] == "inshrink":
            program = [sys.executable, "-P", "-m", "inshrink_core.cli", *words[1:]]
        else:
            program = [sys.executable, *words[1:]]
        done = subprocess.run(
            program,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, (command, done.stderr)
        said[command] = done.stdout
    first, resumed = (
        float(said[f"python train.py{rest}"].rsplit(maxsplit=1)[1])
        for rest in ("", " resumed restored/step-600.pt")
    )
    assert resumed == pytest.approx(first, rel=0.05)
    assert "(128, 2)" in said["python script.py"].replace("[", "(").replace("]", ")")
