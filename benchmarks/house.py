"""How large and how deep the house is: what there is beside what it should be.

``python -m benchmarks.house`` prints lines of code by package, then each figure of `TARGETS`, then the
functions a tensor passes on its way, for the working tree; it exits with 1 where a figure is above its
target. Two of the house's targets are not counted here: `make test` within ten minutes on two cores, and
bytes that stay as they are (`benchmarks.parity`). Lines are counted without blanks, comments and
docstrings; the engine is what is neither the laboratory (`inshrink_core.lab`) nor shipped for tests
(`inshrink_core.testing`). A folder's files are its modules without ``__init__``; parameters are counted
without ``self`` and ``cls``; public is what an ``__all__`` lists; modules that import each other, whenever
and however, are a circle. A request's files are those of the engine in which a function runs from the words
of a command to the verb's `perform`. The functions of `LatticeCodec.encode` are those that run in it while
it writes a delta of one weight of the sample run, but for those that are one ``return``. An exercise is a
guide to adding something, whose test does it with one new file (a page: a folder) and one line of
registration. The way of a tensor is the distinct functions of the engine that run while two steps of the
sample run are written into an archive and one weight of the second is read back. What runs is counted by
the interpreter's profiler.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]

TARGETS = {
    "lines of the engine": 31_500,
    "lines of the explorer": 11_500,
    "lines of the laboratory": 5_000,
    "lines of the command line": 1_200,
    "files of the fullest folder": 15,
    "functions with more than 7 parameters": 12,
    "public names of the engine": 400,
    "files from a request to its verb": 6,
    "functions in LatticeCodec.encode": 20,
    "exercises without a guide and its test": 0,
    "most lines an exercise adds beside its file": 1,
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

EXERCISES = ("codec", "reader", "storage", "verb", "page")
"""What is added in one file and one line, as docs/guides say and tests/**/test_NAME_guide.py do."""

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
        "files from a request to its verb": len({place.file for place in _request_to_verb()}),
        "functions in LatticeCodec.encode": len([one for one in _encoding() if not _only_returns(one)]),
        "exercises without a guide and its test": len(EXERCISES) - len(guides()),
        "most lines an exercise adds beside its file": max(guides().values()),
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


class Place(NamedTuple):
    """Where a function is."""

    file: str
    line: int
    name: str


def functions_passed(work: Callable[[], object]) -> set[Place]:
    """Return the distinct functions of the engine that run during some work, on all threads."""
    met: set[Place] = set()
    inside = str(ROOT / "inshrink_core")

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside) and not code.co_name.startswith("<"):
            met.add(Place(code.co_filename, code.co_firstlineno, code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return met


def _request_to_verb() -> set[Place]:
    """Return the functions that run from the words of a command to the verb, modules imported before."""
    from inshrink_core.cli import application
    from inshrink_core.verbs.restore import Restore

    def stop(_request: Restore) -> None:
        sys.setprofile(None)
        raise KeyboardInterrupt

    words = ["restore", "a.inshrink", "-o", "out", "--step", "400", "--quiet"]
    with mock.patch.object(Restore, "perform", stop), contextlib.redirect_stderr(io.StringIO()):
        application.main(words)  # imports what it needs
        return functions_passed(lambda: application.main(words))


def _encoding() -> set[Place]:
    """Return the functions that run while the lattice encodes a delta of one weight."""
    import inshrink_core
    from inshrink_core.codecs.lattice.codec import LatticeCodec

    encode, met = LatticeCodec.encode, set[Place]()

    def watched(codec: LatticeCodec, item: Any, plan: Any, reference: Any) -> Any:
        if item.spec.key != "conv2.weight" or reference is None:
            return encode(codec, item, plan, reference)
        found = []
        met.update(functions_passed(lambda: found.append(encode(codec, item, plan, reference))))
        return found[0]

    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(LatticeCodec, "encode", watched):
        inshrink_core.compress(run, Path(folder) / "a.inshrink", steps=run.steps[:2], threads=1)
    return met


def _only_returns(place: Place) -> bool:
    """Whether a function is one return."""
    name = place.name.rpartition(".")[2]
    for node in ast.walk(ast.parse(Path(place.file).read_text())):
        if not isinstance(node, _FUNCTIONS) or node.name != name:
            continue
        if place.line in (node.lineno, *(one.lineno for one in node.decorator_list)):
            body = node.body[ast.get_docstring(node) is not None :]
            return len(body) == 1 and isinstance(body[0], ast.Return)
    return False


def guides() -> dict[str, int]:
    """Return the exercises that a guide describes and a test does, with the lines each registers."""
    found = {}
    for name in EXERCISES:
        guide = ROOT / "docs" / "guides" / f"{name}.md"
        if guide.exists() and list((ROOT / "tests").rglob(f"test_{name}_guide.py")):
            tables = re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL)
            projects = [tomllib.loads(table).get("project", {}) for table in tables]
            groups = [group for one in projects for group in one.get("entry-points", {}).values()]
            found[name] = sum(map(len, groups)) or 1
    return found


def seconds(program: str, n: int = 5) -> float:
    """Return the least wall time of a Python program in a process of its own."""
    taken = []
    for _ in range(n):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True)
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> int:
    """Print the tables; return 1 where a figure is above its target."""
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
    return int(any(found[name] > target for name, target in TARGETS.items()))


_HELP = "import sys; sys.argv = ['inshrink', '--help']; from inshrink_core.cli import main; main()"

if __name__ == "__main__":
    sys.exit(main())
