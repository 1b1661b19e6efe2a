"""The explorer in a real browser, over the sample: offline and quiet; clicks, zoom, links, agreeing views."""

import re
from typing import Any

from tests.app.browser import FAINT, IDLE, browser_marks, new_page, wait_for
from tests.app.builders import SAMPLE

pytestmark = browser_marks

HEATMAP = ".st-key-heatmap .js-plotly-plot"
DRAWN = f"() => document.querySelector('{HEATMAP}')?.dataset.cells && {IDLE}"
MARKED = f"() => [...document.querySelectorAll('{HEATMAP} .cell-marks > *')].map(one => one.dataset.cell)"
RANGE = f"() => document.querySelector('{HEATMAP}')._fullLayout.xaxis.range.map(x => Math.round(10 * x))"
PLACES = ((0.3, 0.122), (0.52, 0.284), (0.71, 0.068))
"""Of tensors: conv2.weight, bn3.weight and bn1.weight; the rows between are modules."""


def test_the_sample_is_opened_and_its_heatmap_is_drawn_without_a_word_to_others(address, page):
    page.goto(address)
    page.get_by_role("button", name="Sample: digits-cnn").click()
    page.get_by_role("button", name="digits-cnn").first.wait_for()
    page.get_by_text("carry at least 80 % of the sensitivity").wait_for()
    wait_for(page, DRAWN)
    assert "metric=fisher" in page.url
    page.get_by_text("Error", exact=True).click()
    wait_for(page, "location.search.includes('colour=error')")
    page.get_by_text("Errors appear once").wait_for()
    wait_for(page, DRAWN)
    assert page.title() == "digits-cnn · Run"
    # The strip is in sight without scrolling.
    wait_for(page, "document.querySelector('.st-key-strip').getBoundingClientRect().bottom <= innerHeight")
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") < 2000
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate(FAINT) == []
    assert page.complaints == []
    assert page.hosts == {address.removeprefix("http://")}

    # The address alone shows the same.
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    wait_for(page, DRAWN)
    page.get_by_text("Errors appear once").wait_for()
    assert page.complaints == []


BELOW = """() => {
    const box = name => document.querySelector(name).getBoundingClientRect();
    const picture = box(".st-key-heatmap"), inside = box(".st-key-panel");
    return picture.width > 600 && inside.top >= picture.bottom;
}"""
"""On a narrow screen the map has the width of the page, and the panel follows."""


def click(page: Any, place: tuple[float, float]) -> tuple[str, int]:
    """Click into the heatmap; return layer and step once the address names them."""
    before = page.url
    panel = page.locator(f"{HEATMAP} .nsewdrag").first
    panel.evaluate("one => one.scrollIntoView({block: 'center'})")
    box = panel.bounding_box()
    page.mouse.click(box["x"] + box["width"] * place[0], box["y"] + box["height"] * place[1])
    wait_for(page, f"before => location.href !== before && {IDLE}", arg=before)
    return selected(page)


def selected(page: Any) -> tuple[str, int]:
    """Return what the address says."""
    layer, step = re.search(r"[?&]layer=([^&]+).*[?&]step=(\d+)", page.url).groups()  # type: ignore[union-attr]
    return layer, int(step)


def wait_for_inside(page: Any, layer: str) -> None:
    """Wait until a tensor's inside is on the page, and nothing of it is still to come."""
    panel = page.locator(".st-key-panel")
    panel.get_by_text(layer, exact=True).first.wait_for()
    panel.get_by_text("bits per weight").wait_for()
    panel.locator(".js-plotly-plot").first.wait_for()
    wait_for(page, f"() => {IDLE}")


def told(page: Any) -> str:
    """Return what the panel says of a tensor."""
    return str(page.locator(".st-key-panel").get_by_text("bits per weight").inner_text())


def test_clicks_boxes_and_keys_pick_and_tick_keep_the_zoom_and_their_link_shows_the_same_to_others(
    address, browser, page
):
    page.goto(f"{address}/run?run={SAMPLE}&metric=fisher&colour=sensitivity")
    page.get_by_role("button", name="digits-cnn").first.wait_for()
    wait_for(page, DRAWN)
    if page.get_by_role("button", name="Measure Fisher").count():
        page.get_by_role("button", name="Measure Fisher").click()
    page.get_by_text("carry at least 80 % of the sensitivity").wait_for()
    wait_for(page, DRAWN)
    box = page.locator(f"{HEATMAP} .nsewdrag").first.bounding_box()
    x, y = box["x"], box["y"] + box["height"] / 2
    page.mouse.move(x + 0.2 * box["width"], y)
    page.mouse.down()
    page.mouse.move(x + 0.9 * box["width"], y, steps=5)
    page.mouse.up()
    wait_for(page, f"() => String(({RANGE})()) !== '-5,235'")
    page.wait_for_timeout(500)  # A click sooner after the drag would make a double click of the two.
    zoomed = page.evaluate(RANGE)
    seen = []
    for place in PLACES:
        layer, step = click(page, place)
        wait_for_inside(page, layer)
        seen.append((layer, step))
        assert len(page.evaluate(MARKED)) == 1
        assert page.evaluate(RANGE) == zoomed
    assert len(set(seen)) == 3
    for move, (layer, step) in ((page.go_back, seen[-2]), (page.go_forward, seen[-1])):
        move()
        wait_for_inside(page, layer)
        assert selected(page) == (layer, step)
    # The arrows move the cell, p ticks its row, and a box ticks another: two lines in one chart.
    page.keyboard.press("ArrowDown")
    wait_for(page, f"layer => !location.search.includes('layer=' + layer + '&') && {IDLE}", arg=layer)
    page.keyboard.press("ArrowUp")
    wait_for(page, f"layer => location.search.includes('layer=' + layer) && {IDLE}", arg=layer)
    wait_for_inside(page, layer)
    # A key that is held, and a box right after p: the page follows, and loses nothing.
    step = selected(page)[1]
    for key in 3 * [*4 * ["ArrowLeft"], *4 * ["ArrowRight"]]:
        page.keyboard.press(key)
        page.wait_for_timeout(50)
    page.keyboard.press("p")
    page.get_by_role("checkbox", name="Draw conv1.weight as a line").click()
    page.get_by_text("Fisher of 2 rows").wait_for()
    assert page.evaluate(RANGE) == zoomed
    wait_for(page, f"() => {IDLE}")
    assert selected(page) == (layer, step)
    facts = told(page)

    # A link in a new context shows the same inside and the same lines.
    other = new_page(browser, width=900, color_scheme="dark")
    other.goto(page.url)
    wait_for(other, DRAWN)
    other.get_by_role("button", name="Look inside").click()  # A link alone does not.
    wait_for_inside(other, layer)
    assert selected(other) == (layer, step)
    assert told(other) == facts
    other.get_by_text("Fisher of 2 rows").wait_for()
    assert other.evaluate(MARKED)
    assert other.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wait_for(other, BELOW)
    assert other.evaluate(FAINT) == []
    assert page.complaints == other.complaints == []
    other.context.close()
