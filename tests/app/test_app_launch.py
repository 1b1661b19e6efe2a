"""Starting the explorer, and the promises about what it may see and whom it talks to."""

import ast
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import streamlit as st
from inshrink_app import launch
from inshrink_app.server import roots

from inshrink_core.errors import InputError, NotFoundError
from tests.app.builders import write_run
from tests.processes import free_port

APP = Path(launch.__file__).parent
MODULES = sorted(APP.rglob("*.py"))


@pytest.fixture
def started(monkeypatch, root) -> list[dict[str, object]]:
    """Record the configuration instead of serving."""
    configs: list[dict[str, object]] = []
    monkeypatch.setattr(st.App, "run", lambda _self, *, config: configs.append(config))
    monkeypatch.chdir(root)
    return configs


def test_the_server_is_local_and_silent_by_default(started, capsys):
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


def test_a_host_open_to_others_needs_roots_and_warns(started, capsys, root):
    with pytest.raises(InputError, match="--root"):
        launch.run(host="0.0.0.0", port=free_port())
    assert started == []
    launch.run(host="0.0.0.0", port=free_port(), roots=[str(root)])
    assert "*" not in started[0]["server.allowedHosts"]  # type: ignore[operator]
    assert "warning" in capsys.readouterr().err


def test_a_run_with_a_step_pattern_is_shown_and_its_folder_seen(started, tmp_path):
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    launch.run(str(tmp_path / "elsewhere" / "run" / "ep{step}.pt"), port=free_port())
    assert len(started) == 1
    assert roots.settings().allows(tmp_path / "elsewhere" / "run")
    with pytest.raises(NotFoundError, match="nothing to open"):
        launch.run(str(tmp_path / "gone" / "ep{step}.pt"), port=free_port())


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        (None, {"roots": ["missing"]}, "not a folder"),
        ("missing", {}, "nothing to open"),
        ("..", {"roots": ["."]}, "outside of the roots"),
        (None, {"port": -1}, "--port"),
        (None, {"port": 99_999}, "--port"),
    ],
)
def test_a_start_that_cannot_be_is_refused_with_its_reason(started, path, more, said):
    with pytest.raises((InputError, NotFoundError), match=said):
        launch.run(path, **{"port": free_port(), **more})
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(InputError, match="--port"):
        launch.run(port=other.getsockname()[1])
    assert started == []


def test_a_window_needs_its_package_and_a_display(started, monkeypatch):
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
def test_a_window_that_cannot_be_drawn_is_one_line(started, monkeypatch, end, said):
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setenv("DISPLAY", ":0")
    start = launch.start_python
    script = f"import os, sys; {end}"
    monkeypatch.setattr(launch, "start_python", lambda _, **more: start(["-c", script], **more))
    with pytest.raises(InputError, match=said):
        launch.run(port=free_port(), window=True)
    assert started == []


def test_closing_the_window_ends_the_server(monkeypatch):
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "_server_is_up", lambda: True)
    monkeypatch.setattr(launch.os, "kill", lambda *given: ended.append(given))
    process = launch.start_python(
        ["-c", "print(input())"], errors=subprocess.PIPE, environment=dict(os.environ)
    )
    launch._follow_window(process)
    assert process.communicate()[0] == "open\n"
    assert ended == [(os.getpid(), signal.SIGINT)]


def test_what_is_loaded_ahead_is_code_alone(root):
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
        "ahead = {'inshrink_app.pages.run.view', 'inshrink_app.services', 'pandas'}\n"
        "assert ahead <= set(sys.modules)\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True)


def test_no_page_writes_html_or_asks_another_server():
    for path in MODULES:
        source = path.read_text()
        assert "unsafe_allow_html" not in source
        assert "https://" not in source
        assert "st.html" not in source


def test_every_chart_and_table_has_a_text_for_those_who_cannot_see_it():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("plotly_chart", "dataframe"):
                assert "alt" in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"
