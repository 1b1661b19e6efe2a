"""The explorer's benchmark: whole times, beside those of pages that are not ours."""

import ast
import json

import pytest

from benchmarks import explorer, tab
from benchmarks.explorer import ANY_PAGE, Found, Times


def test_a_row_is_the_whole_time_whatever_any_page_takes():
    found = Found()
    for seconds in (2.0, 3.0, 2.5):
        found.add("any Streamlit page, one small chart", Times(1.5, 0.2, 1.1))
        found.add("page interactive", Times(seconds, 0.5, 2.0))
    plain, ours = found.rows()
    assert plain["value"] == 1.5
    assert ours["value"] == 2.5
    assert ours["detail"].startswith(
        "3 times, 2.00 to 3.00 s; processor time 0.50 s in the server, 2.00 s in"
    )


def test_memory_is_told_before_and_after():
    found = Found()
    found.memory += [(200_000_000, 300_000_000), (210_000_000, 320_000_000), (1, 310_000_000)]
    (row,) = found.rows()
    assert row["value"] == 310.0
    assert row["detail"] == "200 MB before the clicks"


def test_the_pages_that_are_not_ours_use_nothing_of_ours():
    for _, script, _ in ANY_PAGE:
        imported = {
            alias.name
            for node in ast.walk(ast.parse(script))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert imported <= {"streamlit", "plotly.graph_objects"}
    assert "inshrink_app.launch import server_config" in explorer.PLAIN


def test_the_inspector_stays_off_while_times_are_taken():
    class Connection:
        def __init__(self):
            self.methods = []

        def send(self, text):
            self.methods.append(text)

        def recv(self, _):
            ids = {"browserContextId": "c", "targetId": "t", "sessionId": "s"}
            return json.dumps({"id": len(self.methods), "result": ids})

    connection = Connection()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tab, "_SETTLING_SECONDS", 0)
        with tab.Browser(connection, 1).tab() as opened:
            opened.goto("http://127.0.0.1/")
            opened.click(1.0, 2.0)
    said = " ".join(connection.methods)
    assert "Page.navigate" in said
    for domain in ("Runtime.enable", "Debugger.enable", "Profiler.enable", "Page.enable"):
        assert domain not in said
