"""Who is answered, and what every answer says: asked of the running server, byte by byte."""

import asyncio
import re
import socket
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlencode

import pytest
import streamlit
from inshrink_app import launch
from inshrink_app.server import gate
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue
from streamlit.runtime.pages_manager import PagesManager
from streamlit.runtime.script_data import ScriptData
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.runtime.scriptrunner.script_runner import ScriptRunner, ScriptRunnerEvent
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData, ScriptRequests
from streamlit.runtime.scriptrunner_utils.script_run_context import ScriptRunContext
from streamlit.runtime.state import SafeSessionState, SessionState

from tests.app.browser import Server, ask, browser_marks
from tests.app.builders import write_run

STATIC = Path(streamlit.__file__).parent / "static"
SCRIPT = next((STATIC / "static" / "js").glob("index.*.js")).name

PATHS = [
    "/",
    "/run",
    "/no/such/page",
    "/favicon.png",
    f"/static/js/{SCRIPT}",
    "/static/missing.js",
    "/_stcore/health",
    "/_stcore/host-config",
    "/_stcore/metrics",
    "/_stcore/agent/openapi.json",
    "/media/missing.png",
    "/component/missing/index.html",
    "/inshrink/download/none",
    "/..%2f..%2fetc/passwd",
]
HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def assert_says_everything(headers: dict[str, str]) -> None:
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe-inline" not in policy["script-src"]
    assert not re.search(r"https?:|\*", headers["content-security-policy"])


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_says_what_browsers_must_not_do_with_it(address, path):
    for method in ("GET", "HEAD", "OPTIONS", "PUT"):
        assert_says_everything(ask(address, path, method)[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8501", "", "127.0.0.2"])
def test_nothing_is_answered_under_a_foreign_name(address, path, host):
    status, headers, _ = ask(address, path, Host=host)
    assert status == 403
    assert_says_everything(headers)
    assert ask(address, "/_stcore/stream", **HANDSHAKE, Host=host, Origin=f"http://{host}")[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1", "file://", "x:"]
)
def test_pages_of_other_origins_get_neither_a_session_nor_an_answer(address, origin):
    assert ask(address, "/_stcore/health", Origin=origin)[0] == 403
    status, headers, _ = ask(address, "/_stcore/stream", Origin=origin, **HANDSHAKE)
    assert status == 403
    assert_says_everything(headers)


def test_our_own_page_gets_a_session_and_so_do_programs(address):
    for more in ({"Origin": address}, {}):
        status, headers, _ = ask(address, "/_stcore/stream", **HANDSHAKE, **more)
        assert status == 101
        assert_says_everything(headers)


def test_two_names_at_once_are_none(address):
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n".encode())
        assert connection.recv(64).split(b" ")[1] in (b"400", b"403")


def test_the_policy_names_every_script_that_streamlit_writes_into_its_page():
    scripts = re.findall(r"<script>", (STATIC / "index.html").read_text())
    said = gate.headers(gate.shell(STATIC / "index.html"))["Content-Security-Policy"]
    assert said.count("'sha256-") == len(scripts) + 1 > 1


def test_the_page_under_every_address_is_told_where_its_server_is(address):
    for path in ("/", "/run", "/no"):
        status, headers, text = ask(address, path)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert text.index(b"BACKEND_BASE_URL") < text.index(b"<script type")
    assert ask(address, "/favicon.png")[1]["content-type"] == "image/png"


def test_the_page_holds_the_command_that_starts_its_server_again(address):
    text = ask(address, "/")[2].decode()
    assert re.search(
        rf'<div id="gone".*<code>inshrink ui --port {address.rpartition(":")[2]} --root /', text, re.S
    )
    page = gate.shell(STATIC / "index.html", "inshrink ui '<script>'")
    assert "<script>'" not in page


def test_no_session_takes_the_folder_of_pages_for_streamlits_own():
    launch.explorer(["127.0.0.1"], "inshrink ui")
    assert PagesManager.uses_pages_directory is False


@pytest.mark.browser
@pytest.mark.skipif(browser_marks[1].args[0], reason="no Chromium here")
def test_a_page_of_another_origin_cannot_frame_the_explorer_and_a_link_from_it_starts_nothing(page, tmp_path):
    folder = tmp_path / "served" / "root"
    folder.mkdir(parents=True)
    write_run(folder / "run")
    explorer, other = Server(folder), tmp_path / "other.html"
    explorer.start()
    link = explorer.link("run", metric="magnitude")
    other.write_text(f"<iframe src='{link}'></iframe><a href='{link}' target=_blank>go</a>")
    try:
        page.goto(other.as_uri())
        page.wait_for_timeout(1500)
        assert any("frame-ancestors" in complaint for complaint in page.complaints)
        assert all("stApp" not in frame.content() for frame in page.frames[1:])
        with page.context.expect_page() as opened:
            page.get_by_text("go").click()
        landed = opened.value
        landed.set_default_timeout(120_000)
        landed.get_by_text("a link alone starts nothing").wait_for()
        assert landed.evaluate("window.opener === null")
        landed.wait_for_timeout(1000)
        assert not list((folder.parent / "state").rglob("job.json"))
        landed.get_by_role("button", name="Measure magnitude").click()
        landed.get_by_text("of the magnitude").first.wait_for()  # the sentence under the map, once measured
        assert list((folder.parent / "state").rglob("job.json"))
    finally:
        explorer.end()


def test_the_page_hides_streamlits_own_csv_which_may_start_formulas():
    page = gate.shell(STATIC / "index.html")
    assert 'button[aria-label^="Download as CSV"]' in page.partition("</head>")[0]
    # What is hidden is what this version of Streamlit shows.
    scripts = [path.read_text(errors="replace") for path in (STATIC / "static" / "js").glob("*.js")]
    assert any("label:`Download as CSV`" in script for script in scripts)
    assert any('"data-testid":`stElementToolbarButton`' in script for script in scripts)


def test_a_fragment_that_begins_takes_back_nothing_that_waits_to_be_sent():
    launch.explorer(["127.0.0.1"], "inshrink ui")
    waiting, sent = ForwardMsgQueue(), []
    for place, (fragment, path) in enumerate([("outer", [0]), ("inner", [0, 0]), ("outer", [0])]):
        message = ForwardMsg()
        message.metadata.delta_path.extend(path)
        message.delta.fragment_id = fragment
        if place == 0:
            message.delta.add_block.allow_empty = True
        else:
            message.delta.new_element.markdown.body = str(place)
        sent.append(message)
        waiting.enqueue(message)
        waiting.clear(retain_lifecycle_msgs=True, fragment_ids_this_run=["outer"])
    sent.append(ForwardMsg(script_finished=ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY))
    waiting.enqueue(sent[-1])
    waiting.clear(retain_lifecycle_msgs=True, fragment_ids_this_run=["another"])
    assert waiting.flush() == sent
    assert waiting.is_empty()


def test_a_timer_that_fires_when_a_run_has_ended_discards_none_of_its_messages(monkeypatch):
    launch.explorer(["127.0.0.1"], "inshrink ui")
    monkeypatch.setattr(AppSession, "has_fragment", lambda self, fragment: True)
    monkeypatch.setattr(ScriptRunner, "start", lambda self: None)

    async def visit() -> list[str]:
        session = AppSession(ScriptData("main.py", is_hello=False), Mock(), ScriptCache(), None, {})
        session.request_rerun(None)
        ended = session._scriptrunner
        for query in ("layer=a", "step=1"):  # From the thread of the run, which then ends.
            message = ForwardMsg()
            message.page_info_changed.query_string = query
            session._on_scriptrunner_event(ended, ScriptRunnerEvent.ENQUEUE_FORWARD_MSG, forward_msg=message)
        ended.request_stop()
        session._on_scriptrunner_event(ended, ScriptRunnerEvent.SHUTDOWN, client_state=ClientState())
        session.request_rerun(ClientState(fragment_id="poll"))
        begun = session._scriptrunner
        await asyncio.sleep(0)
        assert session._scriptrunner is begun is not ended
        waiting = session._browser_queue.flush()
        return [message.page_info_changed.query_string for message in waiting]

    assert asyncio.run(visit()) == ["layer=a", "step=1"]


def test_a_request_with_an_earlier_address_changes_nothing_unless_the_user_goes_back():
    launch.explorer(["127.0.0.1"], "inshrink ui")
    state = SafeSessionState(SessionState(), lambda: None)
    context = ScriptRunContext(
        "id", Mock(), "", state, Mock(), "main.py", {}, Mock(), PagesManager("main.py")
    )
    context.reset(query_string="layer=linked", page_script_hash="run")
    assert context.query_string == "layer=linked"
    with state.query_params() as known:
        known.populate_from_query_string("layer=clicked&step=1")
    context.reset(query_string="layer=linked", page_script_hash="run")
    assert context.query_string == "layer=clicked&step=1" == urlencode(known.to_dict())
    context.reset(query_string="layer=linked", page_script_hash="run", is_history_navigation=True)
    assert context.query_string == "layer=linked" == urlencode(known.to_dict())


def test_a_timer_of_the_page_that_is_left_does_not_undo_the_click_that_leaves_it():
    launch.explorer(["127.0.0.1"], "inshrink ui")
    requests = ScriptRequests()
    requests.request_rerun(RerunData(page_script_hash="open"))
    requests.request_rerun(RerunData(page_script_hash="run", fragment_id="poll", is_auto_rerun=True))
    taken = requests.on_scriptrunner_ready().rerun_data
    assert (taken.page_script_hash, taken.fragment_id_queue) == ("open", [])
