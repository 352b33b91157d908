"""A small server that speaks as much of the Hugging Face hub's protocol as streaming a parquet data set asks for."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `files` (path -> bytes) as a data set or model at `REVISION`; `requests` keeps the questions."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository, self.files = repository, files
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HubServer:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        api = f"/api/datasets/{self.server.repository}"
        path = self.path.split("?")[0].replace("%2F", "/")
        if resolved := re.fullmatch(rf"(?:/datasets)?/{self.server.repository}/resolve/(?:{REVISION}|main)/(.+)", path):
            self._file(resolved[1])
        elif path.replace("/models/", "/datasets/") in (api, f"{api}/revision/{REVISION}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json(
                {"id": self.server.repository, "sha": REVISION, "private": False, "tags": [], "siblings": siblings}
            )
        elif tree := re.fullmatch(rf"{api}/tree/{REVISION}/?(.*)", path):
            self._json([entry for entry in self._entries() if entry["path"].startswith(tree[1])])
        elif path == f"{api}/paths-info/{REVISION}":
            wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
            self._json([entry for entry in self._entries() if entry["path"] in wanted])
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _entries(self) -> list[dict[str, object]]:
        files = self.server.files.items()
        folders = {name.rsplit("/", 1)[0] for name in self.server.files if "/" in name}
        return [
            *(
                {"type": "directory", "path": name, "oid": sha256(name.encode()).hexdigest()[:40], "size": 0}
                for name in folders
            ),
            *(
                {"type": "file", "path": name, "oid": sha256(data).hexdigest()[:40], "size": len(data)}
                for name, data in files
            ),
        ]

    def _file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        self._send(206 if wanted else 200, data, headers)

    def _json(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass
