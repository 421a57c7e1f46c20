"""A small Hub on loopback, in memory: the routes by which `huggingface_hub` publishes and fetches models.

    with HubServer() as hub:
        environment = os.environ | hub.environment
        hub.files("user/model")

Repositories have commits on the branch `main`; large files go to a store of their own (LFS) before a commit names
them, small ones are in the commit. A private repository does not exist for who has no token. The Space USER/NAME is
the repository `spaces/USER/NAME`. Tests break things through `tamper` (what is served instead of a large file, by
`USER/NAME/FILE`), `cut` (after how many bytes of a large file the connection ends) and `on_upload` (called before a
large file is received). `HangUp` ends a connection.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN, USER = "hf_loopback", "user"
REPO = r"(?P<repo>(?:spaces/)?[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
LARGE = (".safetensors", ".bin", ".png")


@dataclass(frozen=True)
class File:
    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob_id(self) -> str:
        """The name that git gives a file."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.blob_id


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)  # in the order they were made

    def add_commit(self, files: dict[str, File]) -> str:
        content = f"{len(self.commits)}{sorted((name, file.sha256) for name, file in files.items())}"
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
        self.objects: dict[str, bytes] = {}
        self.tamper: dict[str, Callable[[bytes], bytes]] = {}
        self.cut: dict[str, int] = {}
        self.on_upload: Callable[[], None] = lambda: None
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.hub = self
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        # By another name: the client takes a redirection to the same host for a renamed repository.
        self.storage_url = f"http://localhost:{self.http.server_port}"

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
        repo = self.repos[repo_id]
        return {name: file.content for name, file in repo.commits[repo.head].items()}


