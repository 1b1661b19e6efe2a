"""The jail of paths, listings, and the list of recent runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inshrink_app.server import recent, roots
from inshrink_app.server.roots import OutsideRootsError


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd",
        "..",
        "a/../../..",
        "~root",
        "\0",
        "a\0b",
        "",
        "  ",
        "\\\\host\\share",
        "//host/share",
        "../root-secret",
    ],
)
def test_text_that_leads_outside_of_the_roots_is_refused(root, text):
    root.with_name("root-secret").mkdir()
    with pytest.raises(OutsideRootsError):
        roots.settings().resolve(text)


def test_a_link_that_leads_outside_is_refused_and_not_listed(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "way-out").symlink_to(outside)
    (root / "inside").mkdir()
    (root / "way-in").symlink_to(root / "inside")
    with pytest.raises(OutsideRootsError):
        roots.settings().resolve(str(root / "way-out"))
    assert [entry.path.name for entry in roots.list_folder(root).entries] == ["inside", "way-in"]


def test_paths_inside_of_a_root_resolve_absolute_and_relative(root):
    (root / "a").mkdir()
    assert roots.settings().resolve("a") == root / "a"
    assert roots.settings().resolve(str(root / "a" / ".." / "a")) == root / "a"
    assert roots.settings().resolve(str(root)) == root
    assert roots.configure([root / "a", root, root]).roots == (root,), "one inside of another is not listed"


def test_a_folder_is_listed_by_kind_and_in_natural_order(root):
    for name in ("step-10", "step-9", "digits.inshrink", "run", ".hidden"):
        (root / name).mkdir()
    (root / "run" / "model.safetensors").touch()
    (root / "notes.txt").touch()
    (root / "one.pt").write_bytes(b"12345")
    entries = roots.list_folder(root).entries
    assert [(entry.path.name, entry.kind) for entry in entries] == [
        ("digits.inshrink", "archive"),
        ("run", "run"),
        ("step-9", "folder"),
        ("step-10", "folder"),
        ("one.pt", "file"),
    ]
    assert entries[-1].nbytes == 5


def test_a_folder_of_many_says_how_many_are_hidden(root):
    for i in range(roots.MAX_ENTRIES + 7):
        (root / f"{i}").mkdir()
    listing = roots.list_folder(root)
    assert (len(listing.entries), listing.n_hidden) == (roots.MAX_ENTRIES, 7)


def test_recent_runs_are_few_the_newest_first_without_repeats(root):
    for name in ("a", "b", "a"):
        recent.remember_recent(root / name, "run")
    assert [Path(row.path).name for row in recent.load_recent()] == ["a", "b"]
    rows = json.loads(recent.recent_file().read_text())
    recent.recent_file().write_text(json.dumps([7, *rows]))
    assert len(recent.load_recent()) == 2, "a sound row beside a damaged one is kept"
    for i in range(30):
        recent.remember_recent(root / str(i), "archive")
    assert len(recent.load_recent()) == 8
    recent.forget_recent()
    assert recent.load_recent() == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"a": 1}',
        b"\xff\xfe",
        b"[" * 5000,
        b'[{"path": 3, "kind": "run", "opened_at": 1}]',
        b'[{"path": "a\\u0000b", "kind": "run", "opened_at": 1}]',
        b'[{"path": "/a", "kind": "else", "opened_at": 1}]',
        b'[{"path": "/a", "kind": "run", "opened_at": true}]',
        b'[{"path": "/a", "kind": "run", "opened_at": 1e999}]',
        b'[{"path": "/a", "kind": "run", "opened_at": NaN}]',
    ],
)
def test_a_damaged_list_of_recent_runs_is_an_empty_one(root, content):
    recent.recent_file().parent.mkdir(parents=True)
    recent.recent_file().write_bytes(content)
    assert recent.load_recent() == ()
    recent.remember_recent(root / "run", "run")
    assert len(recent.load_recent()) == 1


def test_a_state_folder_that_cannot_be_written_is_no_error(root, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    recent.remember_recent(root, "run")
    assert recent.load_recent() == ()
