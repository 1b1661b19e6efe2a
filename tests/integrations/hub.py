"""A small server that speaks as much of the Hugging Face Hub's HTTP API as an archive needs.

It imitates, as huggingface_hub asks for them: making a repository, its last commit, trees in pages and paths
with sizes, preupload, uploads by LFS (its batch call, basic transfer), commits with `parentCommit` (412 where
another came before), and `resolve` with ranges, behind a redirect for LFS objects as on the Hub. It knows
one token. It does not imitate Xet (HF_HUB_DISABLE_XET is set), pull requests, branches and tags but ``main``,
multipart uploads, quotas, gated repositories and what the real server checks of names and cards.
"""

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_the_owner"
PAGE = 50
"""Entries of a page of a tree; the Hub has 1,000."""


class Repository:
    """Files at each commit, the last one last."""

    def __init__(self, private):
        self.private = private
        self.commits = []
        self.files = {}
        self.commit({".gitattributes": b"*.bin filter=lfs diff=lfs merge=lfs -text\n"}, (), "initial commit")

    @property
    def head(self):
        return self.commits[-1][0]

    def commit(self, added, deleted, message):
        files = {path: content for path, content in self.at_head.items() if path not in set(deleted)} | added
        sha = hashlib.sha1(f"{len(self.commits)} {message} {sorted(files)}".encode()).hexdigest()
        self.commits.append((sha, message))
        self.files[sha] = files
        return sha

    @property
    def at_head(self):
        return self.files[self.head] if self.commits else {}

    def at(self, revision):
        return self.at_head if revision == "main" else self.files.get(revision)


