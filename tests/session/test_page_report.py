"""One HTML file about a run and its archive: what it tells, and what it never does."""

import errno
import hashlib
import json
import os
from html.parser import HTMLParser

import pytest
import torch

import inshrink_core
from inshrink_core.errors import ExistsError, InputError, StorageError
from inshrink_core.verbs import report

HOSTILE = "<script>alert(1)</script>\u202e&'\""
VOID = {"meta"}
STEP = {
    "step": 20, "original": 2.0, "restored": 2.1, "drop": 0.05, "divergence": 1e-3,
    "restore_cost": 5e-4, "stale_drop": None,
}  # fmt: skip
COMPARED = {
    "metric": HOSTILE, "direction": "lower", "max_drop": 0.05, "max_divergence": 1e-3,
    "max_restore_cost": 5e-4, "steps": [STEP],
}  # fmt: skip
REHEARSED = {
    "task": HOSTILE, "metric": "loss", "direction": "lower", "excess": 0.01, "excess_half_width": None,
    "noise": None, "ratio_total": 12.0,
    "curves": [{"seed": 0, "steps": [1, 2], "uninterrupted": [2.0, 1.0], "restored": [2.0, 1.1]}],
}  # fmt: skip


class Page(HTMLParser):
    """Reads a page, and fails where an element is not closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = set(), set(), [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported") / "run"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for step in (10, 20, 30):
        weights = {f"{HOSTILE}.weight": torch.randn(8, 6, generator=generator), "b.bias": torch.zeros(4)}
        weights["b.bias"][0] = float("nan")
        torch.save({"model": weights, "step": step}, folder / f"step_{step}.pt")
    lines = [f"step,loss,{'<b>acc</b>'}", "10,1e308,0.5", "20,-1e308,inf", "30,nan,0.7"]
    (folder / "metrics.csv").write_text("\n".join(lines))
    (folder / "judge.py").write_text("def evaluate(state):\n    raise SystemExit\n")
    (folder / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\n')
    inshrink_core.compress(folder, folder.with_name("run.inshrink"))
    return folder


def test_a_page_tells_everything_and_asks_nobody(run, tmp_path):
    target = tmp_path / "page.html"
    made = report(run, target, compared=COMPARED, rehearsed=REHEARSED)
    content = target.read_bytes()
    assert made.sections == (
        "size", "sensitivity", "training", "compared", "rehearsal", "commands", "hashes",
    )  # fmt: skip
    assert (made.nbytes, made.digest) == (len(content), hashlib.sha256(content).hexdigest())
    page = Page(content.decode())
    assert not page.tags & {"script", "img", "link", "iframe", "object", "a", "b", "image", "use"}
    assert not page.attributes & {"src", "href", "style", "onload", "onerror", "xlink:href"}
    assert b"default-src 'none'" in content
    assert b"http:" not in content
    assert b"https:" not in content
    assert "\u202e" not in content.decode()
    told = "".join(page.text)
    assert "<script>alert(1)</script>\\u202e" in told
    for file in (run / "judge.py", run.with_name("run.inshrink") / "inshrink-manifest"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in told
    assert "nan" not in told.replace("uninterrupted", "").casefold().split()


def test_an_archive_tells_sizes_of_its_own_and_with_its_run_the_training(run, tmp_path):
    archive = run.with_name("run.inshrink")
    alone = report(archive, tmp_path / "alone.html")
    assert "training" not in alone.sections
    assert "of the restored weights" in (tmp_path / "alone.html").read_text()
    both = report(archive, tmp_path / "both.html", against=run)
    assert {"size", "sensitivity", "training", "hashes"} <= set(both.sections)


def test_a_run_without_an_archive_is_told_of_too(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, folder / "step_1.pt")
    made = report(folder, tmp_path / "page.html")
    assert {"size", "sensitivity", "commands"} <= set(made.sections)
    assert "none yet" in (tmp_path / "page.html").read_text()


def test_a_file_that_is_there_is_kept_unless_it_may_be_replaced(run, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("mine")
    with pytest.raises(ExistsError):
        report(run, target)
    assert target.read_text() == "mine"
    report(run, target, force=True)
    assert target.read_text() != "mine"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("wrong", [{"compared": {"steps": [{}]}}, {"rehearsed": {"curves": []}}])
def test_a_document_of_something_else_is_refused(run, tmp_path, wrong):
    with pytest.raises(InputError, match="no document of"):
        report(run, tmp_path / "page.html", **wrong)
    assert not (tmp_path / "page.html").exists()


def test_documents_are_read_from_files_and_from_the_list_that_a_job_keeps(run, tmp_path):
    (tmp_path / "result").write_text(json.dumps([{"archive_bytes": 1}, {"ok": True}, COMPARED]))
    made = report(run, tmp_path / "page.html", compared=tmp_path / "result")
    assert "compared" in made.sections
    (tmp_path / "bad").write_text("{")
    with pytest.raises(InputError, match="no JSON"):
        report(run, tmp_path / "other.html", rehearsed=tmp_path / "bad")


def test_an_archive_as_the_original_is_refused(run, tmp_path):
    archive = run.with_name("run.inshrink")
    with pytest.raises(InputError, match="original run"):
        report(archive, tmp_path / "page.html", against=archive)


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_disk_that_is_full_leaves_the_page_that_was_there(run, tmp_path, monkeypatch, call):
    def refuse(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "page.html"
    target.write_bytes(b"mine")
    with monkeypatch.context() as system:
        system.setattr(call, refuse)
        with pytest.raises(StorageError, match="free some space") as told:
            report(run, target, force=True)
    assert told.value.where == str(target)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"mine"
