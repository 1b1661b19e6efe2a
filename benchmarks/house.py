"""How large and how deep the house is: what there is beside what it should be.

``python -m benchmarks.house`` prints lines of code by package, then each figure of `TARGETS`, then the
functions a tensor passes on its way, for the working tree. Lines are counted without blanks, comments and
docstrings; the engine is what is neither the laboratory (`inshrink_core.lab`) nor shipped for tests
(`inshrink_core.testing`). A folder's files are its modules without ``__init__``; parameters are counted
without ``self`` and ``cls``; public is what an ``__all__`` lists; modules that import each other, whenever
and however, are a circle. The way of a tensor is the distinct functions of the project that run while one
weight of the sample run is written into an archive at two steps and read back, counted by the interpreter's
profiler.
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

TARGETS = {
    "lines of the engine": 31_500,
    "lines of the explorer": 11_500,
    "lines of the laboratory": 5_000,
    "lines of the command line": 1_200,
    "files of the fullest folder": 15,
    "functions with more than 7 parameters": 12,
    "public names of the engine": 400,
    "import circles": 0,
}
"""What each figure should be at most. Functions below ``ops`` are not counted: kernels take many arrays."""

PARTS = {
    ("inshrink_core", ""): ("engine", ""),
    ("inshrink_core", "cli"): ("engine", "cli"),
    ("inshrink_core", "lab"): ("lab", ""),
    ("inshrink_core", "testing"): ("testing", ""),
    ("app", ""): ("explorer", ""),
}
"""Which part of the house the code of a folder is of; the command line is counted by itself as well."""

_MANY = 7
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


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


def n_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a function has, but for that of its object or class."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def n_public(path: Path) -> int:
    """Return how many names a module lists in ``__all__``; those of an index that is made are not counted."""
    return sum(
        len(node.value.elts)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if isinstance(node.value, ast.List)
    )


def circles() -> set[frozenset[str]]:
    """Return the modules of the engine that import each other, by circle."""
    import grimp

    graph = grimp.build_graph("inshrink_core", cache_dir=None)
    upstream = {module: graph.find_upstream_modules(module) for module in graph.modules}
    return {
        frozenset({module, *(one for one in above if module in upstream[one])})
        for module, above in upstream.items()
        if any(module in upstream[one] for one in above)
    }


def figures() -> dict[str, int]:
    """Return every figure that has a target, by its name in `TARGETS`."""
    lines, files = Counter[str](), Counter[Path]()
    public, wide = Counter[str](), 0
    for folder in ("inshrink_core", "app"):
        for path in (ROOT / folder).rglob("*.py"):
            part, room = PARTS.get(path.relative_to(ROOT).parts[:2], PARTS[folder, ""])
            lines[part] += code_lines(path)
            lines[room] += code_lines(path) if room else 0
            public[part] += n_public(path)
            files[path.parent] += path.name != "__init__.py"
            tree = ast.walk(ast.parse(path.read_text()))
            if "ops" not in path.parts:
                wide += sum(isinstance(one, _FUNCTIONS) and n_parameters(one) > _MANY for one in tree)
    fullest, n_files = files.most_common(1)[0]
    print(f"fullest folder: {fullest.relative_to(ROOT)}")
    return {
        "lines of the engine": lines["engine"],
        "lines of the explorer": lines["explorer"],
        "lines of the laboratory": lines["lab"],
        "lines of the command line": lines["cli"],
        "files of the fullest folder": n_files,
        f"functions with more than {_MANY} parameters": wide,
        "public names of the engine": public["engine"],
        "import circles": len(circles()),
    }


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
    """Print the tables."""
    for folder in ("inshrink_core", "app"):
        for name, (n_files, n_lines) in by_package(ROOT / folder).items():
            print(f"{name:<44}{n_files:>6} files{n_lines:>8} lines")
    found = figures()
    print(f"\n{'':<44}{'now':>8}{'target':>8}")
    for name, target in TARGETS.items():
        print(f"{name:<44}{found[name]:>8,}{target:>8,}{'' if found[name] <= target else '  above'}")

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
