"""How deep the house is: lines of code by package, and the functions a tensor passes on its way.

``python -m benchmarks.house`` prints both for the working tree. Lines are counted without blanks, comments
and docstrings. The way of a tensor is the distinct functions of the project that run while one weight of the
sample run is written into an archive at two steps and read back, counted by the interpreter's profiler.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: Path) -> int:
    """Return a file's lines of code: those with a token that is no comment and no part of a docstring."""
    source = path.read_text()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def by_package(folder: Path) -> dict[str, tuple[int, int]]:
    """Return files and lines of code of each package of a folder, by its name."""
    files, lines = Counter[str](), Counter[str]()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).parts
        package = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        files[package] += 1
        lines[package] += code_lines(path)
    return {package: (files[package], lines[package]) for package in sorted(files)}


def functions_passed(work: Callable[[], None]) -> set[str]:
    """Return the distinct functions of the engine that run during some work, on all threads."""
    met: set[str] = set()
    inside = str(ROOT / "inshrink_core")

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            met.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return met


def seconds(program: str, n: int = 5) -> float:
    """Return the least wall time of a Python program in a process of its own."""
    taken = []
    for _ in range(n):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True)
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> None:
    """Print the table."""
    total = 0
    for folder in ("inshrink_core", "app"):
        packages = by_package(ROOT / folder)
        counted = sum(lines for name, (_, lines) in packages.items() if not name.endswith("/testing"))
        for name, (n_files, n_lines) in packages.items():
            print(f"{name:<32}{n_files:>6} files{n_lines:>8} lines")
        print(f"{folder:<32}{'':>12}{counted:>8} lines, testing/ apart")
        total += counted
    print(f"{'together':<44}{total:>8} lines")

    import inshrink_core

    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "a.inshrink"

        def write() -> None:
            inshrink_core.compress(run, archive, steps=run.steps[:2], threads=1)

        def read() -> None:
            found = inshrink_core.open(archive)
            found[found.steps[1]]["conv1.weight"]

        write()  # what is compiled or cached at first use is there
        archive.rename(Path(folder) / "first.inshrink")
        written, restored = functions_passed(write), functions_passed(read)
    print(f"from file to frame: {len(written)} functions; from frame to tensor: {len(restored)}")
    print(f"import inshrink_core: {seconds('import inshrink_core'):.3f} s")
    print(f"inshrink --help: {seconds(_HELP):.3f} s")


_HELP = "import sys; sys.argv = ['inshrink', '--help']; from inshrink_core.cli import main; main()"

if __name__ == "__main__":
    main()
