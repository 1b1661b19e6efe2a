"""A report in a real browser: drawn without a network, in the reader's colours, with no foreign script."""

from inshrink_app.theme import theme_config

from tests.app.browser import FAINT, browser_marks, new_page, wait_for
from tests.app.test_app_report import hostile, report_of

__all__ = ["hostile"]

pytestmark = browser_marks

DRAWN = "document.querySelectorAll('.plotly-graph-div .main-svg .xtick').length > 0"
INK = "getComputedStyle(document.querySelector('.xtick text')).fill"
PAPER = "getComputedStyle(document.body).backgroundColor"


def rgb(colour: object) -> str:
    red, green, blue = bytes.fromhex(str(colour).removeprefix("#"))
    return f"rgb({red}, {green}, {blue})"


def test_a_report_is_drawn_offline_in_the_colours_of_its_reader(hostile, browser, tmp_path):
    file, config = tmp_path / "report.html", theme_config()
    file.write_bytes(report_of(hostile))
    page = new_page(browser, offline=True, color_scheme="dark", width=900)
    page.goto(file.as_uri())
    for scheme in ("dark", "light"):  # Readers change it while they look.
        page.emulate_media(color_scheme=scheme)
        wait_for(page, f"{DRAWN} && {INK} === '{rgb(config[f'theme.{scheme}.textColor'])}'")
        assert page.evaluate(PAPER) == rgb(config[f"theme.{scheme}.backgroundColor"])
        assert page.evaluate(FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.complaints == []
    assert page.hosts == {""}
    page.context.close()


def test_a_report_runs_no_script_that_was_put_into_it(hostile, browser, tmp_path):
    file = tmp_path / "report.html"
    attack = b"document.title = 'attacked'"
    attacks = b'<script>%s</script><img src=x onerror="%s"></body>' % (attack, attack)
    file.write_bytes(report_of(hostile).replace(b"</body>", attacks))
    page = new_page(browser, offline=True)
    page.goto(file.as_uri())
    wait_for(page, DRAWN)
    assert page.title() == f"{hostile.name}.inshrink"
    assert page.complaints
    assert all("Content Security Policy" in complaint for complaint in page.complaints)
    page.context.close()
