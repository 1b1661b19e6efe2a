"""One HTML file about a run and its archive: what it tells, and what it never does."""

import copy
import errno
import hashlib
import json
import os
from html.parser import HTMLParser

import pytest
import torch

import inshrink_core
from inshrink_core import Archive
from inshrink_core.errors import ExistsError, InputError, StorageError
from inshrink_core.formats import open_run
from inshrink_core.text import percent
from inshrink_core.verbs import compare, compare_archives, newest_comparison, pack, report

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


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Return a run with an evaluator, and two archives of it, one of them elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for step in (10, 20):
        torch.save({"model": {"w": torch.randn(8, 8, generator=generator)}}, folder / f"step_{step}.pt")
    (tmp_path / "judge.py").write_text(
        "def evaluate(state):\n    return {'loss': float(state['w'].norm())}\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    inshrink_core.compress(folder, tmp_path / "run.inshrink")
    inshrink_core.compress(folder, elsewhere / "fine.inshrink", codec="lossless")
    return folder, tmp_path / "run.inshrink", elsewhere / "fine.inshrink", f"{tmp_path}/judge.py:evaluate"


def told_of(target):
    return "".join(Page(target.read_text()).text)


def test_a_report_finds_the_newest_comparison_by_itself(judged, tmp_path):
    run, archive, fine, judge = judged
    assert "compared" not in report(archive, tmp_path / "0.html").sections
    found = compare(archive, run, evaluator=judge)
    for number, (path, more) in enumerate([(run, {}), (archive, {}), (archive, {"against": run})]):
        target = tmp_path / f"report-{number}.html"
        assert "compared" in report(path, target, **more).sections
        assert percent(found.max_drop) in told_of(target)
        assert "Measured on 20" in told_of(target)
    # Of the run, every archive that was compared is told of; of an archive alone, what the user has measured.
    compare(fine, run, evaluator=judge)
    assert len(newest_comparison(Archive.open(archive), open_run(run))["archives"]) == 2
    assert "compared" in report(fine, tmp_path / "fine.html", against=run).sections
    assert "compared" in report(fine, tmp_path / "alone.html").sections
    assert not (tmp_path / "elsewhere" / "fine").exists()


def test_a_comparison_of_several_archives_is_told_of_each(judged, tmp_path):
    run, archive, fine, judge = judged
    found = compare_archives([archive, fine], run, evaluator=judge)
    (tmp_path / "compared.json").write_text(json.dumps(found.to_json()))
    (tmp_path / "job.json").write_text(json.dumps([{"archive_bytes": 1}, found.to_json()]))
    report(fine, tmp_path / "fine.html", against=run)
    told = told_of(tmp_path / "fine.html")
    assert 0 < told.index("fine.inshrink", told.index("Restored against")) < told.index("run.inshrink")
    for file in ("compared.json", "job.json"):
        assert "compared" in report(run, tmp_path / f"{file}.html", compared=tmp_path / file).sections
        told = told_of(tmp_path / f"{file}.html")
        assert told.count("largest restore cost") == 2


def test_a_comparison_counts_for_the_archive_as_it_was_packed_too(judged, tmp_path):
    run, archive, _, judge = judged
    compare(archive, run, evaluator=judge)
    packed = tmp_path / "elsewhere" / "packed.inshrink"
    pack(archive, packed)
    assert newest_comparison(Archive.open(packed), open_run(run)) is not None
    torch.save({"model": {"w": torch.ones(8, 8)}}, run / "step_30.pt")
    inshrink_core.compress(run, archive)
    assert newest_comparison(Archive.open(archive), open_run(run)) is None


@pytest.mark.parametrize(
    ("field", "told"),
    [("metric", 3), ("steps", [{}]), ("steps", 3), ("at", 1e300), ("at", "x"), ("direction", "up")],
)
def test_a_comparison_that_cannot_be_told_costs_no_report(judged, tmp_path, field, told):
    run, archive, _, judge = judged
    compare(archive, run, evaluator=judge)
    (kept,) = (run / ".inshrink" / "measured").glob("*.jsonl")
    row = json.loads(kept.read_text())
    (row if field == "at" else row["document"])[field] = told
    kept.write_text(json.dumps(row) + "\nno JSON\n")
    made = report(archive, tmp_path / "page.html", against=run)
    assert ("compared" in made.sections) == (field == "metric")


def test_an_archive_tells_sizes_of_its_own_and_with_its_run_the_training(run, tmp_path):
    archive = run.with_name("run.inshrink")
    alone = report(archive, tmp_path / "alone.html")
    assert "training" not in alone.sections
    assert "of the restored weights" in (tmp_path / "alone.html").read_text()
    assert "How far the weights moved" in (tmp_path / "alone.html").read_text()
    assert "Where an error hurts" not in (tmp_path / "alone.html").read_text()
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


@pytest.mark.parametrize("value", [10**400, -(10**400), "10", None, [], {}, [[]] * 3, True])
def test_a_document_with_a_value_that_is_none_of_ours_is_shown_or_refused_in_one_line(run, tmp_path, value):
    """In the place of every value: of what is asked for, of a step, of a curve."""
    places = [("compared", COMPARED, (key,)) for key in COMPARED]
    places += [("compared", COMPARED, ("steps", 0, key)) for key in COMPARED["steps"][0]]
    places += [("rehearsed", REHEARSED, (key,)) for key in REHEARSED]
    places += [("rehearsed", REHEARSED, ("curves", 0, key)) for key in REHEARSED["curves"][0]]
    places += [
        ("rehearsed", REHEARSED, ("curves", 0, "steps", 1)),
        ("rehearsed", REHEARSED, ("curves", 0, "restored", 0)),
    ]
    chained, told = inshrink_core.open(run), []
    for given, document, path in places:
        changed = copy.deepcopy(document)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        file = tmp_path / "document.json"
        file.write_text(json.dumps(changed))
        for form in (changed, file):
            try:
                report(chained, tmp_path / "page.html", force=True, **{given: form})
            except InputError as error:
                told.append(str(error))
    assert all(len(text) < 1000 and "\n" not in text for text in told)


def test_documents_are_read_from_files_and_from_the_list_that_a_job_keeps(run, tmp_path):
    (tmp_path / "result").write_text(json.dumps([{"archive_bytes": 1}, {"ok": True}, COMPARED]))
    made = report(run, tmp_path / "page.html", compared=tmp_path / "result")
    assert "compared" in made.sections
    (tmp_path / "bad").write_text("{")
    with pytest.raises(InputError, match="no valid JSON"):
        report(run, tmp_path / "other.html", rehearsed=tmp_path / "bad")


def test_an_archive_as_the_original_is_refused(run, tmp_path):
    archive = run.with_name("run.inshrink")
    with pytest.raises(InputError, match="where a run is needed"):
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
