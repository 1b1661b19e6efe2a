"""Streaming of large files: a route of the server sends them from disk, whatever their size.

A page offers a file and receives an address with an unguessable token. The token is bound to the file in its
present state. The route checks the token, its age, that the file is unchanged and that it is inside the
roots. `gate` checks the origin of the request.
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inshrink_app.server.roots import settings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

DOWNLOAD_PREFIX = "/inshrink/download"

_SECONDS_VALID = 3600.0
"""An interrupted download can be resumed for an hour."""

_MAX_OFFERS = 256
_TOKEN_NBYTES = 32


class _Offer(NamedTuple):
    """A file on offer: path, modification time and size when it was offered, and time of expiry."""

    path: Path
    mtime_ns: int
    nbytes: int
    expires_at: float


class Downloads:
    """The files on offer, by token."""

    def __init__(self) -> None:
        self._offers: dict[str, _Offer] = {}
        self._lock = threading.Lock()

    def offer(self, path: Path) -> str:
        """Return the download address of a file, which stays the same while the file and the offer are valid.

        Parameters
        ----------
        path
            A real path inside of the roots.

        Raises
        ------
        OSError
            The file does not exist.
        """
        status, now = path.stat(), time.monotonic()
        offer = _Offer(path, status.st_mtime_ns, status.st_size, now + _SECONDS_VALID)
        with self._lock:
            valid = {token: old for token, old in self._offers.items() if old.expires_at > now}
            for token, old in valid.items():
                if old[:3] == offer[:3] and old.expires_at - now > _SECONDS_VALID / 2:
                    return f"{DOWNLOAD_PREFIX}/{token}"
            token = secrets.token_urlsafe(_TOKEN_NBYTES)
            self._offers = dict([*valid.items(), (token, offer)][-_MAX_OFFERS:])
        return f"{DOWNLOAD_PREFIX}/{token}"

    def find(self, token: str) -> Path | None:
        """Return the file of a token; None if the token is unknown or expired, or the file has changed."""
        offer = self._offers.get(token)
        if offer is None or offer.expires_at <= time.monotonic():
            return None
        try:
            real = offer.path.resolve(strict=True)
            status = real.stat()
        except (OSError, RuntimeError):
            return None
        same = (real, status.st_mtime_ns, status.st_size) == offer[:3]
        return real if same and real.is_file() and settings().allows(real) else None


downloads = Downloads()
"""The files on offer in this process."""


def routes() -> list[Route]:
    """Return the route that serves the files on offer."""
    from starlette.responses import FileResponse, PlainTextResponse
    from starlette.routing import Route

    async def download(request: Request) -> Response:
        path = downloads.find(request.path_params["token"])
        if path is None:
            text = "This link is no longer valid. Reload the page that it came from.\n"
            return PlainTextResponse(text, status_code=404)
        return FileResponse(
            path,
            headers={"Cache-Control": "no-store"},
            media_type="application/octet-stream",
            filename=path.name,
            content_disposition_type="attachment",
        )

    return [Route(f"{DOWNLOAD_PREFIX}/{{token}}", download, methods=["GET", "HEAD"])]
