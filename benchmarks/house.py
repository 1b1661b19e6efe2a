"""The size of the code, held by a ratchet: no figure of `benchmarks/house.toml` may rise.

``python -m benchmarks.house`` counts the working tree, prints each figure beside its limit, and exits with 1
if one is above it. A figure below its limit is printed with the amount by which the limit may be lowered;
``--write`` writes the figures as limits, in the commit that deletes.

Lines are those with a token that is neither a comment nor part of a docstring. `lines` has a row for each
package; a folder of tests or benchmarks is one row. Public names are those in an ``__all__``; options of
one name with two explanations are two; words are those of the documentation without its derived parts. Wide
functions have more than seven parameters, not counting ``self`` and ``cls``, outside ``ops``. A circle is a
set of modules that import each other. An exercise is a guide to an extension, with a test that follows it.
The flows count the functions of the engine, and their files, through which the values of a weight and its
Adam state pass while a run of two steps is compressed, and while its last step is read. A function counts if
an argument or a result is a tensor or an array of at least 16,384 elements (the weight has 65,536, a sample
of it 16,384), or at least 4 KiB, or if it has one of them as an item or a field. No document, file skeleton
or table of the run is that large. Compiled functions are not seen.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import math
import re
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import reference
from benchmarks.verbs import write_run
from inshrink_core.request import fields_of

ROOT = Path(__file__).parents[1]

LIMITS = ROOT / "benchmarks" / "house.toml"

EXERCISES = ("codec", "reader", "storage", "verb", "page")
"""What is added in one file and one line, as docs/guides say and tests/**/test_NAME_guide.py do."""

PRODUCT = ("inshrink_core", "inshrink_lab", "app")
FOLDERS = (*PRODUCT, "tests", "benchmarks")

_MANY = 7
_DERIVED = re.compile(r"<!-- derived: .*?<!-- end -->", re.DOTALL)
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
    names = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
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

    graph = grimp.build_graph("inshrink_core", "inshrink_lab", cache_dir=None)
    upstream = {module: graph.find_upstream_modules(module) for module in graph.modules}
    return {
        frozenset({module, *(item for item in above if module in upstream[item])})
        for module, above in upstream.items()
        if any(module in upstream[item] for item in above)
    }


def lines() -> dict[str, int]:
    """Return the lines of code of each package."""
    found = Counter[str]()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            split = folder not in ("tests", "benchmarks") and len(parts) > 2
            found["/".join(parts[:2]) if split else folder] += code_lines(path)
    return dict(sorted(found.items()))


def figures() -> dict[str, int]:
    """Return every figure that is no number of lines."""
    sources = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    public, wide = 0, 0
    for path in sources:
        public += n_public(path) if path.parts[-2] != "app" else 0
        if "ops" not in path.parts:
            tree = ast.walk(ast.parse(path.read_text()))
            wide += sum(isinstance(item, _FUNCTIONS) and n_parameters(item) > _MANY for item in tree)
    commands = reference.requests()
    options = {
        (field.names, field.text)
        for request in commands.values()
        for field in fields_of(request)
        if not field.by_place
    }
    guided = guides()
    return {
        "files": len(sources),
        "commands": len(commands),
        "options": len(options),
        "public names": public,
        "documentation words": words(),
        "wide functions": wide,
        "import circles": len(circles()),
        "exercises without a guide and its test": len(EXERCISES) - len(guided),
        "most lines an exercise adds beside its file": max(guided.values()),
        **_flows(),
    }


def words() -> int:
    """Return the words of the documentation, without its derived parts and the changelog."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sum(len(_DERIVED.sub("", page.read_text()).split()) for page in pages)


class Place(NamedTuple):
    """Where a function is."""

    file: str
    line: int
    name: str


def functions_passed(work: Callable[[], object]) -> set[Place]:
    """Return the distinct functions of the engine that receive or return values, on all threads."""
    met: set[Place] = set()
    inside = str(ROOT / "inshrink_core")

    def note(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        place = Place(code.co_filename, code.co_firstlineno, code.co_qualname)
        if not place.file.startswith(inside) or code.co_name.startswith("<") or place in met:
            return
        found = frame.f_locals.values() if event == "call" else [result] if event == "return" else ()
        if any(map(holds_values, list(found))):
            met.add(place)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return met


_LEAST_NUMEL, _LEAST_NBYTES = 1 << 14, 1 << 12


def holds_values(value: Any, *, inside: bool = True) -> bool:
    """Whether something is a large tensor, array or bytes, or has one as an item or a field."""
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) >= _LEAST_NUMEL
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value) >= _LEAST_NBYTES
    if isinstance(value, tuple | list):
        items = value
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        items = list(getattr(value, "__dict__", {}).values())
    return inside and any(holds_values(item, inside=False) for item in items)


def guides() -> dict[str, int]:
    """Return the exercises that a guide describes and a test does, with the lines each registers."""
    found = {}
    for name in EXERCISES:
        guide = ROOT / "docs" / "guides" / f"{name}.md"
        if guide.exists() and list((ROOT / "tests").rglob(f"test_{name}_guide.py")):
            tables = re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL)
            projects = [tomllib.loads(table).get("project", {}) for table in tables]
            groups = [group for item in projects for group in item.get("entry-points", {}).values()]
            found[name] = sum(map(len, groups)) or 1
    return found


def _flows() -> dict[str, int]:
    """Count the functions and files that a weight passes to its frame, and a frame to its tensor."""
    import inshrink_core

    with tempfile.TemporaryDirectory() as folder:
        run, archive = Path(folder, "run"), Path(folder, "a.inshrink")
        write_run(run, {"weight": torch.randn(256, 256)}, moments=True, n_steps=2)

        def write() -> None:
            inshrink_core.compress(run, archive, threads=1)

        def read() -> None:
            found = inshrink_core.open(archive)
            found[found.steps[-1]].state_dict()

        write()  # compiles and fills caches
        read()
        archive.rename(Path(folder, "before"))
        flows = {"weight to frame": functions_passed(write), "frame to tensor": functions_passed(read)}
    functions = {f"functions from {flow}": len(places) for flow, places in flows.items()}
    return functions | {
        f"files from {flow}": len({place.file for place in places}) for flow, places in flows.items()
    }


def main(arguments: list[str]) -> int:
    """Print every figure beside its limit; return 1 if one is above."""
    limits = tomllib.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    found = {"lines": lines(), "figures": figures()}
    risen = 0
    for table, rows in found.items():
        print(f"{table:<44}{'now':>8}{'limit':>8}")
        for name, value in rows.items():
            limit = limits.get(table, {}).get(name, 0)
            risen += value > limit
            note = "above its limit" if value > limit else f"may be lowered by {limit - value}"
            print(f"  {name:<42}{value:>8,}{limit:>8,}  {note if value != limit else ''}")
    if "--write" in arguments:
        texts = (
            f"[{table}]\n" + "".join(f'"{name}" = {value}\n' for name, value in rows.items())
            for table, rows in found.items()
        )
        LIMITS.write_text(_NOTE + "\n".join(texts))
    return int(risen > 0)


_NOTE = """# What `make house` counts. A figure above its limit fails; a commit that deletes lowers the limit.
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
