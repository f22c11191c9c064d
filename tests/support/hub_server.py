"""A hub on loopback that speaks the protocol of the Hugging Face hub, and can be told to misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

MAIN = "a" * 40
OLD = "b" * 40
TOKEN = "hf_secret"
# Files of at least so many bytes are kept like large ones: by SHA-256, behind a redirect.
LARGE_BYTES = 10_000


@dataclass
class Hub:
    """What the server has, what it does wrong, and what it was asked."""

    # Repository to revision to file to content.
    repositories: dict[str, dict[str, dict[str, bytes]]]
    # Names beside commits.
    refs: dict[str, str] = field(default_factory=lambda: {"main": MAIN})
    url: str = ""
    # Where large files are sent from, as from another host.
    store_url: str = ""
    # Repositories that need the token.
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    # File to how many bytes of each of its next transfers arrive.
    cuts: dict[str, list[int]] = field(default_factory=dict)
    # File to what its next transfers send instead.
    damaged: dict[str, list[bytes]] = field(default_factory=dict)
    ignores_ranges: bool = False
    # File to the statuses of its next transfers.
    statuses: dict[str, list[int]] = field(default_factory=dict)
    # File to how many bytes of each of its next transfers arrive before nothing comes any more.
    stalls: dict[str, list[int]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    # When set, transfers of large files wait for it.
    gate: threading.Event | None = None
    started: threading.Event = field(default_factory=threading.Event)
    # File to the transfers that began.
    transfers: Counter[str] = field(default_factory=Counter)
    # File to the first byte of each transfer.
    starts: dict[str, list[int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    # Tokens that came to the store of large files.
    leaked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(path)
        if path.startswith("/store/"):
            if "Authorization" in self.headers:
                self.hub.leaked.append(path)
            _, _, repository, commit, file = path.split("/", 4)
            return self._transfer(self.hub.repositories[repository.replace("--", "/")][commit][file], file)
        if path.startswith("/files"):
            files = next(iter(self.hub.repositories.values()))[MAIN]
            name = path.removeprefix("/files").lstrip("/")
            if name == "":
                return self._send(200, "".join(f'<a href="/files/{it}">{it}</a>' for it in files).encode())
            return self._transfer(files[name], name) if name in files else self._send(404, b"")
        parts = path.strip("/").split("/")
        repository = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        revisions = self.hub.repositories.get(repository)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if revisions is None or (repository in self.hub.private and not has_token):
            return self._send(401, b"", code="RepoNotFound")
        at = 5 if parts[0] == "api" else 3
        revision = parts[at] if len(parts) > at else "main"
        commit = self.hub.refs.get(revision, revision)
        if commit not in revisions:
            return self._send(404, b"", code="RevisionNotFound")
        files = revisions[commit]
        if parts[0] == "api":
            if len(parts) > 4 and parts[4] == "tree":
                return self._send_json([_listed(name, data) for name, data in files.items()])
            return self._send_json({"id": repository, "sha": commit, "siblings": []})
        if repository in self.hub.gated and not has_token:
            return self._send(403, b"", code="GatedRepo")
        file = "/".join(parts[4:])
        if file not in files:
            return self._send(404, b"", code="EntryNotFound")
        if len(files[file]) >= LARGE_BYTES:
            place = f"{self.hub.store_url}/store/{repository.replace('/', '--')}/{commit}/{file}"
            return self._send(302, b"", Location=place)
        self._transfer(files[file], file)

    def _transfer(self, data: bytes, file: str) -> None:
        tag = {"ETag": f'"{_key(data)}"', "Last-Modified": "x"}
        if self.command == "HEAD":
            return self._send(200, data, **tag)
        self.hub.transfers[file] += 1
        if self.hub.statuses.get(file):
            return self._send(self.hub.statuses[file].pop(0), b"")
        asked = self.headers.get("Range")
        start, end = 0, len(data)
        if asked and not self.hub.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
        self.hub.starts.setdefault(file, []).append(start)
        if self.hub.damaged.get(file):
            data = self.hub.damaged[file].pop(0)
            end = len(data)
        if asked and start >= len(data):
            return self._send(416, b"")
        body = data[start:end]
        self.send_response(206 if asked and not self.hub.ignores_ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        if asked and not self.hub.ignores_ranges:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        for name, value in tag.items():
            self.send_header(name, value)
        self.end_headers()
        self.hub.started.set()
        if self.hub.gate is not None and len(data) >= LARGE_BYTES:
            self.wfile.write(body[:1000])
            self.hub.gate.wait()
            body = body[1000:]
        if self.hub.stalls.get(file):
            self.wfile.write(body[: self.hub.stalls[file].pop(0)])
            self.hub.ended.wait()
            self.close_connection = True
            return
        if self.hub.cuts.get(file):
            self.wfile.write(body[: self.hub.cuts[file].pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, code: str = "", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def running_hub(repositories: dict[str, dict[str, dict[str, bytes]]]) -> Iterator[Hub]:
    """Serve until the block ends: the hub at one port, its store of large files at another."""
    hub = Hub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.url, hub.store_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        if hub.gate is not None:
            hub.gate.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def _key(data: bytes) -> str:
    if len(data) >= LARGE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _listed(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _key(data)}
    if len(data) >= LARGE_BYTES:
        entry["oid"] = "c" * 40
        entry["lfs"] = {"oid": _key(data), "size": len(data), "pointerSize": 134}
    return entry
