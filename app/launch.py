"""Start of the explorer: configuration, address, and server."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from weakref import WeakSet

from inshrink_app.server.roots import Address, Settings, configure, path_of, real_path
from inshrink_app.theme import theme_config
from inshrink_app.window import READY

from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.errors import InputError, MissingExtraError, NotFoundError
from inshrink_core.execution.process import empty_directory, start_python, user_environment
from inshrink_core.formats import split_step_pattern

if TYPE_CHECKING:
    from streamlit import App

_SCRIPT = Path(__file__).with_name("main.py")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
_BROWSER_DELAY_SECONDS = 1.5
_LARGEST_DROP_MIB = 500
"""Size limit of a dropped file, which the server holds in memory until it is written."""

_SCHEMES = ("s3:", "gs:", "az:", "hf:")
_LONGEST_REASON = 400
_SECONDS_TO_LISTEN = 30.0
_SECONDS_BETWEEN_LOOKS = 0.02


def run(
    path: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8501,
    roots: Sequence[str] | None = None,
    open_browser: bool = False,
    window: bool = False,
) -> None:
    """Serve the explorer until it is interrupted, or its window is closed.

    Parameters
    ----------
    path
        Run or archive to show first. If `roots` is None, its folder becomes a root.
    host
        Address to listen on. An address that others can reach needs `roots`.
    port
        Port to listen on, 1 to 65535.
    roots
        Folders that the explorer may see; by default the current one. Bundled samples are always allowed.
        Addresses in buckets may be given too.
    open_browser
        Open the explorer in the default browser.
    window
        Open it in a desktop window instead.

    Raises
    ------
    InputError
        A root is neither a folder nor an address, the path is outside of the roots, the port is taken, the
        host is open to others and no roots were given, or no window can be opened here.
    MissingExtraError
        Streamlit or Plotly is not installed, or for a window pywebview.
    """
    path = None if path is None else str(real_path(path))
    current = allow(path, host, [str(real_path(root)) for root in roots or ()])
    # Run in an empty folder, since Streamlit and numba read settings from the current one.
    with contextlib.chdir(empty_directory()):
        _serve(current, host, port, open_browser=open_browser, window=window)


def allow(path: str | None, host: str, roots: Sequence[str]) -> Settings:
    """Set the folders and addresses that the explorer may see, and return the settings.

    Parameters
    ----------
    path
        Run or archive to show first; absolute, as all paths here. An address is allowed itself; the folder of
        a path is allowed if there are no roots.
    host
        Address to listen on.
    roots
        Folders and addresses; without folders, the current one is allowed.

    Raises
    ------
    InputError, NotFoundError
        See `run`.
    """
    places = [path_of(root) for root in roots]
    opened = None if path is None else path_of(str(split_step_pattern(path)[0]))
    if isinstance(opened, Address):
        places, opened = [*places, opened], None
    if opened is not None and not opened.exists():
        raise NotFoundError("there is nothing to open", where=path or "", remedy="give a run or an archive")
    addresses = [place for place in places if isinstance(place, Address)]
    for address in addresses:
        if address.parts[0] not in _SCHEMES:
            what = f"addresses of {', '.join(_SCHEMES)} can be opened"
            raise InputError(what, where=address.parts[0], remedy="copy it to a folder")
        storage_at(str(address))  # refuses credentials in an address, and one without a bucket
    folders = [place for place in places if not isinstance(place, Address)]
    if not folders:
        if not _is_local(host):
            raise InputError(
                f"'{host}' is open to others, so the folders they may see must be named",
                remedy="add --root FOLDER, or leave --host out to serve this computer alone",
            )
        folders = [Path.cwd(), *([] if opened is None or roots else [opened.parent])]
    for root in folders:
        if not root.is_dir():
            raise NotFoundError("the root is not a folder", where=str(root), remedy="give an existing folder")
    current = configure([*folders, *addresses], path)
    if opened is not None and not current.allows(opened):
        remedy = "add its folder with --root"
        raise InputError("the path is outside of the roots", where=path or "", remedy=remedy)
    return current


def _serve(current: Settings, host: str, port: int, *, open_browser: bool, window: bool) -> None:
    """Serve until interrupted."""
    try:
        import plotly as _plotly  # noqa: F401
        import streamlit  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "app") from error
    from inshrink_core.cli.ui import Ui

    _require_free(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    shown = _start_window(url) if window else None
    seen = [*map(str, current.roots), *map(str, current.addresses)]
    sys.stdout.write(f"Inshrink explorer: {url}  (Ctrl-C to stop)\n")
    sys.stdout.write(f"It sees {', '.join(seen)} and nothing else.\n")
    sys.stdout.flush()
    if not _is_local(host):
        text = f"{url} is open to everyone who can reach this computer; there is no password."
        sys.stderr.write(f"warning: {text}\n")
    if shown is not None:
        threading.Thread(target=_follow_window, args=(shown,), daemon=True).start()
    elif open_browser:
        threading.Timer(_BROWSER_DELAY_SECONDS, webbrowser.open, [url]).start()
    threading.Thread(target=_load_ahead, daemon=True).start()
    words = Ui(current.opened, host=host, port=port, root=seen).words()
    explorer(_allowed_hosts(host), shlex.join(["inshrink", *words])).run(config=server_config(host, port))


def _start_window(url: str) -> subprocess.Popen[str]:
    """Start the process of a window that will show an address.

    Raises
    ------
    MissingExtraError
        pywebview is not installed.
    InputError
        There is no display, or no toolkit to draw a window with.
    """
    if find_spec("webview") is None:
        raise MissingExtraError("pywebview", "desktop")
    remedy = f"leave --window out, and open {url} in a browser"
    if sys.platform == "linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        raise InputError("there is no display for a window", remedy=remedy)
    process = start_python(
        ["-m", "inshrink_app.window", url], errors=subprocess.PIPE, environment=user_environment()
    )
    if process.stdout is not None and process.stdout.readline() == READY:
        atexit.register(process.terminate)
        return process
    reason = process.communicate()[1].strip().rpartition("\n")[2]
    # A toolkit that cannot reach the display aborts the process.
    why = reason[:_LONGEST_REASON] if process.returncode == 1 else "the display cannot be reached"
    raise InputError(f"no window can be opened here: {why}", remedy=remedy)


def _follow_window(process: subprocess.Popen[str]) -> None:
    """Open the window once the server listens, and stop the server when the window closes."""
    if _server_is_up() and process.stdin is not None:
        process.stdin.write("open\n")
        process.stdin.flush()
        process.wait()
    os.kill(os.getpid(), signal.SIGINT)


def explorer(hosts: Sequence[str], command: str) -> App:
    """Return the application: Streamlit's, the route for files, and the gate around both.

    Parameters
    ----------
    hosts
        Host names that the server accepts.
    command
        Command that starts it again.
    """
    import streamlit as st
    from inshrink_app.server import downloads, gate
    from inshrink_app.widgets import problem
    from streamlit.runtime.pages_manager import PagesManager

    # Before a session has run the script, Streamlit takes a folder "pages" beside it for its own.
    PagesManager.uses_pages_directory = False
    _mend_streamlit()
    page = gate.shell(Path(st.__file__).parent / "static" / "index.html", command)
    headers = gate.headers(page)

    class Guarded(st.App):  # type: ignore[misc,unused-ignore]
        """The application behind the gate."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await gate.guarded(super().__call__, hosts, headers, page)(scope, receive, send)

    return Guarded(_SCRIPT, routes=downloads.routes(), on_script_error=problem.show_unexpected)


