"""The documentation site: built strictly, every page listed, nothing asked of another server."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.guides import blocks
from tests.processes import ran

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINES = {"codec": 75, "storage": 70, "verb": 60}
"""How many lines the code of a guide may have."""


def test_every_page_of_the_site_is_in_its_navigation():
    listed = set(re.findall(r":\s+([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


@pytest.mark.documentation
def test_the_site_builds_without_a_warning_and_asks_nothing_of_another_server(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = ran(*command, cwd=ROOT, timeout=250, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]*)\"", page.read_text())
        assert [address for address in loaded if re.match(r"(?:https?:)?//", address)] == []


def test_the_readme_is_one_screen():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 60


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_pages_outside_of_the_site_lead_somewhere(page):
    text = (ROOT / page).read_text()
    targets = re.findall(r"\]\(([^)#]+)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert targets
    for target in map("".join, targets):
        assert (ROOT / target).exists(), target


def test_contributing_has_every_guide_with_the_test_that_does_it():
    rows = re.findall(
        r"\]\(docs/guides/(\w+)\.md\) \|.*\| `(tests/\S+)` \|", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert {guide for guide, _ in rows} == {path.stem for path in (DOCS / "guides").iterdir()}
    for guide, test in rows:
        assert re.search(rf'{guide}\.md|install\("{guide}"', (ROOT / test).read_text()), test


@pytest.mark.parametrize("guide", LINES)
def test_the_code_of_a_guide_is_short(guide):
    assert sum(bool(line.strip()) for line in blocks(guide, "python")[0].splitlines()) <= LINES[guide]
