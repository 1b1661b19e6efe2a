"""Access checks and security headers for every answer of the server, Streamlit's included.

A page of another site must not frame the explorer, read from it, or send requests to it. This holds for pages
under a foreign name that resolves to this computer (DNS rebinding) and for pages of another origin.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import HTMLResponse, PlainTextResponse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_POLICY = {
    "default-src": "'none'",
    # Streamlit loads a component's script as a blob, which only its own page can create, and it probes for
    # WebAssembly.
    "script-src": "'self' blob: 'wasm-unsafe-eval'",
    # Streamlit's components write their styles into the page.
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "media-src": "'self'",
    "connect-src": "'self'",
    "worker-src": "'self' blob:",
    "manifest-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""The content security policy: no resource comes from another server, and no site may frame a page."""

HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}

_INLINE_SCRIPT = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
_HAS_PAGE_PATH = re.compile(r"/[a-z]*\Z")
"""Paths of pages: the first page, and the others by name. Paths of all other resources contain a dot or a
folder.
"""

_BACKEND = "<script>window.__streamlit = {BACKEND_BASE_URL: location.origin + '/'}</script>"
"""Set the server's address in Streamlit's page. Without it, Streamlit first tries paths below the page's
address, which costs two 404 answers.
"""

_ASSETS = Path(__file__).parents[1] / "assets"
_DENIAL = "websocket.http.response"
_REFUSED = "This host name or origin is not allowed.\n"


def shell(index: Path, command: str = "inshrink ui") -> str:
    """Return the page that every address answers: Streamlit's page with the server's address set.

    Parameters
    ----------
    index
        Streamlit's own page.
    command
        Command that starts this server again.
    """
    page = index.read_text(encoding="utf-8").replace("<script>", f"{_BACKEND}\n    <script>", 1)
    for charts in (index.parent / "static" / "js").glob("PlotlyChart.*.js"):  # 5 MB, on most pages
        link = f'<link rel="modulepreload" crossorigin href="./static/js/{charts.name}">'
        page = page.replace("</head>", f"  {link}\n  </head>", 1)
    head, gone = ((_ASSETS / name).read_text(encoding="utf-8") for name in ("head.html", "gone.html"))
    page = page.replace("</head>", f"{head}</head>", 1)
    return page.replace("</body>", f"{gone.replace('$command', escape(command))}</body>", 1)


def headers(page: str) -> dict[str, str]:
    """Return the headers of every answer.

    Parameters
    ----------
    page
        The page from `shell`. Its inline scripts are allowed by digest; other inline scripts are not.
    """
    policy = {**_POLICY, "script-src": f"{_POLICY['script-src']} {script_digests(page)}".rstrip()}
    return {"Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items())} | HEADERS


def script_digests(page: str) -> str:
    """Return the policy sources that allow the inline scripts of a page, by digest."""
    digests = (hashlib.sha256(script.encode()).digest() for script in _INLINE_SCRIPT.findall(page))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def guarded(
    application: Application, hosts: Iterable[str], headers: dict[str, str], page: str = ""
) -> Application:
    """Return an ASGI application that refuses foreign requests and adds headers to every answer.

    Parameters
    ----------
    application
        The application to guard.
    hosts
        Host names that this server accepts. Any other name indicates DNS rebinding.
    headers
        The headers to add.
    page
        Answer to the address of a page; if empty, the application answers.
    """
    allowed = {_bare(host) for host in hosts}
    lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    names = {name for name, _ in lines}

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        async def speak(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", f"{_DENIAL}.start"):
                others = [line for line in message.get("headers", ()) if line[0].lower() not in names]
                message = {**message, "headers": [*others, *lines]}
            await send(message)

        if scope["type"] in ("http", "websocket") and not _is_welcome(scope, allowed):
            if scope["type"] == "websocket" and _DENIAL not in (scope.get("extensions") or {}):
                await speak({"type": "websocket.close", "code": 1008})
            else:
                await PlainTextResponse(_REFUSED, 403)(scope, receive, speak)
        elif page and scope.get("method") in ("GET", "HEAD") and _HAS_PAGE_PATH.match(scope["path"]):
            await HTMLResponse(page, headers={"Cache-Control": "no-cache"})(scope, receive, speak)
        else:
            await application(scope, receive, speak)

    return answer


def _is_welcome(scope: Message, allowed: set[str]) -> bool:
    """Return whether a request uses an accepted host name and comes from no foreign origin."""
    values: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        values.setdefault(name.lower(), []).append(value.decode("latin-1"))
    hosts, origins = values.get(b"host", []), values.get(b"origin", [])
    if len(hosts) != 1 or len(origins) > 1 or _bare(_without_port(hosts[0])) not in allowed:
        return False
    # The port counts: another server on this computer is another site. "null" is the origin of a sandboxed
    # page.
    return not origins or urlsplit(origins[0]).netloc.casefold() == hosts[0].casefold()


def _without_port(host: str) -> str:
    """Return the host name of a Host header, with the brackets of IPv6 addresses."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _bare(host: str) -> str:
    """Return a name in the form in which DNS compares names."""
    return host.strip("[]").rstrip(".").casefold()
