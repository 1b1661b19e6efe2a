"""Seeded faults: mutants of the engine that the tests must catch: ``python -m benchmarks.faults [--new]``.

Fifty mutants, of each package as many, chosen by chance, are in ``results/faults.csv``: a comparison is
turned, an integer is off by one, a condition is negated, or a call is left out. Each is applied to a copy
of the working tree, and the tests of its package run there until one fails. By default those recorded as
caught run again, and the exit code is 1 where a test no longer notices one; a mutant whose code is gone is
named and not run. ``--new`` runs those that were not caught yet, until ``--seconds`` are over, and records
each.

A mutant is found again by file, function, kind and text, so that code around it may change.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import RESULTS, read

ROOT = Path(__file__).parents[1]
LIST = RESULTS / "faults.csv"

N_FAULTS = 50
LIMIT_S = 300
"""A mutant that does not end is noticed, too."""

_BLACKBOX = "blackbox: writing keeping"
_TESTS = {
    "formats": "formats: runs torch_files order writing distributed deepspeed metrics_files matching "
    "checksums hostile_pickles dcp_state runs_elsewhere",
    "archive": "archive: archive_reader archive_writer layout packed segments storage objects; "
    "integrations: hub",
    "chain": "chain: append encoder lineage override base chain_report attachments",
    "codecs": "codecs: lattice lossless moments inshrinkerator lattice_exact; lab: bench_variants",
    "coding": "coding: adaptive changes coders lzma2 rans",
    "verbs": "verbs: export prune release steps; cli: cli_verbs; blackbox: judging command",
}
"""Of each package the tests that run first; those of the command line follow."""

_TURNED = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Fault(NamedTuple):
    """One mutant: where it is, and the text it has in place of another."""

    file: str
    function: str
    kind: str
    before: str
    after: str
    nth: int
    span: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def package(self) -> str:
        """The package of the engine that it is in."""
        return self.file.split("/")[1]

    @property
    def name(self) -> tuple[str, ...]:
        """What it is found again by."""
        return (self.file, self.function, self.kind, self.before, str(self.nth))


def mutated(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield kind, expression and replacement of the mutants of a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        turned = copy.deepcopy(node)
        turned.ops[0] = _TURNED[type(node.ops[0])]()
        yield "comparison", node, turned
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant", node, ast.Constant(node.value + 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node.value, ast.Constant(None)


def faults_in(file: str, source: str) -> list[Fault]:
    """Return all mutants of functions in a module; messages of errors and formatted texts have none."""
    found: list[Fault] = []

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        for kind, old, new in mutated(node) if function else ():
            span = (old.lineno, old.col_offset, old.end_lineno, old.end_col_offset)
            before, after = ast.unparse(old), f"({ast.unparse(new)})"
            same = sum(item[:4] == (file, function, kind, before) for item in found)
            found.append(Fault(file, function, kind, before, after, same, span))
        for child in ast.iter_child_nodes(node):
            walk(child, function)

    walk(ast.parse(source), "")
    return found


def tests_of(package: str) -> list[str]:
    """Return the files of tests, in the order in which they run."""
    folders = [item.strip().split(": ") for item in f"{_TESTS[package]}; {_BLACKBOX}".split(";")]
    return [f"tests/{folder}/test_{name}.py" for folder, names in folders for name in names.split()]


def faults_of(package: str) -> list[Fault]:
    """Return all mutants of a package of the engine."""
    paths = sorted((ROOT / "inshrink_core" / package).rglob("*.py"))
    return [item for path in paths for item in faults_in(path.relative_to(ROOT).as_posix(), path.read_text())]


def apply(source: str, fault: Fault) -> str:
    """Return a module's text with a mutant in it."""
    lines = source.encode().splitlines(keepends=True)
    first, begin, last, end = fault.span
    head = b"".join(lines[: first - 1]) + lines[first - 1][:begin]
    tail = lines[last - 1][end:] + b"".join(lines[last:])
    return (head + fault.after.encode() + tail).decode()


def failing(copied: Path, package: str, *options: str) -> list[str]:
    """Run a package's tests in a copy of the tree, and return those that fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "--hypothesis-seed=0"]
    paths = os.pathsep.join(filter(None, (str(copied), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *options, *tests_of(package)],
            cwd=copied, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ["no end"]
    lines = done.stdout.splitlines()
    failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [item.partition(" - ")[0] for item in failed] or ["no result"] * (done.returncode != 0)


def caught_by(copied: Path, fault: Fault, unsound: list[str]) -> str:
    """Apply a mutant to a copy of the tree, and return the first test that fails for it alone."""
    path, source = copied / fault.file, (ROOT / fault.file).read_text()
    try:
        path.write_text(apply(source, fault))
        found = failing(copied, fault.package, "-x", *(f"--deselect={item}" for item in unsound))
        return found[0].removeprefix("tests/")[:120] if found else ""
    finally:
        shutil.copy2(ROOT / fault.file, path)


def _write(rows: list[dict[str, str]]) -> None:
    with LIST.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Run mutants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--new", action="store_true", help="run those not caught yet")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("packages", nargs="*", choices=[[], *_TESTS], help="by default all")
    arguments = parser.parse_args()
    rows = read(LIST.stem)
    now = {item.name: item for package in _TESTS for item in faults_of(package)}
    begun, missed, unsound = time.monotonic(), 0, dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="inshrink-faults-") as folder:
        copied = Path(folder) / "tree"
        shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "build", "data"))
        packages = arguments.packages or [*_TESTS]
        for row in (r for package in packages for r in rows if r["file"].split("/")[1] == package):
            if row["result"] not in (("not run", "not caught") if arguments.new else ("caught",)):
                continue
            if time.monotonic() - begun > arguments.seconds:
                break
            fault, test = now.get(Fault(*[row[name] for name in Fault._fields[:6]]).name), ""
            if fault is not None:
                if fault.package not in unsound:
                    unsound[fault.package] = failing(copied, fault.package)
                    if {"no end", "no result"} & {*unsound[fault.package]}:
                        sys.exit(f"the tests of {fault.package} do not end without a fault")
                    sys.stderr.write("".join(f"without a fault: {x}\n" for x in unsound[fault.package]))
                test = caught_by(copied, fault, unsound[fault.package])
            result = "gone" if fault is None else "caught" if test else "not caught"
            sys.stdout.write(f"{result}: {row['file']} {row['function']}: {row['before'][:60]} {test}\n")
            sys.stdout.flush()
            missed += result == "not caught"
            if arguments.new:
                row |= {"result": result, "test": test}
                _write(rows)
    return 0 if arguments.new else int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
