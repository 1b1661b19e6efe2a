"""Files on offer: handed over to those who have their address and call the server by its own name."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.server import downloads as downloads_module
from inshrink_app.server import gate
from inshrink_app.server.downloads import Downloads, routes


def fetch(path: str, host: str) -> tuple[int, dict[str, str], bytes]:
    """Ask the route as a browser would."""
    from starlette.applications import Starlette

    sent: list[Any] = []
    app = gate.guarded(Starlette(routes=routes()), ("127.0.0.1", "localhost"), gate.HEADERS)

    async def ask() -> None:
        async def receive() -> dict[str, object]:
            await asyncio.Event().wait()  # The browser stays, and sends nothing more.
            return {}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", host.encode())],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "root_path": "",
        }
        await app(scope, receive, send)

    asyncio.run(ask())
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def offered(root, monkeypatch) -> tuple[Path, str]:
    """Put a file on offer and return its address."""
    monkeypatch.setattr(downloads_module, "downloads", Downloads())
    file = root / 'a "quoted".inshrink'
    file.write_bytes(b"whole archive")
    return file, downloads_module.downloads.offer(file)


@pytest.mark.parametrize("host", ["127.0.0.1:8501", "127.0.0.1", "localhost", "LOCALHOST:1", "localhost."])
def test_a_file_on_offer_is_handed_over_as_an_attachment_under_each_own_name(offered, host):
    status, headers, body = fetch(offered[1], host)
    assert (status, body) == (200, b"whole archive")
    assert headers["content-disposition"].startswith("attachment;")
    assert headers["content-type"] == "application/octet-stream"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_nothing_is_handed_over_without_a_token_too_late_or_after_a_change(offered, tmp_path, monkeypatch):
    file, address = offered

    def is_refused(path: str = address) -> bool:
        return fetch(path, "localhost")[0] == 404

    assert is_refused(address[:-1])
    assert is_refused(f"{downloads_module.DOWNLOAD_PREFIX}/..%2f..%2fetc%2fpasswd")
    with monkeypatch.context() as later:
        now = time.monotonic()
        later.setattr(downloads_module.time, "monotonic", lambda: now + 3601)
        assert is_refused()
    file.rename(tmp_path / "secret")
    assert is_refused()
    file.symlink_to(tmp_path / "secret")
    assert is_refused(), "a link to outside"
    file.unlink()
    file.write_bytes(b"another")
    assert is_refused()


def test_the_same_file_keeps_its_address_and_offers_are_bounded(root):
    registry = Downloads()
    files = []
    for position in range(300):
        file = root / f"{position}.inshrink"
        file.touch()
        files.append(registry.offer(file))
    assert registry.offer(root / "299.inshrink") == files[-1]
    assert registry.find(files[0].rpartition("/")[2]) is None
    assert registry.find(files[-1].rpartition("/")[2]) == root / "299.inshrink"


def test_files_outside_of_the_roots_get_no_address(root):
    assert services.download_url("/etc/passwd") is None
    assert services.download_url(str(root / "missing.inshrink")) is None
