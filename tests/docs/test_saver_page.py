"""The training loop of the saver's page goes on where it was interrupted."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.processes import ran

PAGE = (Path(__file__).parents[2] / "docs" / "saver.md").read_text()
(PROGRAM,) = re.findall(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)


def trained(folder, *numbers, options=""):
    """Run the program as far as each number of steps, and return what it says last."""
    folder.mkdir()
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    assert PROGRAM.count(", also=") == 1
    (folder / "train.py").write_text(PROGRAM.replace(", also=", f", {options} also="))
    output = ""
    for n_steps in numbers:
        command = [sys.executable, "-W", "error", "train.py", str(n_steps)]
        done = ran(*command, cwd=folder, timeout=250, env=environment)
        assert done.returncode == 0, done.stderr
        output = done.stdout
    return output


@pytest.mark.documentation
@pytest.mark.timeout(900)
def test_an_interrupted_training_ends_with_the_same_bits_where_all_is_exact(tmp_path):
    exact = 'codec="lossless", optimizer_state="exact",'
    entire = trained(tmp_path / "whole", 25, options=exact)
    assert trained(tmp_path / "parts", 10, 25, options=exact) == entire
