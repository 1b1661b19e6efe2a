"""Starting the explorer, and the promises about what it may see and whom it talks to."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from inshrink_app import launch, theme
from inshrink_app.server import roots
from inshrink_app.widgets import choices

from inshrink_core.errors import InputError, NotFoundError
from tests.app.builders import write_run

APP = Path(launch.__file__).parent


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[dict[str, object]]:
    """Record the configuration instead of serving."""
    import streamlit as st

    configs: list[dict[str, object]] = []
    monkeypatch.setattr(st.App, "run", lambda _self, *, config: configs.append(config))
    monkeypatch.chdir(root)
    return configs


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_server_is_local_and_silent_by_default(
    started: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    launch.run(port=port)
    config = started[0]
    assert config["server.address"] == "127.0.0.1"
    assert config["browser.gatherUsageStats"] is False
    assert config["server.allowedHosts"] == ["localhost", "127.0.0.1", "[::1]", "::1"]
    assert config["server.enableStaticServing"] is False
    out = capsys.readouterr()
    assert f"http://127.0.0.1:{port}" in out.out
    assert out.err == ""


def test_a_host_open_to_others_needs_roots_and_warns(
    started: list[dict[str, object]], capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    with pytest.raises(InputError, match="--root"):
        launch.run(host="0.0.0.0", port=free_port())
    assert started == []
    launch.run(host="0.0.0.0", port=free_port(), roots=[str(root)])
    assert "*" not in started[0]["server.allowedHosts"]  # type: ignore[operator]
    assert "warning" in capsys.readouterr().err


def test_a_root_that_is_no_folder_is_refused(started: list[dict[str, object]], root: Path) -> None:
    with pytest.raises(NotFoundError, match="not a folder"):
        launch.run(port=free_port(), roots=[str(root / "missing")])


def test_a_run_with_a_step_pattern_is_shown_and_its_folder_seen(
    started: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    launch.run(str(tmp_path / "elsewhere" / "run" / "ep{step}.pt"), port=free_port())
    assert len(started) == 1
    assert roots.settings().allows(tmp_path / "elsewhere" / "run")
    with pytest.raises(NotFoundError, match="nothing to open"):
        launch.run(str(tmp_path / "gone" / "ep{step}.pt"), port=free_port())


def test_a_path_outside_of_the_roots_is_refused(
    started: list[dict[str, object]], root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="outside of the roots"):
        launch.run(str(tmp_path), port=free_port(), roots=[str(root)])
    with pytest.raises(NotFoundError, match="nothing to open"):
        launch.run(str(root / "missing"), port=free_port())


def test_without_roots_the_folder_of_the_path_is_one(
    started: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    launch.run(str(tmp_path / "elsewhere" / "run"), port=free_port())
    assert str(tmp_path / "elsewhere") in capsys.readouterr().out


def test_a_port_that_is_taken_is_said_with_a_remedy(started: list[dict[str, object]]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InputError, match="--port"):
            launch.run(port=other.getsockname()[1])


def test_a_window_needs_its_package_and_a_display(
    started: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"inshrink\[desktop\]"):
        launch.run(port=free_port(), window=True)
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setattr(launch.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="no display for a window"):
        launch.run(port=free_port(), window=True)
    assert started == []


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('noise\\nYou must have QT')", "here: You must have QT;"),
        ("os.abort()", "display cannot be reached"),
    ],
)
def test_a_window_that_cannot_be_drawn_is_one_line(
    started: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setenv("DISPLAY", ":0")
    start = launch.start_python
    script = f"import os, sys; {end}"
    monkeypatch.setattr(launch, "start_python", lambda _, **more: start(["-c", script], **more))
    with pytest.raises(InputError, match=said):
        launch.run(port=free_port(), window=True)
    assert started == []


def test_closing_the_window_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "_server_is_up", lambda: True)
    monkeypatch.setattr(launch.os, "kill", lambda *given: ended.append(given))
    process = launch.start_python(
        ["-c", "print(input())"], errors=subprocess.PIPE, environment=dict(os.environ)
    )
    launch._follow_window(process)
    assert process.communicate()[0] == "open\n"
    assert ended == [(os.getpid(), signal.SIGINT)]


def test_what_is_loaded_ahead_is_code_alone(root: Path) -> None:
    write_run(root / "run")
    program = (
        "import sys\n"
        "touched = []\n"
        "sys.addaudithook(lambda event, args: touched.append(str(args[0])) if event in "
        "('open', 'os.listdir', 'os.scandir') else None)\n"
        "from inshrink_app import launch\nfrom inshrink_app.server import roots\n"
        f"roots.configure([{str(root)!r}])\n"
        "launch._server_is_up = lambda: True\n"
        "launch._load_ahead()\n"
        f"assert not [path for path in touched if path.startswith({str(root)!r})]\n"
        "ahead = {'inshrink_app.pages.sensitivity.view', 'inshrink_app.services', 'pandas'}\n"
        "assert ahead <= set(sys.modules)\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True)


def test_nothing_is_loaded_ahead_before_the_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_SECONDS_TO_LISTEN", 0.05)
    monkeypatch.setattr(launch.importlib, "import_module", refuse)
    launch._load_ahead()


def refuse(*_: object) -> None:
    raise AssertionError("something was imported")


@pytest.mark.parametrize("port", [-1, 99_999])
def test_a_port_that_is_none_is_refused(started: list[dict[str, object]], port: int) -> None:
    with pytest.raises(InputError, match="--port"):
        launch.run(port=port)


def test_every_option_of_the_configuration_exists() -> None:
    from streamlit import config

    known = config.get_config_options()
    assert set(launch.server_config("127.0.0.1", 8501)) <= set(known)


def modules() -> list[Path]:
    """Return every module of the explorer."""
    return sorted(APP.rglob("*.py"))


class Executed(ast.NodeTransformer):
    """Leaves out what stands there for type checkers alone."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


