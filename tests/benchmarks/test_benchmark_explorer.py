"""The explorer's benchmark measures its own page beside one that is not part of the explorer."""

import ast

from benchmarks.explorer import ONE_CHART, PLAIN


def test_the_page_that_is_not_ours_uses_nothing_of_ours():
    imported = {
        alias.name
        for node in ast.walk(ast.parse(ONE_CHART))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported <= {"streamlit", "plotly.graph_objects"}
    assert "inshrink_app.launch import server_config" in PLAIN
