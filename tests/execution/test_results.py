"""Results that are kept, never half there; working folders, each its process's own, and gone with it."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial

import msgspec
import pytest

from inshrink_core.errors import StorageError
from inshrink_core.execution.files import new_locked, working_folder
from inshrink_core.execution.results import ResultStore, add_line, shared_lines


@dataclass(frozen=True)
class Record:
    n: int
    values: tuple[float | None, ...]


RECORD = Record(3, (1.0, None, 2))
KEY = {"run": ["a"], "step": 3}


def store_in(folder):
    return ResultStore(folder, "record", partial(msgspec.convert, type=Record))


def test_a_result_is_known_to_every_store_of_the_folder_and_under_its_key_alone(tmp_path):
    assert store_in(tmp_path).load("a label", KEY) is None
    store_in(tmp_path).keep("a label", KEY, asdict(RECORD))
    assert store_in(tmp_path).load("a label", KEY) == RECORD
    assert store_in(tmp_path).load("a label", KEY | {"step": 4}) is None


def test_a_result_that_was_changed_on_disk_or_has_no_digest_is_made_again(tmp_path):
    store = store_in(tmp_path)
    store.keep("r", KEY, asdict(RECORD))
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"record": document["record"] | {"n": 4}}))
    assert store.load("r", KEY) is None
    del document["sha256"]
    path.write_text(json.dumps(document, indent=1))
    assert store.load("r", KEY) is None


def test_what_cannot_be_written_is_an_error_or_is_made_again(tmp_path):
    (tmp_path / "file").write_text("")
    store = store_in(tmp_path / "file")
    with pytest.raises(StorageError):
        store.keep("r", KEY, asdict(RECORD))
    store.try_keep("r", KEY, asdict(RECORD))
    assert store.load("r", KEY) is None


def test_a_log_that_several_add_to_has_every_line_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    code = (
        "import sys; from pathlib import Path; from inshrink_core.execution.results import add_line\n"
        "for n in range(50):\n"
        "    add_line(Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, 'text': 'x' * 5000}, 1 << 20)"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    rows = list(shared_lines(path))
    assert [[row["n"] for row in rows if row["who"] == who] for who in "ab"] == [list(range(50))] * 2


def test_damaged_lines_of_a_shared_log_are_passed_over_and_cost_no_other(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\nnothing\n[3]\n\xff\n{"n": 2')
    add_line(path, {"n": 3})
    assert [row["n"] for row in shared_lines(path)] == [1, 3]


def test_a_shared_log_keeps_the_newest_within_its_bound(tmp_path):
    path = tmp_path / "log.jsonl"
    add_line(path, {"text": "x" * 2000}, 1000)
    for n in range(200):
        add_line(path, {"n": n}, 1000)
    found = [row["n"] for row in shared_lines(path)]
    assert found == list(range(found[0], 200))
    assert sum(child.stat().st_size for child in tmp_path.iterdir()) <= 2000


def test_a_shared_log_is_never_written_through_a_link(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("mine")
    (tmp_path / "log.jsonl").symlink_to(target)
    with pytest.raises(StorageError):
        add_line(tmp_path / "log.jsonl", {"n": 1})
    assert target.read_text() == "mine"


def test_a_folder_that_another_process_takes_for_one_that_was_left_is_made_again(tmp_path, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def taken(**asked):
        made.append(folder := make(**asked))
        if len(made) == 1:
            new_locked(tmp_path)[1].close()  # another process begins before the first folder is held
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with working_folder(tmp_path) as folder:
        assert folder.is_dir()
        assert len(made) == 3, "the first was taken"
        with working_folder(tmp_path) as other:
            assert folder.is_dir(), "this one is held"
            assert other.is_dir()
    assert not list(tmp_path.glob(".inshrink-*"))