def _mend_streamlit() -> None:
    """Correct races in Streamlit between the fragments of a page and its other requests.

    When a fragment begins, Streamlit removes its own unsent messages and leaves those of the fragments inside
    it, whose containers the browser then does not have: the page turns blank. It also reports a fragment that
    has finished as interrupted; the page then shows elements that the fragment no longer draws. Streamlit
    merges simultaneous requests and uses the page of the later one, so a timer of the page being left can
    undo a click on a link, and later reset the widgets of the new page. If a request for a fragment arrives
    just after a run has ended, Streamlit discards the unsent messages of that run. Each request carries the
    address that the browser showed when it was sent, and an outdated one would undo a click; the session's
    own address is used instead, unless the user went back or forward.

    The threads that draw are recorded, since the reading of a large run gives way to them.
    """
    from inshrink_app.services.opening import DRAWING
    from streamlit.runtime.app_session import AppSession
    from streamlit.runtime.forward_msg_queue import ForwardMsgQueue
    from streamlit.runtime.scriptrunner.script_runner import ScriptRunner, ScriptRunnerEvent
    from streamlit.runtime.scriptrunner_utils.script_requests import ScriptRequests, ScriptRequestType
    from streamlit.runtime.scriptrunner_utils.script_run_context import ScriptRunContext

    clear, request_rerun = ForwardMsgQueue.clear, ScriptRequests.request_rerun
    run_script, reset = ScriptRunner._run_script, ScriptRunContext.reset
    create, handle = AppSession._create_scriptrunner, AppSession._handle_scriptrunner_event_on_event_loop
    ended, visited = WeakSet[Any](), WeakSet[Any]()

    def begin(self: Any, retain_lifecycle_msgs: bool = False, fragment_ids_this_run: Any = None) -> None:
        if fragment_ids_this_run is None:
            clear(self, retain_lifecycle_msgs)
        else:
            self._delta_index_map = {}  # What follows replaces nothing that waits, and is sent after it.

    def request(self: Any, new_data: Any) -> bool:
        if new_data.fragment_id and self._state is ScriptRequestType.RERUN:
            at = self._rerun_data
            new_data = replace(new_data, page_script_hash=at.page_script_hash, page_name=at.page_name)
        return request_rerun(self, new_data)

    def run(self: Any, rerun_data: Any) -> None:
        is_left = rerun_data.page_script_hash != self._get_script_run_ctx().page_script_hash
        if not (rerun_data.fragment_id_queue and is_left):
            DRAWING.add(threading.get_ident())
            try:
                run_script(self, rerun_data)
            finally:
                DRAWING.discard(threading.get_ident())

    def keep(self: Any, query_string: str = "", **more: Any) -> None:
        if self.pages_manager in visited and not more.get("is_history_navigation"):
            with self.session_state.query_params() as known:
                query_string = urlencode(known._query_params, doseq=True)
        visited.add(self.pages_manager)
        reset(self, query_string, **more)

    def start(self: Any, rerun_data: Any) -> None:
        if self._scriptrunner is not None:  # It refused the request because it has ended.
            ended.add(self._scriptrunner)
        create(self, rerun_data)

    def handled(self: Any, sender: Any, event: Any, *more: Any) -> None:
        current = self._scriptrunner
        if sender is current or sender not in ended or event == ScriptRunnerEvent.SHUTDOWN:
            handle(self, sender, event, *more)
            return
        self._scriptrunner = sender
        try:
            handle(self, sender, event, *more)
        finally:
            self._scriptrunner = current

    if clear.__module__ != __name__:  # Once per process.
        ForwardMsgQueue.clear = begin  # type: ignore[method-assign]
        ScriptRequests.request_rerun = request  # type: ignore[method-assign]
        ScriptRunner._run_script = run  # type: ignore[method-assign]
        ScriptRunContext.reset = keep  # type: ignore[assignment,method-assign]
        AppSession._create_scriptrunner = start  # type: ignore[assignment,method-assign]
        AppSession._handle_scriptrunner_event_on_event_loop = handled  # type: ignore[assignment,method-assign]


