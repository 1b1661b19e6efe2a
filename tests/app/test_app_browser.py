"""The explorer in a real browser, over the sample: offline and quiet; clicks, zoom, links, agreeing views."""

from __future__ import annotations

import re
import socket
from typing import Any

from tests.app.browser import FAINT, IDLE, browser_marks, new_page, wait_for
from tests.app.builders import SAMPLE

pytestmark = browser_marks

HEATMAP = ".st-key-heatmap .js-plotly-plot"
DRAWN = f"() => document.querySelector('{HEATMAP}')?.dataset.cells && {IDLE}"
MARKED = f"() => [...document.querySelectorAll('{HEATMAP} .cell-marks > *')].map(one => one.dataset.cell)"
MARKED_ROW = (
    f"() => document.querySelector('{HEATMAP}')._fullData[1].y[document.querySelector("
    f"'{HEATMAP} .cell-marks > *').dataset.cell.split(',')[0]]"
)
RANGE = f"() => document.querySelector('{HEATMAP}')._fullLayout.xaxis.range.map(x => Math.round(10 * x))"
PLACES = ((0.3, 0.25), (0.52, 0.58), (0.71, 0.14))
"""Of tensors: conv2.weight, bn3.weight and bn1.weight; the rows between are modules."""


def test_the_sample_is_opened_and_its_heatmap_is_drawn_without_a_word_to_others(address, page):
    page.goto(address)
    page.get_by_role("button", name="Open digits-cnn").click()
    page.get_by_role("heading", name="digits-cnn").wait_for()
    page.get_by_text("Size by role").wait_for()
    page.get_by_role("link", name="Sensitivity").click()
    wait_for(page, DRAWN)
    for metric in ("Magnitude", "Fisher"):
        page.get_by_role("combobox", name="Metric").click()
        page.get_by_role("option", name=metric).click()
        wait_for(page, "metric => location.search.includes(metric)", arg=f"metric={metric.lower()}")
    page.get_by_text("Adam's second moment, bias-corrected").wait_for()
    wait_for(page, DRAWN)
    assert "metric=fisher" in page.url
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate(FAINT) == []
    assert page.complaints == []
    assert page.hosts == {address.removeprefix("http://")}

    # The address alone shows the same.
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.get_by_text("Adam's second moment, bias-corrected").wait_for()
    wait_for(page, DRAWN)
    assert page.complaints == []

    # The first page lies at the root; its name leads there too.
    page.goto(f"{address}/open")
    page.get_by_role("heading", name="Open a run").wait_for()
    assert page.get_by_text("Page not found").count() == 0


def test_a_page_that_rebinds_its_name_to_this_computer_gets_no_session(address):
    host, _, port = address.removeprefix("http://").partition(":")
    answers = {}
    for name in (host, "evil.example"):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                f"GET /_stcore/stream HTTP/1.1\r\nHost: {name}\r\nOrigin: http://{name}\r\n"
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            )
            answers[name] = connection.recv(64).split(b" ")[1]
    assert answers == {host: b"101", "evil.example": b"403"}


BELOW = """() => {
    const box = name => document.querySelector(name).getBoundingClientRect();
    const picture = box(".st-key-heatmap"), inside = box(".st-key-drill-histogram");
    const table = box(".st-key-sensitivity-table");
    return picture.width > 600 && inside.top >= picture.bottom && table.top >= inside.bottom;
}"""
"""On a narrow screen the heatmap has the width of the page; the inside of a tensor and the table follow."""


def click(page: Any, place: tuple[float, float]) -> tuple[str, int]:
    """Click into the heatmap; return layer and step once the address names them."""
    before = page.url
    panel = page.locator(f"{HEATMAP} .nsewdrag").first
    panel.evaluate("one => one.scrollIntoView({block: 'center'})")
    box = panel.bounding_box()
    page.mouse.click(box["x"] + box["width"] * place[0], box["y"] + box["height"] * place[1])
    # Layer and step are told one after the other.
    told = "location.href !== before && /layer=.*step=/.test(location.search)"
    wait_for(page, f"before => {told} && {IDLE}", arg=before)
    return selected(page)


def selected(page: Any) -> tuple[str, int]:
    """Return what the address says."""
    layer, step = re.search(r"layer=([^&]+).*step=(\d+)", page.url).groups()  # type: ignore[union-attr]
    return layer, int(step)


def wait_for_inside(page: Any, layer: str) -> None:
    """Wait until a tensor's inside is on the page, and nothing of it is still to come."""
    page.get_by_role("heading", name=layer, exact=True).wait_for()
    page.get_by_text("Over the steps").wait_for()
    page.get_by_test_id("stMetricValue").nth(4).wait_for()
    wait_for(page, f"() => {IDLE}")


def test_three_clicks_look_inside_and_keep_mark_and_zoom_and_their_link_shows_the_same_to_others(
    address, browser, page
):
    page.goto(f"{address}/sensitivity?run={SAMPLE}&metric=fisher")
    page.locator(f"{HEATMAP}, .stMainBlockContainer button:has-text('Measure Fisher')").first.wait_for()
    if page.get_by_role("button", name="Measure Fisher").count():
        page.get_by_role("button", name="Measure Fisher").click()
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
        wait_for(page, f"() => /[?&]step={step}(&|$)/.test(location.search)")  # of one layer, another step
        seen.append((layer, step))
        assert len(page.evaluate(MARKED)) == 1
        assert page.evaluate(RANGE) == zoomed
    assert len(set(seen)) == 3
    facts = page.get_by_test_id("stMetricValue").all_inner_texts()

    # A link in a new context shows the same inside, and all views agree.
    other = new_page(browser, width=900, color_scheme="dark")
    other.goto(page.url)
    wait_for(other, DRAWN)
    other.get_by_role("button", name="Look inside").click()  # A link alone does not.
    wait_for_inside(other, layer)
    assert selected(other) == (layer, step)
    assert other.get_by_test_id("stMetricValue").all_inner_texts() == facts
    assert other.evaluate(MARKED)
    assert other.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wait_for(other, BELOW)
    assert other.evaluate(FAINT) == []
    assert layer in other.get_by_role("combobox", name="Find a tensor").input_value()
    # The search box moves heatmap, address and inside together.
    target = "fc2.weight" if layer != "fc2.weight" else "fc1.weight"
    box = other.get_by_role("combobox", name="Find a tensor")
    box.scroll_into_view_if_needed()
    other.wait_for_timeout(500)  # A list that is open while the page scrolls closes.
    box.click()
    other.get_by_role("option", name=target).click()
    wait_for_inside(other, target)
    wait_for(other, "target => location.search.includes('layer=' + target)", arg=target)
    assert selected(other) == (target, step)
    assert target in other.evaluate(MARKED_ROW)
    other.context.close()
