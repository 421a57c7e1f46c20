"""A small Hub on loopback, in memory: the routes by which `huggingface_hub` publishes and fetches models.

    with HubServer() as hub:
        environment = os.environ | hub.environment
        hub.files("user/model")

Repositories have commits on the branch `main`. A private repository does not exist for who has no token. Tests break
things through `cut` (after how many bytes of a file, by `USER/NAME/FILE`, the connection ends) and `on_upload` (called
when an upload begins, before its commit). `HangUp` ends a connection.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from helpers import processes

TOKEN, USER = "hf_loopback", "user"
WITHOUT_THE_PACKAGE = "import sys\nsys.modules['modeling_tnn'] = None\n"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"


def blob_id(content: bytes) -> str:
    """The name that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # in the order they were made

    def add_commit(self, files: dict[str, bytes]) -> str:
        content = f"{len(self.commits)}{sorted((name, blob_id(file)) for name, file in files.items())}"
        oid = hashlib.sha1(content.encode()).hexdigest()
        self.commits[oid] = files
        return oid

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


class Refused(Exception):
    """An answer of the Hub that is an error."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


class HangUp(Exception):
    """No answer: the connection ends."""


class HubServer:
    """The server and what it stores; a context manager."""

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.cut: dict[str, int] = {}
        self.on_upload: Callable[[], None] = lambda: None
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.hub = self
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.http.shutdown()
        self.http.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a client finds this server and logs in."""
        switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        without_proxy = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN} | switches | without_proxy

    def files(self, repo_id: str) -> dict[str, bytes]:
        """The files that are published on `main`."""
        return self.repos[repo_id].commits[self.repos[repo_id].head]


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    """The environment of a user whose cache is empty."""
    return os.environ | hub.environment | {"HF_HOME": str(home)}


def client(hub: HubServer, home: Path, code: str, *arguments, setup: str = WITHOUT_THE_PACKAGE) -> dict:
    """Run `code` in a fresh process where the package is not installed; what it leaves in the dictionary `results`."""
    script = f"{setup}import json\nresults = {{}}\n{code}\njson.dump(results, open('results.json', 'w'))"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    processes.run(command, check=True, env=environment(hub, home), cwd=home)
    return json.loads((home / "results.json").read_text())


class Handler(BaseHTTPRequestHandler):
    """Finds the route of a request, and answers with what it returns or refuses."""

    protocol_version = "HTTP/1.1"

    def do_request(self):
        path = unquote(urlsplit(self.path).path)
        try:
            for method, pattern, action in ROUTES:
                if self.command in method and (match := re.fullmatch(pattern, path)):
                    action(self, **{name: value for name, value in match.groupdict().items() if value is not None})
                    return
            raise Refused(404, f"no route for {self.command} {path}")
        except HangUp:
            self.close_connection = True
        except Refused as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            self.answer({"error": str(error)}, error.status, headers)

    do_GET = do_HEAD = do_POST = do_request

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, content: dict | list | bytes = b"", status: int = 200, headers: dict | None = None):
        """Send `content`; a HEAD request gets its length alone."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": len(data)} | (headers or {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError):  # a client that was killed
                self.wfile.write(data)

    def log_message(self, *arguments):
        """Quiet."""

    def found(self, repo_id: str, revision: str = "main", write: bool = False) -> tuple[Repo, str]:
        """A repository and the name of a commit, for whoever may read or write it."""
        repo = self.hub.repos.get(repo_id)
        if repo is None or ((repo.private or write) and not self.known):
            raise Refused(404 if self.known else 401, "Repository not found", "RepoNotFound")
        oid = repo.head if revision == "main" else revision
        if oid not in repo.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, oid


def whoami(request: Handler):
    request.answer({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


def create_repo(request: Handler):
    wanted = json.loads(request.body())
    if not request.known:
        raise Refused(401, "Invalid username or password.")
    repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
    status = 409 if repo_id in request.hub.repos else 200
    if status == 200:
        request.hub.repos[repo_id] = Repo(wanted.get("visibility") == "private" or bool(wanted.get("private")))
        request.hub.repos[repo_id].add_commit({})
    request.answer({"url": f"{request.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}, status)


def validate_yaml(request: Handler):
    """Whoever reads the card from here parses it."""
    request.body()
    request.answer({"errors": [], "warnings": []})


def preupload(request: Handler, repo: str, revision: str):
    """All files are in the commit, as small ones are on the Hub."""
    paths = [wanted["path"] for wanted in json.loads(request.body())["files"]]
    request.hub.on_upload()
    request.found(repo, revision, write=True)
    modes = {"shouldIgnore": False, "uploadMode": "regular", "oid": None}
    request.answer({"files": [{"path": path, **modes} for path in paths]})


def commit(request: Handler, repo: str, revision: str):
    lines = request.body().splitlines()
    stored, oid = request.found(repo, revision, write=True)
    files = dict(stored.commits[oid])
    for item in map(json.loads, lines):
        if item["key"] == "file":
            files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        elif item["key"] == "deletedFile":
            files.pop(item["value"]["path"])
    oid = stored.add_commit(files)
    request.answer({"success": True, "commitOid": oid, "commitUrl": f"{request.hub.url}/{repo}/commit/{oid}"})


def info(request: Handler, repo: str, revision: str = "main"):
    stored, oid = request.found(repo, revision)
    request.answer({"id": repo, "modelId": repo, "sha": oid, "private": stored.private, "tags": [], "downloads": 0,
                    "siblings": [{"rfilename": name} for name in stored.commits[oid]]})  # fmt: skip


def tree(request: Handler, repo: str, revision: str, folder: str = ""):
    stored, oid = request.found(repo, revision)
    files = {name: file for name, file in stored.commits[oid].items() if name.startswith(folder.removeprefix("/"))}
    if folder and not files:
        raise Refused(404, "Entry not found", "EntryNotFound")
    request.answer([{"type": "file", "path": name, "size": len(file), "oid": blob_id(file)}
                    for name, file in files.items()])  # fmt: skip


def resolve(request: Handler, repo: str, revision: str, path: str):
    """A file, from a byte on if that was asked for."""
    stored, oid = request.found(repo, revision)
    if path not in stored.commits[oid]:
        raise Refused(404, "Entry not found", "EntryNotFound")
    content, name = stored.commits[oid][path], f"{repo}/{path}"
    headers = {"X-Repo-Commit": oid, "ETag": f'"{blob_id(content)}"'}
    if request.command == "HEAD":
        request.answer(content, headers=headers)
        return
    wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
    start, end = int(wanted[1]) if wanted else 0, request.hub.cut.get(name)
    headers["Content-Length"] = len(content) - start
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    request.answer(content[start:end], 206 if wanted else 200, headers)
    if end is not None:
        raise HangUp


ROUTES = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", preupload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", commit),
    ("GET", f"/api/models/{REPO}", info),
    ("GET", f"/api/models/{REPO}/revision/{REVISION}", info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(?P<folder>/.*)?", tree),
    ("GET HEAD", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", resolve),
]
