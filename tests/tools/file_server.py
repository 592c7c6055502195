"""A small HTTP server that misbehaves as it is told: breaks off, lies, redirects, and speaks the hub's language."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Site:
    """What is served, by path; each switch is one way to misbehave."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    linked: dict[str, str] = field(default_factory=dict)  # path -> X-Linked-Etag
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    break_after: int | None = None  # bytes of a body, each time
    length_offset: int = 0  # added to Content-Length
    ranges: bool = True
    etags: bool = True
    failures: int = 0  # so many requests get 503 first
    wrong_hashes: str | None = None  # end of the names of those weight files that get a wrong hash
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    asked: Callable[[], None] = lambda: None  # called with each request
    address: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """`site` on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            answer(self, site)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        site.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


def hub(site: Site, home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`coli pull` in a process of its own: the hub's library reads its variables when it is imported."""
    pytest.importorskip("huggingface_hub")
    environment = {**os.environ, "COLI_HOME": str(home), "HF_ENDPOINT": site.address, "HF_HOME": str(home / "hf")}
    command = [sys.executable, "-m", "coli", "pull", *arguments]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def answer(handler: BaseHTTPRequestHandler, site: Site) -> None:
    path = handler.path
    site.requests.append((path, {name.lower(): value for name, value in handler.headers.items()}))
    site.asked()
    handler.close_connection = True
    if site.failures:
        site.failures -= 1
        reply(handler, 503, b"later")
    elif path in site.redirects:
        headers = {"Location": site.redirects[path]}
        if path in site.linked:
            headers["X-Linked-Etag"] = f'"{site.linked[path]}"'
        reply(handler, 302, b"", headers)
    elif path.startswith("/api/models/"):
        listing(handler, site, path.removeprefix("/api/models/").partition("?")[0])
    elif path.startswith("/api/datasets/"):
        repo = path.removeprefix("/api/datasets/").partition("?")[0].partition("/revision/")[0]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in site.datasets.get(repo, {}).items()]
        about = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False}
        tags = ["license:cc-by-sa-3.0", "license:gfdl", "language:en"]
        text = json.dumps({**about, "tags": tags, "disabled": False, "downloads": 0, "likes": 0}).encode()
        reply(handler, 200 if siblings else 404, text, {"Content-Type": "application/json"})
    else:
        content = site.files.get(path)
        for repo, files in site.repositories.items():
            for name, data in files.items():
                if path == f"/{repo}/resolve/{COMMIT}/{name}":
                    content = data
        for repo, files in site.datasets.items():
            for name, data in files.items():
                if path == f"/datasets/{repo}/resolve/{COMMIT}/{name.replace('/', '%2F')}" or path == (
                    f"/datasets/{repo}/resolve/{COMMIT}/{name}"
                ):
                    content = data
        if content is None:
            reply(handler, 404, b"no")
        else:
            body(handler, site, content)


def body(handler: BaseHTTPRequestHandler, site: Site, content: bytes) -> None:
    tag = f'"{hashlib.md5(content).hexdigest()}"'
    start, status, headers = 0, 200, {"ETag": tag} if site.etags else {}
    if "/resolve/" in handler.path:
        headers["X-Repo-Commit"] = COMMIT
    whole = len(content)
    wanted = handler.headers.get("Range")
    if wanted and site.ranges and handler.headers.get("If-Range", tag) == tag:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, status = int(first), 206
        content = content[: int(last) + 1] if last else content
        if start >= len(content):
            reply(handler, 416, b"")
            return
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{whole}"
    rest = content[start:]
    headers["Content-Length"] = str(len(rest) + site.length_offset)
    reply(handler, status, rest[: site.break_after], headers)


def reply(handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)


def listing(handler: BaseHTTPRequestHandler, site: Site, path: str) -> None:
    """The hub's model_info."""
    repo = path.partition("/revision/")[0]
    if repo not in site.repositories:
        reply(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        return
    siblings = []
    for name, data in site.repositories[repo].items():
        entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
        if name.endswith(".safetensors"):
            digest = hashlib.sha256(
                data + (b"!" if site.wrong_hashes and name.endswith(site.wrong_hashes) else b"")
            ).hexdigest()
            entry |= {"blobId": "0" * 40, "lfs": {"sha256": digest, "size": len(data), "pointerSize": 1}}
        else:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        siblings.append(entry)
    text = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}).encode()
    reply(handler, 200, text, {"Content-Type": "application/json"})