class Handler(BaseHTTPRequestHandler):
    """Finds the route of a request, and answers with what it returns or refuses."""

    protocol_version = "HTTP/1.1"

    def do_request(self):
        path = unquote(urlsplit(self.path).path).replace("/api/spaces/", "/api/models/spaces/")
        try:
            for method, pattern, action in ROUTES:
                if method == self.command and (match := re.fullmatch(pattern, path)):
                    action(self, **{name: value for name, value in match.groupdict().items() if value is not None})
                    return
            raise Refused(404, f"no route for {self.command} {path}")
        except HangUp:
            self.close_connection = True
        except Refused as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            self.answer({"error": str(error)}, error.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_request

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def json_body(self) -> dict:
        return json.loads(self.body())

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

    def repo_to_write(self, repo_id: str) -> Repo:
        if not self.known:
            raise Refused(401, "Invalid username or password.")
        return self.repo_to_read(repo_id)

    def repo_to_read(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self.known):
            raise Refused(404 if self.known else 401, "Repository not found", "RepoNotFound")
        return repo

    def commit_of(self, repo: Repo, revision: str) -> str:
        oid = repo.head if revision == "main" else revision
        if oid not in repo.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid


def whoami(request: Handler):
    if not request.known:
        raise Refused(401, "Invalid credentials in Authorization header")
    request.answer({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


def create_repo(request: Handler):
    if not request.known:
        raise Refused(401, "Invalid username or password.")
    wanted = request.json_body()
    repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
    if wanted.get("type") == "space":
        if wanted.get("sdk") != "gradio":
            raise Refused(400, "a Space needs an SDK")
        repo_id = f"spaces/{repo_id}"
    status = 409 if repo_id in request.hub.repos else 200
    if status == 200:
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        request.hub.repos[repo_id] = Repo(private)
        request.hub.repos[repo_id].add_commit({})
    request.answer({"url": f"{request.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}, status)


def validate_yaml(request: Handler):
    """Whoever reads the card from here parses it."""
    request.body()
    request.answer({"errors": [], "warnings": []})


def preupload(request: Handler, repo: str, revision: str):
    stored = request.repo_to_write(repo)
    files = stored.commits[request.commit_of(stored, revision)]
    modes = []
    for path in (wanted["path"] for wanted in request.json_body()["files"]):
        mode, oid = "lfs" if path.endswith(LARGE) else "regular", files[path].etag if path in files else None
        modes.append({"path": path, "shouldIgnore": False, "uploadMode": mode, "oid": oid})
    request.answer({"files": modes})


def lfs_batch(request: Handler, repo: str):
    request.repo_to_write(repo)
    objects = []
    for wanted in request.json_body()["objects"]:
        upload = {"upload": {"href": f"{request.hub.url}/lfs/{wanted['oid']}"}}
        missing = wanted["oid"] not in request.hub.objects
        objects.append(wanted | ({"actions": upload} if missing else {}))
    request.answer({"transfer": "basic", "objects": objects})


def lfs_upload(request: Handler, oid: str):
    request.hub.on_upload()
    content = request.body()
    if hashlib.sha256(content).hexdigest() != oid:
        raise Refused(400, "the content does not have the announced hash")
    request.hub.objects[oid] = content
    request.answer()


def commit(request: Handler, repo: str, revision: str):
    stored = request.repo_to_write(repo)
    files = dict(stored.commits[request.commit_of(stored, revision)])
    for line in request.body().splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "file":
            files[value["path"]] = File(base64.b64decode(value["content"]), large=False)
        elif item["key"] == "lfsFile":
            if value["oid"] not in request.hub.objects:
                raise Refused(400, f"{value['path']} was not uploaded")
            files[value["path"]] = File(request.hub.objects[value["oid"]], large=True)
        elif item["key"] == "deletedFile":
            files.pop(value["path"])
    oid = stored.add_commit(files)
    request.answer({"success": True, "commitOid": oid, "commitUrl": f"{request.hub.url}/{repo}/commit/{oid}"})


def info(request: Handler, repo: str, revision: str = "main"):
    stored = request.repo_to_read(repo)
    oid = request.commit_of(stored, revision)
    request.answer({"id": repo, "modelId": repo, "sha": oid, "private": stored.private, "tags": [], "downloads": 0,
                    "siblings": [{"rfilename": name} for name in stored.commits[oid]]})  # fmt: skip


def tree(request: Handler, repo: str, revision: str, folder: str = ""):
    stored = request.repo_to_read(repo)
    files = stored.commits[request.commit_of(stored, revision)]
    inside = {name: file for name, file in files.items() if name.startswith(folder.removeprefix("/"))}
    if folder and not inside:
        raise Refused(404, "Entry not found", "EntryNotFound")
    entries = []
    for name, file in inside.items():
        entry = {"type": "file", "path": name, "size": len(file.content), "oid": file.blob_id}
        large = {"lfs": {"oid": file.sha256, "size": len(file.content), "pointerSize": 134}} if file.large else {}
        entries.append(entry | large)
    request.answer(entries)


def resolve(request: Handler, repo: str, revision: str, path: str):
    """Small files as they are, large ones by a redirection to where they are stored."""
    stored = request.repo_to_read(repo)
    oid = request.commit_of(stored, revision)
    file = stored.commits[oid].get(path)
    if file is None:
        raise Refused(404, "Entry not found", "EntryNotFound")
    headers = {"X-Repo-Commit": oid, "ETag": f'"{file.etag}"'}
    if not file.large:
        request.answer(file.content, headers=headers)
        return
    headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": len(file.content)}
    location = f"{request.hub.storage_url}/cdn/{file.sha256}/{repo}/{path}"
    request.answer(status=302, headers=headers | {"Location": location})


def download(request: Handler, oid: str, path: str):
    content = request.hub.tamper.get(path, bytes)(request.hub.objects[oid])
    wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
    start = int(wanted[1]) if wanted else 0
    headers = {"Content-Length": len(content) - start}
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    end = request.hub.cut.get(path)
    request.answer(content[start:end], 206 if wanted else 200, headers)
    if end is not None:
        raise HangUp


ROUTES = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", preupload),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", lfs_upload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", commit),
    ("GET", f"/api/models/{REPO}", info),
    ("GET", f"/api/models/{REPO}/revision/{REVISION}", info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(?P<folder>/.*)?", tree),
    ("HEAD", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", resolve),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", resolve),
    ("GET", "/cdn/(?P<oid>[0-9a-f]+)/(?P<path>.+)", download),
]
