"""The model of a disk says what is certain after a power loss, and leaves open what is not."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from benchmarks.crash.disk import Disk, Style, Tree
from benchmarks.crash.shim import Kind, Operation

ROOT = Path("/root-of-cases")
WRITING = os.O_CREAT | os.O_WRONLY


def operation(
    kind: Kind, path: str, *, result: int = 0, a: int = 0, b: int = 0, to: str = "", data: bytes = b""
):
    return Operation(kind, result, a, b, f"{ROOT}/{path}", f"{ROOT}/{to}" if to else "", data)


def new_file(path: str, data: bytes, descriptor: int = 3) -> list[Operation]:
    return [
        operation(Kind.OPEN, path, result=descriptor, a=WRITING),
        operation(Kind.WRITE, path, result=len(data), a=descriptor, data=data),
    ]


def synced(path: str, descriptor: int) -> list[Operation]:
    return [
        operation(Kind.OPEN, path, result=descriptor, b=1),
        operation(Kind.FSYNC, path, a=descriptor),
        operation(Kind.CLOSE, path, a=descriptor),
    ]


def states(operations: list[Operation], before: Tree, n: int = 60) -> list[Tree]:
    disk, random = Disk(ROOT, before), Random(0)
    for one in operations:
        disk.apply(one)
    return [disk.after(style, random) for style in Style] + [
        disk.after(Style.RANDOM, random) for _ in range(n)
    ]


def test_a_file_whose_folder_was_not_synced_may_be_gone():
    found = states([*new_file("a", b"x" * 6000), operation(Kind.FSYNC, "a", a=3)], {})
    assert {} in found
    assert {"a": b"x" * 6000} in found
    assert all(tree in ({}, {"a": b"x" * 6000}) for tree in found)  # its data is certain, its name is not


def test_data_that_was_not_synced_may_be_missing_torn_or_zero():
    found = {tree["a"] for tree in states([*new_file("a", b"x" * 6000), *synced("", 4)], {})}
    assert {b"", b"x" * 6000, bytes(6000)} <= found
    assert any(0 < content.count(b"x") < 6000 for content in found if content)


def test_what_file_and_folder_were_synced_for_is_certain():
    found = states([*new_file("a", b"x"), operation(Kind.FSYNC, "a", a=3), *synced("", 4)], {"b": b"y"})
    assert all(tree == {"a": b"x", "b": b"y"} for tree in found)


def test_a_file_synced_in_a_folder_that_was_not_is_gone_with_it():
    made = [
        operation(Kind.MKDIR, "d"),
        *new_file("d/a", b"x"),
        operation(Kind.FSYNC, "d/a", a=3),
        *synced("d", 4),
    ]
    found = states(made, {})
    assert {} in found
    assert all(tree in ({}, {"d": None, "d/a": b"x"}) for tree in found)


def test_changes_of_one_folder_come_in_order_and_a_rename_whole():
    found = states(
        [operation(Kind.RENAME, "a", to="b"), operation(Kind.UNLINK, "c")],
        {"a": b"1", "b": b"2", "c": b"3"},
    )
    kept = [{"a": b"1", "b": b"2", "c": b"3"}, {"b": b"1", "c": b"3"}, {"b": b"1"}]
    assert all(tree in kept for tree in found)
    assert all(tree in found for tree in kept)


def test_changes_of_two_folders_come_independently():
    found = states(
        [operation(Kind.UNLINK, "a/x"), operation(Kind.UNLINK, "b/x")],
        {"a": None, "a/x": b"", "b": None, "b/x": b""},
    )
    left = {frozenset(path for path in tree if "/" in path) for tree in found}
    assert left == {frozenset(), frozenset({"a/x"}), frozenset({"b/x"}), frozenset({"a/x", "b/x"})}


@pytest.mark.parametrize("error", [-28, -5])
def test_operations_that_failed_change_nothing(error):
    assert states([operation(Kind.UNLINK, "a", result=error)], {"a": b"1"}, 3)[0] == {"a": b"1"}