def _load_ahead() -> None:
    """Import the drawing code of every page while the browser opens, which takes two seconds.

    No file of a run is opened.
    """
    if not _server_is_up():
        return
    import streamlit as st

    # Streamlit's first element inspects the source of every loaded module; few are loaded here.
    st.empty()
    # First and completely: Plotly would use a pandas that a page's import has only half loaded.
    import pandas as _pandas  # noqa: F401
    import plotly.graph_objects as graph_objects
    from inshrink_app import pages, widgets

    import inshrink_core.chain.append as _chain  # noqa: F401
    import inshrink_core.verbs.compress as _compress  # noqa: F401

    # Plotly reads its schema and template when it creates and writes the first figure.
    graph_objects.Figure(graph_objects.Heatmap(z=[[0.0]])).to_json()
    for package in (widgets, pages):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    # Streamlit collects garbage after every run, and would search all imported modules each time.
    gc.freeze()


def _server_is_up() -> bool:
    """Wait until the server listens; the imports would slow its start, and the caches need it."""
    from streamlit import runtime

    until = time.monotonic() + _SECONDS_TO_LISTEN
    while not runtime.exists() and time.monotonic() < until:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return runtime.exists()


def server_config(host: str, port: int) -> dict[str, Any]:
    """Return the server's configuration: local, silent, and without requests to other servers."""
    return {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.enableStaticServing": False,
        "server.maxUploadSize": _LARGEST_DROP_MIB,
        "server.allowedHosts": _allowed_hosts(host),
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "type",
        "client.showErrorLinks": "false",
        # With Streamlit's 2 runs, a request that waits while others are answered refers to messages that the
        # browser has forgotten by then, and the page loses its connection for good.
        "global.maxCachedMessageAge": 100,
        "runner.magicEnabled": False,
        "logger.level": "error",
        "logger.hideWelcomeMessage": True,
        **theme_config(),
    }


def _allowed_hosts(host: str) -> list[str]:
    """Return the accepted host names; any other name indicates DNS rebinding."""
    if _is_local(host):
        return [*_LOOPBACK]
    if host in ("0.0.0.0", "::"):
        name, addresses = socket.gethostname(), set[str]()
        with contextlib.suppress(OSError):  # Its name may be unknown.
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
        return [*_LOOPBACK, name, socket.getfqdn(), *sorted(addresses)]
    return [host]


def _is_local(host: str) -> bool:
    """Return whether only this computer can reach an address."""
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _require_free(host: str, port: int) -> None:
    """Refuse a port in use with an error of the explorer instead of the server's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        what = f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})"
        raise InputError(what, remedy="choose another port with --port") from error
