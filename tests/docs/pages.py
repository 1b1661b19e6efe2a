"""What stands in the pages of the documentation: blocks of commands and of Python, and how they are run."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from tests.processes import aborted_at_exit, ran

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r" *```(.*)")
_PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )?(?:[\w./]*/)?(?:inshrink|make|pip|pip3|python3?|torchrun|ssh)(?: |$)", re.MULTILINE
)


class Block(NamedTuple):
    """One block of code: where it begins, what its fence says (None where it is indented), and its text."""

    page: str
    line: int
    fence: str | None
    text: str

    @property
    def is_shell(self):
        """Whether it is commands: by its fence, or, indented, by the program that its first line starts."""
        if self.fence is not None:
            return self.fence in ("", "bash", "console", "sh", "shell")
        return _PROGRAM.match(self.text) is not None

    @property
    def is_python(self):
        return self.fence is not None and self.fence.startswith("python")

    @property
    def title(self):
        """Return the name of the file that it is to be saved as."""
        found = re.search(r'title="([^"]+)"', self.fence or "")
        return found and found[1]

    @property
    def commands(self):
        """Return its commands as they are written, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(page):
    """Return the blocks of a page, in order."""
    found: list[Block] = []
    fence, start, taken = None, 0, []
    before = ""
    for number, line in enumerate([*(ROOT / page).read_text().splitlines(), "."], 1):
        mark = _FENCE.match(line)
        if fence is not None:
            if mark and not mark[1]:
                found.append(Block(page, start, fence, "\n".join(taken)))
                fence, taken = None, []
            else:
                taken.append(line)
        elif taken and (line.startswith("    ") or not line.strip()):
            taken.append(line.strip())
        elif line.startswith("    ") and not before.strip():
            start, taken = number, [line.strip()]
        else:
            if taken:
                found.append(Block(page, start, None, "\n".join(taken).strip()))
                taken = []
            if mark:
                fence, start = mark[1].strip(), number
        before = line
    return found


def run_in_order(page, folder):
    """Save the programs of a page in a folder, run its commands there, and return what each has written.

    What does not end, or changes the machine, is left out: the explorer, and ``pip``.
    """
    every = blocks(page)
    for block in every:
        if block.title is not None:
            (folder / block.title).write_text(block.text)
    output = {}
    for command in [item for block in every if block.is_shell for item in block.commands]:
        words = shlex.split(command, comments=True)
        if words[0] == "pip" or words[:2] == ["inshrink", "ui"] or "--watch" in words:
            continue
        programs = {
            "inshrink": ["-P", "-m", "inshrink_core.cli"],
            "python": [],
            "torchrun": ["-m", "torch.distributed.run"],
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        called = [sys.executable, *programs[words[0]], *words[1:]]
        done = ran(*called, cwd=folder, timeout=300, env=environment)
        # What it has written by then is compared by those who ask.
        well = done.returncode == 0 or (words[0] == "torchrun" and aborted_at_exit(done.stderr))
        assert well, (command, done.stdout[-2000:], done.stderr[-4000:])
        output[command] = done.stdout
    return output