LIGHT = ("inshrink_core.text", "inshrink_core.sensitivity")
"""Words and names; importing them takes milliseconds."""


def test_the_engine_is_imported_by_packages_that_may() -> None:
    importers = set()
    for path in modules():
        tree = Executed().visit(ast.parse(path.read_text()))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "inshrink_core" and name not in LIGHT for name in names):
                importers.add(path.relative_to(APP).parts[0])
    assert importers <= {"jobs", "model", "pages", "services", "widgets", "launch.py"}


def test_no_module_of_the_explorer_loads_torch() -> None:
    names = [
        ".".join(("inshrink_app", *path.relative_to(APP).with_suffix("").parts))
        for path in modules()
        if path.name not in ("main.py", "__init__.py")
    ]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_what_draws_does_not_cache() -> None:
    caching = {p.relative_to(APP) for p in modules() if "st.cache_" in p.read_text()}
    assert {path.parts[0] for path in caching} == {"services", "pages"}
    assert not [path for path in caching if path.name == "view.py" or "figure" in path.name]


def test_figures_and_plain_modules_know_nothing_of_streamlit() -> None:
    figures = [path for path in modules() if "figure" in path.name or path.name == "heatmap.py"]
    plain = [
        *(APP / "jobs").glob("*.py"),
        *(APP / "model").glob("*.py"),
        *(APP / f"{name}.py" for name in ("theme", "server/roots", "server/recent", "widgets/fmt")),
    ]
    assert len(figures) > 5
    for path in (*figures, *plain):
        assert "import streamlit" not in path.read_text()


def test_no_page_writes_html_or_asks_another_server() -> None:
    for path in modules():
        source = path.read_text()
        assert "unsafe_allow_html" not in source
        assert "https://" not in source
        assert "st.html" not in source


def test_every_chart_and_table_has_a_text_for_those_who_cannot_see_it() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("plotly_chart", "dataframe"):
                assert "alt" in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """Return every call of a function of Streamlit, with the module it stands in."""
    return [
        (path, node)
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def test_chosen_segments_and_code_are_as_readable_as_plain_text() -> None:
    for path, call in [*calls("segmented_control"), *calls("pills")]:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert "inked" in given.get("format_func", ""), f"{path.name}:{call.lineno}"
    # The colours of Streamlit's syntax highlighting are its own, and too faint on a light page.
    for path, call in calls("code"):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("language") == "None", f"{path.name}:{call.lineno}"


def test_tables_are_drawn_where_they_get_their_files_and_headings_leave_out_no_level() -> None:
    assert {path.name for path, _ in calls("dataframe")} == {"listing.py"}
    assert not calls("csv_button")
    levels = {name: bool(calls(name)) for name in ("title", "header", "subheader")}
    assert levels == {"title": True, "header": True, "subheader": False}


def test_lists_are_searched_by_what_is_typed_in_one_piece_and_enter_takes_no_more_than_one() -> None:
    for draw in (choices.pick_one, choices.pick_several):
        assert draw.keywords["filter_mode"] == "contains"
    assert choices.pick_several.keywords["select_all"] is False
    fuzzy = {path.name for name in ("selectbox", "multiselect") for path, _ in calls(name)}
    assert not fuzzy


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2.1 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def blended(colour: str, below: str, opacity: float) -> str:
    """Return a colour as it looks over another one."""
    parts = [
        round(opacity * int(colour[i : i + 2], 16) + (1 - opacity) * int(below[i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02X}" for part in parts)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_readable_in_both_modes(mode: str) -> None:
    config = {key: str(value) for key, value in theme.theme_config().items()}

    def of(name: str) -> str:
        return config[f"theme.{mode}.{name}"]

    for background in ("backgroundColor", "secondaryBackgroundColor"):
        assert contrast(of("textColor"), of(background)) >= 7
        assert contrast(of("linkColor"), of(background)) >= 4.5
    assert contrast("#FFFFFF", of("primaryColor")) >= 4.5
    assert contrast(of("primaryColor"), of("backgroundColor")) >= 4.5, "the value of a slider"
    # Streamlit draws captions and placeholders with six tenths of the text over what lies below.
    for background in ("backgroundColor", "secondaryBackgroundColor"):
        assert contrast(blended(of("textColor"), of(background), 0.6), of(background)) >= 4.5
    assert of("violetTextColor") == of("textColor"), "what `inked` asks for"
    assert contrast(of("grayTextColor"), of("grayBackgroundColor")) >= 4.5