class Hub(ThreadingHTTPServer):
    """The server; `repositories` by kind and id, `asked` the calls so far, `before_commit` may interfere.

    What ends as `in_git` says is kept in git, with its bytes in the commit, not by LFS. `rule` is asked at
    every call what becomes of it, as `servers.Proxy` does: ``drop``, ``lose`` or ``refuse``.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.lfs, self.asked = {}, {}, []
        self.lock = threading.RLock()
        self.before_commit = lambda repository: None
        self.in_git = (".md", ".gitattributes")
        self.rule = lambda number, method, path: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def repository(self, repo_id, kind="model"):
        return self.repositories[kind, repo_id]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    # ---- answers

    def _answer(self, status, content=b"", headers=None):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        if self.fate == "lose":
            self.close_connection = True
            return
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status, code="", message=""):
        self._answer(status, {"error": message or code}, {"X-Error-Code": code, "X-Error-Message": message})

    def _ranged(self, content, headers):
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            return self._answer(200, content, headers)
        begin, end = int(span[1]), min(int(span[2]) + 1, len(content))
        if begin >= len(content):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        headers = headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
        return self._answer(206, content[begin:end], headers)

    # ---- calls

    def _serve(self):
        body = self._body()
        address = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(address.path)
        self.query = dict(urllib.parse.parse_qsl(address.query))
        with self.server.lock:
            self.server.asked.append((self.command, path))
            self.fate = self.server.rule(len(self.server.asked) - 1, self.command, path)
        if self.fate == "drop":
            self.close_connection = True
            return None
        if self.fate == "refuse":
            return self._refuse(503, "", "try again")
        for (method, pattern), call in _CALLS.items():
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split("|"):
                with self.server.lock:
                    return call(self, body, **found.groupdict())
        return self._refuse(404, "", f"this server does not know {self.command} {path}")

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while nbytes := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(nbytes))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _is_owner(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, kind, repo_id, *, write=False):
        found = self.server.repositories.get(((kind or "models").rstrip("s"), repo_id))
        if found is None or (found.private and not self._is_owner()):
            self._refuse(404 if self._is_owner() else 401, "RepoNotFound", "Repository not found")
            return None
        if write and not self._is_owner():
            self._refuse(403, "", "You don't have the rights to write here")
            return None
        return found

    def create(self, body):
        asked = json.loads(body)
        if not self._is_owner():
            return self._refuse(401, "", "Invalid username or password.")
        repo_id = f"{asked['organization']}/{asked['name']}"
        key = asked.get("type") or "model", repo_id
        if key in self.server.repositories:
            return self._answer(409, {"error": "You already created this repo", "url": self._page(repo_id)})
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.server.repositories[key] = Repository(private)
        return self._answer(200, {"url": self._page(repo_id)})

    def _page(self, repo_id):
        return f"{self.server.url}/{repo_id}"

    def info(self, body, kind, repo_id, revision="main"):
        repository = self._repository(kind, repo_id)
        if repository is None:
            return None
        return self._answer(
            200, {"id": repo_id, "sha": repository.head, "private": repository.private, "tags": []}
        )

    def _entry(self, path, content):
        entry = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        digest = hashlib.sha256(content).hexdigest()
        if digest in self.server.lfs:
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry

    def tree(self, body, kind, repo_id, revision, folder=""):
        repository = self._repository(kind, repo_id)
        if repository is None:
            return None
        files = repository.at(revision)
        if files is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        inside = f"{folder.strip('/')}/" if folder.strip("/") else ""
        entries = {}
        for path in sorted(files):
            if path.startswith(inside):
                name, _, rest = path[len(inside) :].partition("/")
                if self.query.get("recursive", "").lower() in ("1", "true"):
                    name, rest = path[len(inside) :], ""
                folder_entry = {"type": "directory", "path": inside + name, "oid": "0" * 40, "size": 0}
                entries[name] = folder_entry if rest else self._entry(path, files[path])
        if inside and not entries:
            return self._refuse(404, "EntryNotFound", f"{folder} does not exist")
        begin = int(self.query.get("cursor", 0))
        page = list(entries.values())[begin : begin + PAGE]
        after = {}
        if begin + PAGE < len(entries):
            here = self.path.partition("?")[0]
            again = "recursive=True&" if "recursive" in self.query else ""
            after = {"Link": f'<{self.server.url}{here}?{again}cursor={begin + PAGE}>; rel="next"'}
        return self._answer(200, page, after)

    def paths(self, body, kind, repo_id, revision):
        repository = self._repository(kind, repo_id)
        if repository is None:
            return None
        files = repository.at(revision) or {}
        asked = urllib.parse.parse_qs(body.decode())["paths"]
        return self._answer(200, [self._entry(path, files[path]) for path in asked if path in files])

    def preupload(self, body, kind, repo_id, revision):
        if self._repository(kind, repo_id, write=True) is None:
            return None
        rows = [
            {
                "path": file["path"],
                "uploadMode": "regular" if file["path"].endswith(self.server.in_git) else "lfs",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return self._answer(200, {"files": rows})

    def batch(self, body, repo_id, kind=None):
        if self._repository(kind, repo_id, write=True) is None:
            return None
        objects = []
        for item in json.loads(body)["objects"]:
            row = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.lfs:
                row["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{item['oid']}"}}
            objects.append(row)
        return self._answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return self._refuse(400, "", "the digest is another")
        self.server.lfs[oid] = body
        return self._answer(200)

    def validate(self, body):
        content = json.loads(body)["content"]
        errors = [] if re.match(r"---\n.*?\n---\n", content, re.S) else [{"message": "no metadata"}]
        return self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def commit(self, body, kind, repo_id, revision):
        repository = self._repository(kind, repo_id, write=True)
        if repository is None:
            return None
        rows = [json.loads(line) for line in body.splitlines() if line]
        header = rows[0]["value"]
        self.server.before_commit(repository)
        if header.get("parentCommit") not in (None, repository.head):
            return self._refuse(412, "", "A commit has happened since. Please refresh and try again.")
        added, deleted = {}, []
        for row in rows[1:]:
            value = row["value"]
            if row["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                if value["oid"] not in self.server.lfs:
                    return self._refuse(400, "", "an LFS object was not uploaded")
                added[value["path"]] = self.server.lfs[value["oid"]]
            elif row["key"] == "deletedFile":
                if value["path"] not in repository.at_head:
                    return self._refuse(404, "EntryNotFound", "A file with this name doesn't exist")
                deleted.append(value["path"])
        sha = repository.commit(added, deleted, header["summary"])
        url = f"{self._page(repo_id)}/commit/{sha}"
        return self._answer(200, {"commitUrl": url, "commitOid": sha, "success": True})

    def resolve(self, body, repo_id, revision, path, kind=None):
        repository = self._repository(kind, repo_id)
        if repository is None:
            return None
        files = repository.at(revision)
        if files is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if path not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content, digest = files[path], hashlib.sha256(files[path]).hexdigest()
        about = {"X-Repo-Commit": repository.head, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if digest in self.server.lfs:
            place = f"{self.server.url}/cdn/{digest}?signature=secret"
            about |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"', "Location": place}
            return self._answer(302, b"", about)
        return self._ranged(content, about)

    def cdn(self, body, oid):
        return self._ranged(self.server.lfs[oid], {"ETag": f'"{oid}"'})


_REPO = r"(?P<repo_id>[^/]+/[^/]+?)"
_API = rf"/api/(?P<kind>models|datasets|spaces)/{_REPO}"
_KIND = r"/(?:(?P<kind>datasets|spaces)/)?"
_CALLS = {
    ("POST", "/api/repos/create"): _Handler.create,
    ("POST", "/api/validate-yaml"): _Handler.validate,
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(?P<folder>/.*)?"): lambda self, body, folder=None, **rest: (
        self.tree(body, folder=folder or "", **rest)
    ),
    ("POST", rf"{_API}/paths-info/(?P<revision>[^/]+)"): _Handler.paths,
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)"): _Handler.preupload,
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)"): _Handler.commit,
    ("GET", rf"{_API}/revision/(?P<revision>[^/]+)"): _Handler.info,
    ("GET", _API): _Handler.info,
    ("POST", rf"{_KIND}{_REPO}\.git/info/lfs/objects/batch"): _Handler.batch,
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]+)"): _Handler.upload,
    ("GET|HEAD", r"/cdn/(?P<oid>[0-9a-f]+)"): _Handler.cdn,
    ("GET|HEAD", rf"{_KIND}{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"): _Handler.resolve,
}
