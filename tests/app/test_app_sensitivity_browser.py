"""The sensitivity page in a real browser: clicks, zoom, links, and views that agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.builders import SAMPLE
from tests.app.test_app_browser import ARGUMENTS, CHROMIUM, MILLISECONDS, address, pytestmark

__all__ = ["address", "pytestmark"]

HEATMAP = ".st-key-heatmap .js-plotly-plot"
MARKED = f"() => document.querySelector('{HEATMAP}')._fullData[2].selectedpoints"
RANGE = f"() => document.querySelector('{HEATMAP}')._fullLayout.xaxis.range.map(x => Math.round(10 * x))"
PLACES = ((0.3, 0.3), (0.52, 0.62), (0.71, 0.2))


@pytest.fixture
def browser() -> Iterator[Any]:
    """Return Chromium."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="install it with: pip install 'inshrink[dev]'"
    )
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


def opened_page(browser: Any, link: str, width: int = 1280) -> Any:
    """Open a link in a context of its own, and wait for the heatmap."""
    page = browser.new_context(viewport={"width": width, "height": 1000}).new_page()
    page.set_default_timeout(MILLISECONDS)
    page.goto(link)
    page.locator(f"{HEATMAP} .heatmaplayer image").first.wait_for(state="attached")
    page.wait_for_function(f"() => document.querySelector('{HEATMAP}')._fullData.length === 3")
    page.wait_for_timeout(1000)
    return page


def click(page: Any, place: tuple[float, float]) -> tuple[str, int]:
    """Click into the heatmap; return layer and step once the address names them."""
    before = page.url
    box = page.locator(f"{HEATMAP} .nsewdrag").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * place[0], box["y"] + box["height"] * place[1])
    page.wait_for_function(
        "before => location.href !== before && location.search.includes('layer')", arg=before
    )
    return selected(page)


def selected(page: Any) -> tuple[str, int]:
    """Return what the address says."""
    layer, step = re.search(r"layer=([^&]+).*step=(\d+)", page.url).groups()  # type: ignore[union-attr]
    return layer, int(step)


def heading(page: Any, layer: str) -> None:
    """Wait until a tensor's inside is on the page, and nothing of it is still to come."""
    page.get_by_role("heading", name=layer, exact=True).wait_for()
    page.get_by_text("Over the steps").wait_for()
    page.get_by_test_id("stMetricValue").nth(4).wait_for()


def test_three_clicks_in_a_row_look_inside_and_keep_mark_and_zoom(address: str, browser: Any) -> None:
    page = opened_page(browser, f"{address}/sensitivity?run={SAMPLE}&metric=fisher")
    box = page.locator(f"{HEATMAP} .nsewdrag").first.bounding_box()
    x, y = box["x"], box["y"] + box["height"] / 2
    page.mouse.move(x + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(x + 0.9 * box["width"], y, steps=5)
    page.mouse.up()
    page.wait_for_timeout(500)
    zoomed = page.evaluate(RANGE)
    assert zoomed != [-5, 235]
    seen = []
    for place in PLACES:
        layer, step = click(page, place)
        heading(page, layer)
        seen.append((layer, step))
        assert len(page.evaluate(MARKED)) == 1
        assert page.evaluate(RANGE) == zoomed
    assert len(set(seen)) == 3


def test_a_link_in_a_new_context_shows_the_same_inside_and_all_views_agree(
    address: str, browser: Any, tmp_path: Path
) -> None:
    page = opened_page(browser, f"{address}/sensitivity?run={SAMPLE}&metric=magnitude")
    layer, step = click(page, PLACES[0])
    heading(page, layer)
    facts = page.get_by_test_id("stMetricValue").all_inner_texts()
    other = opened_page(browser, page.url, width=900)
    heading(other, layer)
    assert selected(other) == (layer, step)
    assert other.get_by_test_id("stMetricValue").all_inner_texts() == facts
    assert other.evaluate(MARKED)
    assert other.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert layer in other.get_by_role("combobox").first.input_value()
    # The search box moves heatmap, address and inside together.
    other.get_by_role("combobox").first.click()
    other.get_by_role("option", name="fc2.weight").click()
    heading(other, "fc2.weight")
    other.wait_for_function("() => location.search.includes('layer=fc2.weight')")
    assert selected(other) == ("fc2.weight", step)
    place = other.evaluate(
        f"() => {{const t = document.querySelector('{HEATMAP}')._fullData[2];"
        " return t.y[t.selectedpoints[0]]}"
    )
    assert "fc2.weight" in place
