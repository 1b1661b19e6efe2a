"""The report of an archive: one HTML file that holds everything once, loads nothing and trusts no name."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from inshrink_app import services
from inshrink_app.pages.archives.view import report_parts
from inshrink_app.widgets import listing
from inshrink_app.widgets.report import MAX_ROWS, report
from plotly.offline import get_plotlyjs

import inshrink_core
from tests.app.builders import archives, subject

HOSTILE = "<script>alert(1)</script>\u202e&'\""
HEADINGS = ["Summary", "Bytes by step", "Training", "Size by role", "Weights by layer type", "Frames"]
HEADINGS += ["Tensors of step 30"]


class Page(HTMLParser):
    """Reads a page: its tags, attributes and headings, its scripts, and the text of everything else."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags, self.attributes = Counter[str](), set[str]()
        self.texts: dict[str, list[str]] = {}
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.texts.setdefault(tag, []).append("")

    @property
    def cells(self) -> list[str]:
        return [cell.strip() for cell in self.texts["td"]]

    def handle_data(self, data: str) -> None:
        if self.lasttag in self.texts:
            self.texts[self.lasttag][-1] += data


@pytest.fixture
def hostile(root) -> Path:
    """Return a run and, beside it, its archive; names are attacks."""
    run = root / "<img src=x onerror=alert(1)>"
    run.mkdir()
    for step in (10, 20, 30):
        torch.save({"model": {f"{HOSTILE}.weight": torch.ones(4, 3)}, "step": step}, run / f"step_{step}.pt")
    (run / "metrics.csv").write_text(f'step,loss,"</script>{HOSTILE[:-1]}"\n10,2,1\n20,nan,1\n30,1,2\n')
    inshrink_core.compress(run, run.with_name(f"{run.name}.inshrink"))
    return run


def report_of(run: Path) -> bytes:
    found = services.chain_of(f"{run}.inshrink")
    return report(found.name, report_parts(found, services.load_subject(str(run))))


def test_a_report_holds_each_figure_and_table_once_and_the_library_once(hostile):
    content = report_of(hostile)
    assert content.count(get_plotlyjs().encode()) == 1
    page = Page(content)
    assert page.texts["h2"] == HEADINGS
    assert page.tags["table"] == len(HEADINGS) - 2
    assert content.count(b'class="plotly-graph-div"') == 2
    assert sum("Plotly.newPlot(" in script for script in page.texts["script"][1:]) == 2
    assert len(content) < len(get_plotlyjs()) + 100_000


def test_a_report_names_no_address_and_forbids_itself_to_load_anything(hostile):
    content = report_of(hostile)
    rest = content.replace(get_plotlyjs().encode(), b"")
    assert not re.search(rb"(https?|wss?|ftp|file):|url\(|@import|\bimport\b", rest)
    assert not Page(content).attributes & {"src", "href", "srcset", "data", "action", "onload", "onerror"}
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', rest.decode())
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("style-src") == "'unsafe-inline'"
    assert re.fullmatch(r"('sha256-[\w+/=]+' ?){4}", rules.pop("script-src"))
    assert set(rules.values()) == {"'none'"}
    assert "default-src" in rules


def test_a_report_shows_names_as_text(hostile):
    content = report_of(hostile)
    page = Page(content)
    assert page.tags["script"] == 4
    assert not {"img", "a", "b"} & {*page.tags}
    rest = content.replace(get_plotlyjs().encode(), b"").decode()
    assert "<script>alert" not in rest
    assert "</script>\N{REPLACEMENT CHARACTER}" not in rest
    assert "\u202e" not in rest
    assert f"{HOSTILE.replace(chr(0x202E), chr(0xFFFD))}.weight" in page.cells
    assert page.texts["h1"] == [f"{hostile.name}.inshrink"]


def test_the_archive_page_offers_a_report_with_the_metrics_that_were_chosen(archived, jobs, monkeypatch):
    offered: dict[str, Any] = {}
    monkeypatch.setattr(listing, "buttons", lambda *files: offered.update({one[1]: one[2] for one in files}))
    table = archived.with_name("tune.csv")
    table.write_text("epoch,chosen metric\n10,0.5\n20,0.75\n")
    for log, is_drawn in (("", False), (str(table), True)):
        archives("verify", archived, log=log)
        first, second = offered["report.html"](), offered["report.html"]()
        assert Page(first).texts["h2"] == Page(second).texts["h2"]
        assert (b"chosen metric" in first) == is_drawn


def test_a_report_says_what_it_leaves_out_and_what_is_missing(hostile):
    found = services.chain_of(f"{hostile}.inshrink")
    first, second, _ = found.frames
    frames = (first, second._replace(damage="<i>cut off</i>"))
    found = replace(found, frames=frames, missing=(30,))
    log = {f"m{i}": ((10, 1.0),) for i in range(15)}
    page = Page(report("huge", report_parts(found, subject(n_tensors=MAX_ROWS + 1, log=log))))
    told = page.texts["p"]
    assert f"The first {MAX_ROWS:,} of {MAX_ROWS + 1:,} rows." in told
    assert {"Not drawn: m12, m13, m14.", "1 frame missing, of step 30."} <= {*told}
    assert "<i>cut off</i>" in page.cells
