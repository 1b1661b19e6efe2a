"""A bucket of S3 in memory, behind a local address, with the requests that archives make."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

NAME = "parity"

_DATE = "2030-01-01T00:00:00.000Z"
_HTTP_DATE = "Tue, 01 Jan 2030 00:00:00 GMT"
_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class Bucket(ThreadingHTTPServer):
    """The server; `objects` are its content by key."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.guard = threading.Lock()


class Answering(BaseHTTPRequestHandler):
    """Answers requests in full, or with the range that they ask for."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Write nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Answer with a status, headers and a body."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_range(self, content: bytes, **headers: str) -> bool:
        """Answer with what the request asks for of an object; False where it has nothing of that."""
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, content, **headers)
            return True
        first, last = asked[1], asked[2]
        begin = int(first) if first else max(0, len(content) - int(last))
        end = min(len(content), int(last) + 1) if first and last else len(content)
        if begin < end:
            where = f"bytes {begin}-{end - 1}/{len(content)}"
            self.answer(206, content[begin:end], Content_Range=where, **headers)
        return begin < end


class _Handler(Answering):
    server: Bucket

    def _asked(self) -> tuple[str, dict[str, str]]:
        """Return the key and the parameters of the request."""
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        return unquote(address.path).removeprefix(f"/{NAME}").lstrip("/"), query

    def _fail(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _store(self, key: str, content: bytes) -> None:
        """Put an object under the conditions of the request."""
        with self.server.guard:
            there = self.server.objects.get(key)
            wanted = self.headers.get("If-Match")
            if there is not None and self.headers.get("If-None-Match") == "*":
                return self._fail(412, "PreconditionFailed")
            if wanted is not None and (there is None or wanted != _tag(there)):
                return self._fail(412, "PreconditionFailed")
            self.server.objects[key] = content
            self.server.metadata[key] = {
                name.replace("-", "_"): value
                for name, value in self.headers.items()
                if name.lower().startswith("x-amz-meta-")
            }
        if self.command == "PUT":
            return self.answer(200, ETag=_tag(content))
        return self.answer(200, _document("CompleteMultipartUploadResult", f"<ETag>{_tag(content)}</ETag>"))

    def do_PUT(self) -> None:
        key, query = self._asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "uploadId" not in query:
            return self._store(key, body)
        self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
        return self.answer(200, ETag=_tag(body))

    def do_POST(self) -> None:
        key, query = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in query:
            with self.server.guard:
                name = f"upload-{len(self.server.uploads)}"
                self.server.uploads[name] = {}
            started = f"<Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            return self.answer(200, _document("InitiateMultipartUploadResult", started))
        if "delete" in query:
            keys = re.findall(r"<Key>([^<]*)</Key>", body.decode())
            for entry in keys:
                self.server.objects.pop(entry, None)
            return self.answer(
                200, _document("DeleteResult", "".join(f"<Deleted><Key>{k}</Key></Deleted>" for k in keys))
            )
        parts = self.server.uploads[query["uploadId"]]
        return self._store(key, b"".join(parts[number] for number in sorted(parts)))

    def do_DELETE(self) -> None:
        key, query = self._asked()
        if "uploadId" not in query:
            self.server.objects.pop(key, None)
        self.answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        key, query = self._asked()
        if "list-type" in query:
            return self._list(query.get("prefix", ""), query.get("delimiter", ""))
        content = self.server.objects.get(key)
        if content is None:
            return self._fail(404, "NoSuchKey")
        if self.headers.get("If-Match", _tag(content)) != _tag(content):
            return self._fail(412, "PreconditionFailed")
        headers = {"ETag": _tag(content), "Last_Modified": _HTTP_DATE, **self.server.metadata.get(key, {})}
        if not self.answer_range(content, **headers):
            self._fail(416, "InvalidRange")
        return None

    def _list(self, prefix: str, delimiter: str) -> None:
        found, folders = "", set()
        for key, content in sorted(self.server.objects.items()):
            if not key.startswith(prefix):
                continue
            inside, cut, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            if cut:
                folders.add(f"{prefix}{inside}{delimiter}")
                continue
            found += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>{_DATE}</LastModified>"
                f"<ETag>{escape(_tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
            )
        for folder in sorted(folders):
            found += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        self.answer(200, _document("ListBucketResult", f"<IsTruncated>false</IsTruncated>{found}"))


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _document(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode()


@functools.cache
def _server() -> Bucket:
    """Return the server of this process, whose address clients may remember."""
    server = Bucket()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextlib.contextmanager
def running() -> Iterator[Bucket]:
    """Lead ``s3://parity`` to an empty bucket of this process."""
    server = _server()
    for table in (server.objects, server.metadata, server.uploads):
        table.clear()
    address = f"http://127.0.0.1:{server.server_port}"
    with mock.patch.dict(os.environ, {**_KEYS, "AWS_ENDPOINT_URL": address}):
        yield server
